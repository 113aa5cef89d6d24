"""Collectives over a mesh, on tensors in one stretch: small ones from rank to rank, large ones round the ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from torchrelay.netpath.collectives import rings
from torchrelay.netpath.transport import direct
from torchrelay.netpath.transport.direct import SMALL
from torchrelay.netpath.transport.mesh import Mesh
from torchrelay.netpath.transport.reduction import Reduction

Blocks = Sequence[torch.Tensor]


def _is_small(mesh: Mesh, nbytes: int) -> bool:
    return nbytes <= SMALL or mesh.size == 1


def all_reduce(mesh: Mesh, values: torch.Tensor, reduction: Reduction, until: float) -> None:
    """Put the values of all ranks together, in place."""
    if mesh.size == 1:
        reduction.finish(values)
        return
    way = direct if _is_small(mesh, values.nbytes) else rings
    way.all_reduce(mesh, values, reduction, until)


def reduce(mesh: Mesh, values: torch.Tensor, root: int, reduction: Reduction, until: float) -> None:
    """Put the values of all ranks together at the root; elsewhere they stay as they are."""
    if _is_small(mesh, values.nbytes):
        direct.reduce(mesh, values, root, reduction, until)
        return
    blocks = rings.equal(values, mesh.size)
    mine = torch.empty_like(blocks[mesh.rank])
    rings.reduce_scatter(mesh, blocks, mine, reduction, until)
    gather(mesh, mine, blocks, root, until)


def reduce_scatter(mesh: Mesh, blocks: Blocks, result: torch.Tensor, reduction: Reduction, until: float) -> None:
    """Put the values for this rank together; `blocks` has those for each rank, and stays as it is."""
    way = direct if _is_small(mesh, max(block.nbytes for block in blocks)) else rings
    way.reduce_scatter(mesh, blocks, result, reduction, until)


def broadcast(mesh: Mesh, values: torch.Tensor, root: int, until: float) -> None:
    """Bring the root's values to all."""
    way = direct if _is_small(mesh, values.nbytes) else rings
    way.broadcast(mesh, values, root, until)


def all_gather(mesh: Mesh, mine: torch.Tensor, blocks: Blocks, until: float) -> None:
    """Bring each rank's values to all; `blocks` has room for those of each."""
    _keep(mine, blocks[mesh.rank])
    few = mesh.size <= direct.MOST_RANKS and max(block.nbytes for block in blocks) <= SMALL
    way = direct if few or mesh.size == 1 else rings
    way.all_gather(mesh, blocks, until)


def gather(mesh: Mesh, mine: torch.Tensor, blocks: Blocks, root: int, until: float) -> None:
    """Bring each rank's values to the root; there `blocks` has room for those of each."""
    if mesh.rank == root:
        _keep(mine, blocks[root])
        direct.exchange(mesh, {}, {peer: blocks[peer] for peer in direct.others(mesh)}, until)
    else:
        _send(mesh, {root: mine}, {}, until)


def scatter(mesh: Mesh, blocks: Blocks, mine: torch.Tensor, root: int, until: float) -> None:
    """Bring to each rank what the root has for it in `blocks`."""
    if mesh.rank == root:
        _keep(blocks[root], mine)
        _send(mesh, {peer: blocks[peer] for peer in direct.others(mesh)}, {}, until)
    else:
        direct.exchange(mesh, {}, {root: mine}, until)


def all_to_all(mesh: Mesh, out: Blocks, into: Blocks, until: float) -> None:
    """Each rank has something for each."""
    _keep(out[mesh.rank], into[mesh.rank])
    others = direct.others(mesh)
    _send(mesh, {peer: out[peer] for peer in others}, {peer: into[peer] for peer in others}, until)


def _send(mesh: Mesh, out: Mapping[int, torch.Tensor], into: Mapping[int, torch.Tensor], until: float) -> None:
    """Exchange, without waiting for what is sent if it is small."""
    small = sum(part.nbytes for part in out.values()) <= SMALL
    parts = {peer: part.clone() for peer, part in out.items()} if small else out
    direct.exchange(mesh, parts, into, until, copied=small)


def _keep(mine: torch.Tensor, place: torch.Tensor) -> None:
    """Put the own values where they belong. Raises `ValueError` if there is not just so much room."""
    if mine.nbytes != place.nbytes:
        raise ValueError(f"{mine.nbytes} bytes of this rank do not fit where {place.nbytes} are expected")
    if mine.data_ptr() != place.data_ptr():
        place.copy_(mine)
