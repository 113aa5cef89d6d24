"""Agreement: at protect(), all ranks have built the same, and replicas hold the same values, to the last bit.

A rank that differs could not be restored from another one, nor be a source for it. It is found out at the start, where
it can be told which tensor it is, and not at the first fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import torch
import torch.distributed as dist

from torchrelay.errors import StateMismatchError
from torchrelay.worker.agreement.gate import world_group
from torchrelay.worker.state import layout
from torchrelay.worker.state.parts import ContainerPart, GeneratorPart, Part
from torchrelay.worker.state.saved import SavedPart
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import tree
from torchrelay.worker.tensors.digest import Digest

MAX_LINES = 20_000
REMEDY = "Let all ranks build the same, from the same seed or checkpoint; tell shards apart with Options(shard=...)"


class _Told(msgspec.Struct, array_like=True):
    """What a rank says of itself."""

    shard: str
    built: str
    values: str
    asked: str = ""


def check_agreement(state: State, shard: str, asked: str = "") -> list[int]:
    """Collective over all ranks. Raises `StateMismatchError` on each if replicas differ, or `asked` of any two ranks.

    Returns the ranks of whose state there is no replica.
    """
    values = value_lines(state)
    mine = _Told(shard, state.fingerprint(), digest_of(values), asked)
    everyone = [msgspec.msgpack.decode(data, type=_Told) for data in gather(msgspec.msgpack.encode(mine))]
    for rank, told in enumerate(everyone):
        if told.asked != everyone[0].asked:
            raise StateMismatchError(
                f"rank {rank} calls protect() with {told.asked}, and rank 0 with {everyone[0].asked}: let them be equal"
            )
    _check_replicas([told.shard for told in everyone])
    _compare(everyone, lambda told: told.built, state.description(), "has built something else than", REMEDY)
    _compare(everyone, lambda told: told.values, values, "holds other values than", REMEDY)
    holders = Counter(told.shard for told in everyone)
    return [rank for rank, told in enumerate(everyone) if len(everyone) > 1 and holders[told.shard] == 1]


def tell(shard: str, lines: list[str]) -> list[tuple[str, str]]:
    """Collective over all ranks: of each the name of its shard, and a digest of its lines."""
    mine = msgspec.msgpack.encode((shard, digest_of(lines)))
    return [msgspec.msgpack.decode(data, type=tuple[str, str]) for data in gather(mine)]


def lines_of_all(lines: list[str]) -> list[list[str]]:
    """Collective over all ranks: the lines of each."""
    return [msgspec.msgpack.decode(data, type=list[str]) for data in _gather_lines(lines)]


def compare(shard: str, lines: list[str], difference: str, remedy: str) -> None:
    """Collective over all ranks. Raises `StateMismatchError` on each if one has other lines than one of its shard.

    `difference`: what is the matter with the one, as seen from the other ("holds other values than").
    """
    mine = _Told(shard, "", digest_of(lines))
    everyone = [msgspec.msgpack.decode(data, type=_Told) for data in gather(msgspec.msgpack.encode(mine))]
    _compare(everyone, lambda told: told.values, lines, difference, remedy)


def _check_replicas(named: list[str]) -> None:
    """Ranks that are named as replicas must name the same ones. Raises `StateMismatchError` if not."""
    for rank, shard in enumerate(named):
        for other in layout.ranks_of(shard) or ():
            if other >= len(named) or named[other] != shard:
                seen = named[other] if other < len(named) else "nothing"
                raise StateMismatchError(
                    f"rank {rank} sees its replicas in {shard}, and rank {other} in {seen}: set Options(shard=...)"
                )


def value_lines(state: State) -> list[str]:
    """A line with a digest for each part whose values must be equal on all replicas.

    Generators are a rank's own. What save() returns is left out: it may be slow, and ranks may call it at other times.
    """
    return [f"{part.path}: {_digest(part)}" for part in state.flat() if not isinstance(part, GeneratorPart | SavedPart)]


def _digest(part: Part) -> str:
    given = part.give()
    data, tensors = tree.encode(given["plain"] if isinstance(part, ContainerPart) else given, part.path, canonical=True)
    digest = Digest()
    digest.add(data)
    for tensor in tensors:
        digest.add_tensor(tensor)
    return digest.text()


def digest_of(lines: list[str]) -> str:
    """One digest of all lines."""
    digest = Digest()
    digest.add("\n".join(lines).encode())
    return digest.text()


def _compare(
    everyone: list[_Told], aspect: Callable[[_Told], str], lines: list[str], difference: str, remedy: str
) -> None:
    """Raises `StateMismatchError` if a rank differs from the first one with the same shard, naming the first line."""
    seen: dict[str, int] = {}
    differing = [
        (rank, first)
        for rank, told in enumerate(everyone)
        if aspect(everyone[first := seen.setdefault(told.shard, rank)]) != aspect(told)
    ]
    if not differing:
        return
    described = lines_of_all(lines)
    rank, first = differing[0]
    what = _first_difference(described[first], described[rank])
    raise StateMismatchError(f"rank {rank} {difference} rank {first}: {what}. {remedy}")


def _first_difference(expected: list[str], found: list[str]) -> str:
    for one, other in zip(expected, found, strict=False):
        if one != other:
            return f"{other} instead of {one}"
    return f"{len(found)} parts instead of {len(expected)}"


def _gather_lines(lines: list[str]) -> list[bytes]:
    return gather(msgspec.msgpack.encode(lines[:MAX_LINES]))


def gather(data: bytes) -> list[bytes]:
    """Everybody's bytes, by rank. Plain tensors, so that nothing is unpickled."""
    group, device = world_group()
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(group.size())]
    dist.all_gather(sizes, size)
    longest = max(int(one.item()) for one in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    found = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(found, padded)
    return [one[: int(length.item())].cpu().numpy().tobytes() for one, length in zip(found, sizes, strict=True)]
