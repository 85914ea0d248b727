"""Encrypted pages: each layer slice sealed by AES-256-GCM, under its page's own key.

A slot::

    0    nonce, 12 random bytes, new for each slice that is ever sealed
    12   the slice, encrypted
    -16  GCM's tag, over it and over the key's name and the layer

From the store's secret and the name of a page's key, HMAC-SHA256 derives, under two
labels, the page's AES key and the hash that the inner store knows it by. So:

- Another secret looks in another place: a wrong one finds nothing, and harms nothing.
- A page's hash covers its namespace: no two namespaces have a page's key in common,
  also where they have one secret.
- A nonce must never be used twice under one key. A page has a few slices a put, and
  is put again only once it was evicted: among so few, 96 random bits do not meet. They
  must not be derived from the page's name: two runs of a model differ in the last bit
  of a page, and one nonce for both would give away the difference, and the tag's key.
- Bytes moved to another page, layer, model or dtype do not fit their tag.

What is not hidden: how many pages there are, which of them are of one namespace, their
sizes and shards, when each is written and read; who sees both runs sees that a page is
the same one. Nor does anything
keep whoever can write the store from deleting pages, or from putting back an older copy
of a page or a slice: of the same tokens, under the same key. The secret is in this
process's memory, and so are the pages.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from asyncache.core import TAG_BYTES, Namespace, PageHash, PageKey
from asyncache.stores._abc import Store
from asyncache.stores._coded import Codec, CodedStore, Coder
from asyncache.stores._extras import load_extra
from asyncache.stores._namespaces import by_tag

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_KEY_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16
_LAYER = struct.Struct("<Q")


class EncryptedStore(CodedStore):
    """Pages encrypted with AES-256-GCM, in another store.

    As in ``EncryptedStore(FileStore(path), key=secrets.token_bytes(32))``, or with a
    key a namespace: ``key={"tenant-a": ..., "tenant-b": ...}``. Pages written under
    another key are a MISS; bytes that anybody changed are CORRUPT. The head of the
    module says what is protected, and what is not.

    Whoever drops a key has dropped its pages. A new key finds nothing: to change it,
    change it, and the cache fills anew.

    Args:
        inner: Keeps the encrypted pages; this store opens and closes it.
        key: 32 random bytes: not a password, nor made of one without a slow hash. Or
            those of each namespace: nothing is kept of one that is not there.
        num_threads: Threads that decrypt; half as many encrypt.

    Raises:
        StoreError: If the extra ``crypt`` is not installed.
        TypeError: If a key is not bytes.
        ValueError: If it has another length, two namespaces have one tag, or
            ``num_threads`` is below 1.
    """

    def __init__(
        self,
        inner: Store,
        *,
        key: bytes | Mapping[Namespace, bytes],
        num_threads: int = 4,
    ) -> None:
        keys = by_tag(key) if isinstance(key, Mapping) else {}
        for one in keys.values() if isinstance(key, Mapping) else [key]:
            if not isinstance(one, bytes):
                raise TypeError(f"key must be bytes, not {type(one).__name__}")
            if len(one) != _KEY_BYTES:
                raise ValueError(f"key must have {_KEY_BYTES} bytes, not {len(one)}")
        every = None if isinstance(key, Mapping) else key
        super().__init__(inner, _AesGcm(keys, every), num_threads=num_threads)


class _AesGcm(Codec):
    name = "aesgcm2"

    def __init__(
        self, secrets_by_tag: Mapping[bytes, bytes], every: bytes | None
    ) -> None:
        aead = "cryptography.hazmat.primitives.ciphers.aead"
        user = "EncryptedStore"
        self._secrets = secrets_by_tag
        self._every = every
        self._cipher = load_extra(aead, extra="crypt", user=user).AESGCM
        errors = load_extra("cryptography.exceptions", extra="crypt", user=user)
        self.broken: type[Exception] = errors.InvalidTag

    def takes(self, key: PageKey) -> bool:
        return self._secret(key) is not None

    def page_hash(self, key: PageKey) -> PageHash:
        return PageHash(key.tag + self._derive(b"name", key)[TAG_BYTES:])

    def slot_bytes(self, layer_bytes: int) -> Sequence[int]:
        return [_NONCE_BYTES + layer_bytes + _TAG_BYTES]

    def coder(self) -> Coder:
        return _AesGcmCoder(self)

    def cipher(self, key: PageKey) -> AESGCM:
        """Return the cipher of one page."""
        cipher: AESGCM = self._cipher(self._derive(b"key", key))
        return cipher

    def _derive(self, label: bytes, key: PageKey) -> bytes:
        secret = self._secret(key)
        assert secret is not None
        message = b"asyncache/aes-gcm/2/" + label + b"/" + key.name.encode()
        return hmac.digest(secret, message, "sha256")

    def _secret(self, key: PageKey) -> bytes | None:
        return self._secrets.get(key.tag, self._every)


class _AesGcmCoder(Coder):
    def __init__(self, codec: _AesGcm) -> None:
        self._codec = codec

    def encode(self, key: PageKey, sources: Sequence[memoryview]) -> bytearray:
        cipher = self._codec.cipher(key)
        page = bytearray()
        for layer, source in enumerate(sources):
            nonce = secrets.token_bytes(_NONCE_BYTES)
            page += nonce
            page += cipher.encrypt(nonce, source, _binding(key, layer))
        return page

    def decode(
        self,
        key: PageKey,
        layers: range,
        slots: Sequence[memoryview],
        targets: Sequence[memoryview],
    ) -> bool:
        cipher = self._codec.cipher(key)
        for layer, slot, target in zip(layers, slots, targets, strict=True):
            nonce, sealed = slot[:_NONCE_BYTES], slot[_NONCE_BYTES:]
            try:
                target[:] = cipher.decrypt(nonce, sealed, _binding(key, layer))
            except self._codec.broken:
                return False
        return True


def _binding(key: PageKey, layer: int) -> bytes:
    return _LAYER.pack(layer) + key.name.encode()
