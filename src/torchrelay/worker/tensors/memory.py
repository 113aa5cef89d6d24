"""Memory: the bytes of a tensor, to read and to write, without a copy wherever its layout allows.

A dense tensor, in whatever order of dimensions, is one stretch of memory and is used as it lies. Expanded dimensions
count once. A tensor with gaps is taken piece by piece. What is not in the CPU's memory goes through a small buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torchrelay.worker.hardware import device

SMALL = 16 << 10  # bytes of a tensor on an accelerator that is read as those on the CPU are
STAGE = 4 << 20  # bytes of one buffer for what cannot be reached directly

_KNOWN_TO_NUMPY = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}

# Where a tensor lies and how it is read: equal for two tensors that are the same memory seen the same way.
Place = tuple[str, int, torch.dtype, tuple[int, ...], tuple[int, ...]]


def refusal(tensor: torch.Tensor) -> str | None:
    """Why the bytes of this tensor cannot be carried, with the remedy; None if they can."""
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return "has no shape yet (a lazy module): run one forward pass before protect()"
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) or isinstance(tensor, torch.nn.Buffer)
    if not plain or not is_dense(tensor):
        kind = type(tensor).__name__ if not plain else str(tensor.layout).removeprefix("torch.") + " tensor"
        return f"is a {kind}: only plain dense tensors are carried; keep it outside, or give it as a plain tensor"
    if tensor.is_meta:
        return "is on the meta device and holds no values: materialise it before protect()"
    if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return "is quantized or lazily conjugated: call dequantize(), resolve_conj() or resolve_neg()"
    if _overlaps(_once(tensor)):
        return "overlaps itself (as_strided or unfold): clone it"
    return None


def place(tensor: torch.Tensor) -> Place | None:
    """Where the tensor lies; None for an empty one, which lies nowhere. A sparse or nested one is known by itself."""
    if not is_dense(tensor):
        return (str(tensor.device), id(tensor), tensor.dtype, (), ())
    if tensor.numel() == 0:
        return None
    return (str(tensor.device), tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), strides(tensor))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it has memory, a shape and strides: sparse tensors and nested ones lack some of them."""
    return tensor.layout == torch.strided and not tensor.is_nested


def bytes_in(tensor: torch.Tensor) -> int:
    """How large it is, of whatever layout; of a sparse one as many as its values have."""
    if tensor.layout == torch.sparse_coo:
        return int(tensor._values().nbytes)
    sparse = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
    return int((tensor.values() if tensor.layout in sparse else tensor).nbytes)


def is_near(tensor: torch.Tensor) -> bool:
    """Whether its values can be read in passing: on the CPU, or small on the accelerator, which is waited for then."""
    small = tensor.numel() * tensor.element_size() <= SMALL
    return tensor.is_cpu or (small and tensor.device.type == device.ACCELERATOR)


