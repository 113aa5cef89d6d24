"""Digest: the fingerprint of bytes and tensors, xxh3-128, at memory speed and without a copy.

It tells a changed bit by accident from an unchanged one. It is no proof against someone who forges states.
"""

from __future__ import annotations

import torch
import xxhash

from torchrelay.worker.tensors import memory

SIZE = 16  # bytes of a digest
# Hashed at once: small enough to be still in the cache after it was received, large enough that calls cost nothing.
_CHUNK = 1 << 20


class Digest:
    """A digest of everything added so far; how it was cut into pieces does not matter, their order does."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def add(self, data: bytes | bytearray | memoryview) -> None:
        """Add bytes, as they lie in the buffer (which must be contiguous)."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _CHUNK):
            self._hash.update(view[start : start + _CHUNK])

    def add_tensor(self, tensor: torch.Tensor) -> None:
        """Add a tensor's values, in the order in which they lie in memory."""
        for view in memory.outgoing(tensor):
            self.add(view)

    def raw(self) -> bytes:
        """The 16 bytes."""
        return self._hash.digest()

    def text(self) -> str:
        """The 32 letters for logs and events."""
        return self._hash.hexdigest()
