"""Ranks agree: one minimum over int32 vectors a step."""

from asyncache.ranks._abc import Group
from asyncache.ranks._local import LocalGroup
from asyncache.ranks._solo import SoloGroup
from asyncache.ranks._torch import TorchGroup

__all__ = ["Group", "LocalGroup", "SoloGroup", "TorchGroup"]
