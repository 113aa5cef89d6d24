"""Sums: 64 bits for the bits of each live tensor, computed where it lies; equal for replicas that are equal.

    on the CPU     xxh3 over its memory, at once, without a copy
    on a device    integer sums of its words, by kernels that wait for nobody: they see what is there when they are
                   their turn on the stream, before any later update, and 8 bytes of each tensor come back in the end

One changed bit always shows in a sum of words. So that values which have moved show, too, each row of words counts with
a weight of its own. Sums of integers do not depend on the order in which they are added. Compare only what lies on the
same kind of device on both sides, as the tensors of replicas do. It is no proof against forgers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import xxhash

from torchrelay.worker.parallel import shards
from torchrelay.worker.tensors import memory

WORD = 8  # bytes of a word
ROW = 1024  # words that have one weight
_BITS = (1 << 64) - 1


def begin(tensors: Sequence[torch.Tensor]) -> Callable[[], list[int]]:
    """Begin with the sums of these tensors, as they are now; what is returned gives them, and waits if it must.

    Of a DTensor it is the part that lies here. Dense tensors, as `memory` carries them.
    """
    parts = [shards.local(tensor).detach() for tensor in tensors]
    begun = [None if part.device.type == "cpu" else on_device(part) for part in parts]
    known = [_in_memory(part) if there is None else 0 for part, there in zip(parts, begun, strict=True)]
    away = [there for there in begun if there is not None]
    together = torch.stack([each.to(away[0].device) for each in away]) if away else None

    def finish() -> list[int]:
        came = iter(together.tolist() if together is not None else ())
        return [now if there is None else next(came) & _BITS for now, there in zip(known, begun, strict=True)]

    return finish


def of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The sums, now."""
    return begin(tensors)()


def _in_memory(tensor: torch.Tensor) -> int:
    digest = xxhash.xxh3_64()
    for view in memory.outgoing(tensor):
        digest.update(view)
    return digest.intdigest()


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """One int64 on the tensor's device. Nothing here waits for the device."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for flat in memory.stretches(tensor):
        words, rest = _words(flat)
        whole = len(words) // ROW * ROW
        rows = words[:whole].view(-1, ROW).sum(1)
        total = total * 31 + (rows * _weights(rows)).sum() + words[whole:].sum() * (2 * len(rows) + 1)
        total = total * 31 + (rest * _weights(rest)).sum()
    return total


def _weights(of: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, 2 * len(of) + 1, 2, dtype=torch.int64, device=of.device)


def _words(flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes as words, and those that are left over, a word each. The same wherever in memory they lie."""
    cut = flat.numel() // WORD * WORD
    body = flat[:cut] if flat.storage_offset() % WORD == 0 else flat[:cut].clone()
    return body.view(torch.int64), flat[cut:].to(torch.int64)
