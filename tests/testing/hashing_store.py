"""A store that only the interpreter that wrote it can read, for a child to import."""

from __future__ import annotations

from asyncache.core import PageHash, PageKey
from asyncache.stores import FileStore, Store


class HashingStore(FileStore):
    """Names pages by what Python hashes their names to, and cannot list them so."""

    keys = Store.keys

    def same(self, key):
        text = "".join(str(hash((key.name, part))) for part in range(8))
        return PageKey(PageHash(text.encode()[:32]), key.space)

    async def contains(self, keys):
        return await super().contains([self.same(key) for key in keys])

    async def get_into(self, keys, targets, layers=None):
        same = [self.same(key) for key in keys]
        return await super().get_into(same, targets, layers)

    async def put(self, keys, sources):
        return await super().put([self.same(key) for key in keys], sources)

    async def remove(self, keys):
        await super().remove([self.same(key) for key in keys])
