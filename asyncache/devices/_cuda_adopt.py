"""Which tensors are memory of a GPU: the driver knows, whatever torch calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncache.core import DeviceError
from asyncache.devices._cuda_api import SUCCESS, Context, cuda

if TYPE_CHECKING:
    import torch


def check_on_gpu(context: Context, tensor: torch.Tensor, name: str) -> None:
    """Check that a tensor is memory of a context's GPU.

    Raises:
        DeviceError: If it is not.
    """
    kind = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    where = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    for address in (tensor.data_ptr(), tensor.data_ptr() + _reach(tensor) - 1):
        code, value = cuda.cuPointerGetAttribute(kind, address)
        device = cuda.CUmemorytype.CU_MEMORYTYPE_DEVICE
        if code != SUCCESS or int(value) != int(device):
            raise DeviceError(f"{name} must be memory of a GPU, not of {tensor.device}")
        code, ordinal = cuda.cuPointerGetAttribute(where, address)
        if code != SUCCESS or int(ordinal) != context.ordinal:
            raise DeviceError(
                f"{name} must be memory of GPU {context.ordinal}, not of {ordinal}"
            )


def _reach(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first to its last."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    items = sum((count - 1) * stride for count, stride in axes) + 1
    return items * tensor.element_size()
