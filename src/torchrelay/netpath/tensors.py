"""Tensors as collectives want them: on the CPU, dense, in one stretch, and written as C++ would, unseen by autograd."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

Tensors = list[torch.Tensor]

MOST_TAG = 2**31 - 1  # c10d's tags are of 32 bits


def checked(what: str, tensors: Iterable[torch.Tensor]) -> None:
    """Raise `ValueError` for what cannot be sent."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{what}: a tensor on {tensor.device}; the torchrelay backend carries CPU tensors only: "
                "for GPUs use NCCL, with torchrelay's plugin (torchrelay net env)"
            )
        if tensor.layout != torch.strided:
            raise ValueError(f"{what}: a tensor with layout {tensor.layout}; only dense tensors can be sent")


def tagged(what: str, tag: int) -> None:
    """Raise `ValueError` for a tag that no message can have."""
    if not 0 <= tag <= MOST_TAG:
        raise ValueError(f"{what}: tag {tag}; give one from 0 to {MOST_TAG}")


def only(what: str, tensors: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """The one tensor that a collective is for. Raises `ValueError`."""
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    if len(tensors) != 1:
        raise ValueError(f"{what}: {len(tensors)} tensors; give one")
    checked(what, tensors)
    return tensors[0]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its values in one stretch, for reading: the same memory if it lies so."""
    return tensor.data.resolve_conj().resolve_neg().contiguous().view(-1)


def _lies_flat(tensor: torch.Tensor) -> bool:
    """Whether its memory is its values in one stretch; of a conjugate, or a negative, it may be those of the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class Written:
    """Tensors that a collective writes, each in one stretch; what does not lie so is copied there by `put_back`."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.parts = [flat(tensor) for tensor in tensors]
        self._elsewhere = [
            (tensor.data, part) for tensor, part in zip(tensors, self.parts, strict=True) if not _lies_flat(tensor)
        ]

    def put_back(self) -> None:
        for tensor, part in self._elsewhere:
            tensor.copy_(part.view(tensor.shape))


def rows(what: str, whole: torch.Tensor, count: int) -> torch.Tensor:
    """Cut it into equal parts, one for each rank. Raises `ValueError` if that is not possible."""
    if whole.numel() % count:
        raise ValueError(f"{what}: {whole.numel()} elements cannot be shared equally by {count} ranks")
    return whole.view(count, -1)


def by_splits(what: str, values: torch.Tensor, shape: torch.Size, splits: Sequence[int], count: int) -> Tensors:
    """Cut values along their first dimension, as `splits` say; equally if it is empty. Raises `ValueError`."""
    if not splits:
        if shape[0] % count:
            raise ValueError(f"{what}: {shape[0]} rows cannot be shared equally by {count} ranks")
        splits = [shape[0] // count] * count
    if len(splits) != count or sum(splits) != shape[0]:
        raise ValueError(f"{what}: splits {list(splits)} do not cut {shape[0]} rows for {count} ranks")
    row = values.numel() // shape[0] if shape[0] else 0
    return list(torch.split(values, [split * row for split in splits]))


def alike(what: str, parts: Sequence[torch.Tensor]) -> None:
    """Raise `ValueError` if they are not all of one type."""
    kinds = {part.dtype for part in parts}
    if len(kinds) > 1:
        raise ValueError(f"{what}: tensors of {', '.join(sorted(map(str, kinds)))}; give all the same type")


def only_list(what: str, lists: Sequence[Sequence[torch.Tensor]] | Sequence[torch.Tensor], count: int) -> Tensors:
    """The one list of tensors that a collective is for, one for each rank. Raises `ValueError`."""
    if lists and isinstance(lists[0], torch.Tensor):
        found = [part for part in lists if isinstance(part, torch.Tensor)]
    elif len(lists) == 1:
        found = list(lists[0])
    else:
        raise ValueError(f"{what}: {len(lists)} lists of tensors; give one")
    if len(found) != count:
        raise ValueError(f"{what}: {len(found)} tensors for {count} ranks")
    checked(what, found)
    return found
