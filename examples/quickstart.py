"""A prompt's pages go to files and come back in another cache: no model, one second."""

import asyncio
import tempfile

from asyncache import AttentionPool, CpuDevice, FileStore, KVCache, KVLayout

KV = AttentionPool(num_layers=4, num_kv_heads=2, head_dim=32, dtype="float32")
LAYOUT = KVLayout(model="quickstart", page_tokens=16, pools=(KV,))


async def serve(directory: str, prompt: list[int]) -> float:
    """Answer a prompt with a cache of its own; only the files outlive it."""
    device = CpuDevice(LAYOUT, num_pages=64)
    store = FileStore(directory)
    async with KVCache(LAYOUT, device=device, store=store) as cache:
        with cache.request(prompt) as request:
            hit = await request.restore()  # what is resident or stored
            await hit.wait()  # its bytes are in the pages
            request.extend(len(prompt))  # pages for the rest
            pages = list(request.page_table["kv"])
            with cache.forward([request]):  # the model runs in here
                first = hit.num_tokens // 16
                device.tensor("kv")[pages[first:]] = float(len(prompt))
            request.commit(len(prompt))  # from now on it is everyone's
            print(f"{hit.num_tokens} of {len(prompt)} tokens came from the store")
            await cache.drain()
            return float(device.tensor("kv")[pages].sum())


def main() -> None:
    """Serve the same prompt twice, with a restart in between."""
    with tempfile.TemporaryDirectory() as directory:
        prompt = list(range(100))
        before = asyncio.run(serve(directory, prompt))
        assert asyncio.run(serve(directory, prompt)) == before


if __name__ == "__main__":
    main()