def is_held(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of values, and not one of the graph of this very step, of a model, or far away."""
    plain = not tensor.requires_grad and is_dense(tensor) and not tensor.is_inference()
    return plain and is_near(tensor)


def version_of(tensor: torch.Tensor) -> int:
    """How often it was written to. Torch does not count that for those of inference: -1."""
    return -1 if tensor.is_inference() else tensor._version


def near(tensor: torch.Tensor) -> torch.Tensor:
    """The same values on the CPU."""
    settle(tensor)
    return tensor if tensor.is_cpu else tensor.detach().cpu()


def settle(tensor: torch.Tensor) -> None:
    """Wait until all is done that may write to it: other streams of a script do, and copies to pinned memory."""
    if device.is_used() and (not tensor.is_cpu or tensor.is_pinned()):
        device.wait()


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides in elements, with 0 where a dimension has one element and its stride means nothing."""
    return tuple(step if size > 1 else 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def size(tensor: torch.Tensor) -> int:
    """How many bytes are carried for this tensor."""
    once = _once(tensor)
    return once.numel() * once.element_size()


def fill(to: torch.Tensor, values: torch.Tensor) -> bool:
    """Write values where a tensor lies; returns whether they have its shape. Expanded dimensions are written once."""
    if not is_dense(to) or to.shape != values.shape:
        return False
    for dimension, step in enumerate(strides(to)):
        if step == 0 and to.shape[dimension] > 1:
            to, values = to.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    with torch.no_grad():
        to.copy_(values)
    return True


def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros that look like this tensor. On the CPU their memory is found when it is first used, if it ever is."""
    if tensor.device.type != "cpu" or not tensor.numel() or not _ordered(tensor).is_contiguous():
        return torch.zeros_like(tensor)
    count = tensor.numel() * tensor.element_size()
    flat = torch.from_numpy(np.zeros(count, np.uint8)).view(tensor.dtype)  # of calloc(), unlike torch's own
    return torch.as_strided(flat, tensor.shape, tensor.stride())


def divisible(tensor: torch.Tensor) -> bool:
    """Whether any part of its bytes can be taken by itself: it lies in memory without gaps."""
    return _ordered(_once(tensor.detach())).is_contiguous()


def outgoing(tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> Iterator[memoryview]:
    """The tensor's bytes in a fixed order, as views that keep what they need alive. No copy if dense and on the CPU.

    `start`, `stop`: those bytes only, of a tensor that is `divisible`.
    """
    if tensor.is_cpu and tensor.dtype in _KNOWN_TO_NUMPY and tensor.is_contiguous() and tensor.numel():
        # Nearly all there is, in a third of the calls: replicas compare hundreds of small tensors.
        yield memoryview(cast(Any, tensor.detach().numpy().reshape(-1).view(np.uint8)[start:stop]))
        return
    for piece, direct in _pieces(tensor, start, stop):
        yield _view(piece if direct else piece.contiguous().cpu().view(-1).view(torch.uint8))


def incoming(
    tensor: torch.Tensor, start: int = 0, stop: int | None = None
) -> Iterator[tuple[memoryview, Callable[[], None] | None]]:
    """Where the bytes of `outgoing` belong, in its order, each with what to call when it is filled, if anything."""
    for piece, direct in _pieces(tensor, start, stop):
        if direct:
            yield _view(piece), None
        else:
            stage = torch.empty(piece.shape, dtype=piece.dtype)
            yield _view(stage.view(-1).view(torch.uint8)), _copier(piece, stage)


def places(tensor: torch.Tensor) -> list[tuple[int, int]] | None:
    """Address and bytes of each view of `outgoing`; None if some of them are copies."""
    found = list(_pieces(tensor))
    if not all(direct for _, direct in found):
        return None
    return [(piece.data_ptr(), piece.numel()) for piece, _ in found]


def stretches(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor's bytes in the order of `outgoing`, where they lie: flat, and views of it if it has no gaps."""
    ordered = _ordered(_once(tensor.detach()))
    if ordered.is_contiguous():
        yield _flat(ordered)
    elif ordered.dim() == 1:
        yield ordered.contiguous().view(torch.uint8)
    else:
        for row in ordered:
            yield from stretches(row)


def _copier(piece: torch.Tensor, stage: torch.Tensor) -> Callable[[], None]:
    def copy() -> None:
        piece.copy_(stage)

    return copy


def _view(flat: torch.Tensor) -> memoryview:
    return memoryview(cast(Any, flat.numpy()))


def _pieces(tensor: torch.Tensor, start: int = 0, stop: int | None = None) -> Iterator[tuple[torch.Tensor, bool]]:
    """The tensor's memory in order: flat bytes to use directly, or parts of it that must be staged."""
    ordered = _ordered(_once(tensor.detach()))
    if ordered.numel() == 0:
        return
    if ordered.is_contiguous():
        flat = _flat(ordered)[start:stop]
        if flat.device.type == "cpu":
            yield flat, True
        else:
            yield from ((part, False) for part in torch.split(flat, STAGE))
    elif ordered.dim() == 1:
        yield from ((part, False) for part in torch.split(ordered, STAGE // ordered.element_size()))
    else:
        for row in ordered:
            yield from _pieces(row)


def _flat(ordered: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, where they lie."""
    # Not view(-1): of a single element it keeps a stride that means nothing, and bytes cannot be seen through that.
    return ordered.as_strided((ordered.numel(),), (1,)).view(torch.uint8)


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with each expanded dimension cut to the one element it really has."""
    for dimension, (count, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if step == 0 and count > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its dimensions in the order in which they lie in memory, widest first."""
    if tensor.is_contiguous():
        return tensor
    steps = strides(tensor)
    # Stable: dimensions of one element keep their places, so both ends come to the same order.
    return tensor.permute(sorted(range(tensor.dim()), key=lambda dimension: -steps[dimension]))


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory. Strides that interleave without touching count as overlapping, too."""
    reach = 0
    for step, count in sorted((step, count) for count, step in zip(tensor.shape, tensor.stride(), strict=True)):
        if count > 1 and step <= reach:
            return True
        reach += step * (count - 1)
    return False
