"""Small collectives, and those in which each pair has something of its own to say: from rank to rank without a detour.

What is small is copied and sent from the copy: nobody waits until it has got through, only for what is to come. Values
are put together in the order of the ranks, or along one and the same tree.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from torchrelay.netpath.native.binding import NetError
from torchrelay.netpath.transport.mesh import MOST_PAUSE_S, Mesh, Stream
from torchrelay.netpath.transport.reduction import Reduction

SMALL = 64 << 10  # bytes that a rank sends to each other one at most; more goes round the ring
MOST_RANKS = 8  # with more, small values go along a tree
PIECE = 16 << 20  # bytes of a message, the most that is allowed whatever the settings
MOST_PIECES = 32
ANSWER_S = 0.5  # for an answer when the time is over

Parts = Mapping[int, torch.Tensor]  # by rank


def exchange(mesh: Mesh, out: Parts, into: Parts, until: float, *, copied: bool = False) -> None:
    """Send and receive at the same time. `copied`: what is sent stays as it is, so nobody need wait for it."""
    # All connect before they wait for others to connect.
    ways_out = {peer: mesh.to(peer, until) for peer, part in out.items() if part.numel()}
    ways_in = {peer: mesh.of(peer, until) for peer, part in into.items() if part.numel()}
    for peer, way in ways_in.items():
        for piece in pieces(into[peer]):
            way.post(piece, until)
    for peer, way in ways_out.items():
        for piece in pieces(out[peer]):
            way.post(piece, until)
    for way in ways_in.values():
        way.finish(until)
    if not copied:
        for way in ways_out.values():
            way.finish(until)


def pieces(part: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut a tensor into messages, the same at both ends; none if it is empty."""
    step = max(PIECE // part.element_size(), -(-part.numel() // MOST_PIECES))
    for start in range(0, part.numel(), step):
        yield part[start : start + step]


def others(mesh: Mesh) -> list[int]:
    """All ranks but this one, each rank beginning with the next: so not all send to the same one first."""
    return [(mesh.rank + step) % mesh.size for step in range(1, mesh.size)]


# ---------------------------------------------------------------- reducing


def all_reduce(mesh: Mesh, values: torch.Tensor, reduction: Reduction, until: float) -> None:
    """Put the values of all ranks together, in place."""
    if mesh.size > MOST_RANKS:
        _tree_reduce(mesh, values, reduction, until)
        tree_broadcast(mesh, values, 0, until)
        return
    own = values.clone()
    came = {peer: torch.empty_like(values) for peer in others(mesh)}
    exchange(mesh, dict.fromkeys(came, own), came, until, copied=True)
    together(values, [own if rank == mesh.rank else came[rank] for rank in range(mesh.size)], reduction)


def reduce_scatter(
    mesh: Mesh, blocks: Sequence[torch.Tensor], result: torch.Tensor, reduction: Reduction, until: float
) -> None:
    """Put the ranks' values for this one together; `blocks` has those for each rank."""
    came = {peer: torch.empty_like(result) for peer in others(mesh)}
    exchange(mesh, {peer: blocks[peer].clone() for peer in came}, came, until, copied=True)
    mine = blocks[mesh.rank].clone()  # the result may lie in its place
    together(result, [mine if rank == mesh.rank else came[rank] for rank in range(mesh.size)], reduction)


def reduce(mesh: Mesh, values: torch.Tensor, root: int, reduction: Reduction, until: float) -> None:
    """Put the values of all ranks together at the root, in place; elsewhere they stay as they are."""
    if mesh.rank != root:
        exchange(mesh, {root: values.clone()}, {}, until, copied=True)
        return
    came = {peer: torch.empty_like(values) for peer in others(mesh)}
    exchange(mesh, {}, came, until)
    together(values, [values.clone() if rank == root else came[rank] for rank in range(mesh.size)], reduction)


def together(result: torch.Tensor, values: Sequence[torch.Tensor], reduction: Reduction) -> None:
    """Put values together in their order. `result` must be none of them."""
    if len(values) == 1:
        result.copy_(values[0])
    for number, value in enumerate(values[1:]):
        reduction.into(result, values[0] if number == 0 else result, value)
    reduction.finish(result)


def _tree_reduce(mesh: Mesh, values: torch.Tensor, reduction: Reduction, until: float) -> None:
    """To rank 0: in round k each rank whose number ends in k zeros takes in the one 2^k above."""
    came = torch.empty_like(values)
    distance = 1
    while distance < mesh.size:
        if mesh.rank & distance:
            exchange(mesh, {mesh.rank - distance: values.clone()}, {}, until, copied=True)
            return
        if mesh.rank + distance < mesh.size:
            exchange(mesh, {}, {mesh.rank + distance: came}, until)
            reduction.into(values, values, came)
        distance *= 2
    reduction.finish(values)


# ---------------------------------------------------------------- bringing


def tree_broadcast(mesh: Mesh, values: torch.Tensor, root: int, until: float) -> None:
    """From the root along a tree: who has it sends it on, at half the distance each time."""
    place = (mesh.rank - root) % mesh.size
    distance = 1 << (mesh.size - 1).bit_length()
    has = place == 0
    own = values
    while distance > 1:
        reach, distance = distance, distance // 2
        if has and place + distance < mesh.size and place % reach == 0:
            own = values.clone() if own is values else own
            exchange(mesh, {(mesh.rank + distance) % mesh.size: own}, {}, until, copied=True)
        elif not has and place % reach == distance:
            exchange(mesh, {}, {(mesh.rank - distance) % mesh.size: values}, until)
            has = True


def broadcast(mesh: Mesh, values: torch.Tensor, root: int, until: float) -> None:
    """From the root to all."""
    if mesh.size > MOST_RANKS:
        tree_broadcast(mesh, values, root, until)
    elif mesh.rank == root:
        exchange(mesh, dict.fromkeys(others(mesh), values.clone()), {}, until, copied=True)
    else:
        exchange(mesh, {}, {root: values}, until)


def all_gather(mesh: Mesh, blocks: Sequence[torch.Tensor], until: float) -> None:
    """Bring the block of each rank to all; `blocks` has this rank's own in its place."""
    own = blocks[mesh.rank].clone()
    exchange(mesh, dict.fromkeys(others(mesh), own), {peer: blocks[peer] for peer in others(mesh)}, until, copied=True)


# ---------------------------------------------------------------- barriers


def barrier(mesh: Mesh, until: float) -> None:
    """Nobody leaves before all have come: in each round a rank hears of twice as many."""
    one, came = torch.ones(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    distance = 1
    while distance < mesh.size:
        out, into = (mesh.rank + distance) % mesh.size, (mesh.rank - distance) % mesh.size
        exchange(mesh, {out: one}, {into: came}, until, copied=True)
        distance *= 2


def monitored_barrier(mesh: Mesh, until: float, *, all_ranks: bool) -> None:
    """Rank 0 hears from each, and answers.

    Raises `TimeoutError` there, with who has not come (`all_ranks`: with all of them).
    """
    one, came = torch.ones(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    if mesh.rank:
        exchange(mesh, {0: one}, {}, until, copied=True)  # first, as rank 0 connects when it has heard all
        exchange(mesh, {}, {0: came}, until)
        return
    missing = _missing(mesh, until)
    if missing:
        raise TimeoutError(f"ranks {', '.join(map(str, missing if all_ranks else missing[:1]))} have not come")
    exchange(mesh, dict.fromkeys(others(mesh), one), {}, until, copied=True)


def _missing(mesh: Mesh, until: float) -> list[int]:
    """From which ranks nothing comes. Each is asked as soon as it has connected, whoever else is missing: what it says
    must be here before its own time is over, as it closes its connections then.
    """
    ways: dict[int, Stream] = {}
    silent: list[int] = []
    away = list(range(1, mesh.size))
    while away:
        for peer in tuple(away):
            try:
                way = mesh.of(peer, 0.0)  # if it has connected by now
                way.post(torch.zeros(1, dtype=torch.uint8), until)
            except TimeoutError:
                continue
            except NetError:
                silent.append(peer)
            else:
                ways[peer] = way
            away.remove(peer)
        left = until - time.monotonic()
        if left <= 0:
            break
        if away:
            time.sleep(min(MOST_PAUSE_S, left))
    if away:
        until += ANSWER_S  # who was asked last has only begun to answer
    for peer, way in ways.items():
        try:
            way.finish(until)
        except (TimeoutError, NetError):
            silent.append(peer)
    return sorted({*silent, *away})
