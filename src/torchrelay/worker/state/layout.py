"""Layout: which other ranks hold the very state that this one holds, read off the mesh, placements and groups.

    a DTensor          the ranks of its mesh at the same place in every dimension that it is sharded over
    a tensor in DDP    the ranks of DDP's group; both, if a DTensor is in DDP
    of a pipeline      this rank alone if the pipeline spans all ranks; else it must be in DDP, or a DTensor
    of ZeRO            this rank alone, whatever else it holds: its optimizer's part is on no other
    any other          all ranks: they must hold equal values at protect(), or it is refused there; and after the first
                       steps, see `Early`

A rank's replicas are those that this is true of for all of its tensors. It is found out without asking anybody, as a
replacement must come to the same alone; `agreement` asks the others once whether they see it alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from torchrelay.worker.parallel import ddp, fsdp, pipeline, shards, zero
from torchrelay.worker.state.parts import named_tensors
from torchrelay.worker.state.state import State

ALL = "all"


def shard_name(state: State, rank: int, world_size: int) -> str:
    """By which replicas know one another: 'all', or the ranks that hold what this one holds, as in 'ranks 0,2'."""
    held = replicas(state, rank, world_size)
    return ALL if len(held) == world_size else "ranks " + ",".join(map(str, sorted(held)))


def ranks_of(shard: str) -> list[int] | None:
    """The ranks in a name of `shard_name`; None for 'all', and for a name that a script has given."""
    kind, _, listed = shard.partition(" ")
    if kind != "ranks" or not all(part.isdecimal() for part in listed.split(",")):
        return None
    return [int(part) for part in listed.split(",")]


def replicas(state: State, rank: int, world_size: int) -> frozenset[int]:
    """The ranks that hold every tensor of this rank's modules, itself included."""
    held = frozenset(range(world_size))
    wrapped = _in_ddp(state)
    if state.zeros() or any(pipeline.spans_all(stage) for stage, _ in _bare(state)):
        return frozenset({rank})
    for tensor in _tensors(state):
        held &= _holders(tensor, rank, wrapped.get(id(tensor), frozenset()), held) | {rank}
    return held


def supposed(state: State) -> list[tuple[str, torch.Tensor]]:
    """The trained tensors, by name, of which nothing but their values tells that all ranks hold the same."""
    wrapped = _in_ddp(state)
    return [
        (name, tensor)
        for name, tensor in state.parameters()
        if tensor.requires_grad and not shards.is_shard(tensor) and id(tensor) not in wrapped
    ]


def _holders(tensor: torch.Tensor, rank: int, wrapped: frozenset[int], anybody: frozenset[int]) -> frozenset[int]:
    if shards.is_shard(tensor):
        return _on_the_mesh(tensor, rank) | wrapped
    return wrapped or anybody


def _on_the_mesh(tensor: torch.Tensor, rank: int) -> frozenset[int]:
    """The ranks of its mesh that hold the same part."""
    mesh = tensor.device_mesh.mesh  # type: ignore[attr-defined]
    places = (mesh == rank).nonzero().tolist()
    if not places:
        return frozenset()
    replicated = [told == (shards.REPLICATE,) for told in shards.describe(tensor).placements]
    at = tuple(slice(None) if free else place for free, place in zip(replicated, places[0], strict=True))
    return frozenset(int(rank) for rank in mesh[at].reshape(-1))


def _in_ddp(state: State) -> dict[int, frozenset[int]]:
    """By the id of a tensor that a DDP wrapper takes care of, the ranks of that wrapper's group."""
    return {
        id(tensor): frozenset(dist.get_process_group_ranks(wrapper.process_group))
        for wrapper in state.ddps()
        for name, tensor in named_tensors(wrapper.module)
        if name not in wrapper.parameters_to_ignore
    }


def _bare(state: State) -> Iterator[tuple[Any, str]]:
    """Parameters of pipeline stages of which neither DDP nor a placement says who else holds them: stage and name."""
    wrapped = _in_ddp(state)
    for stage in state.pipeline.stages():
        for name, tensor in fsdp.named_parameters(stage.submod):
            if not shards.is_shard(tensor) and id(tensor) not in wrapped:
                yield stage, name


def _tensors(state: State) -> Iterable[torch.Tensor]:
    for _, module in state.modules():
        for _, tensor in named_tensors(module):
            yield tensor


# ---------------------------------------------------------------- what is not supported


def refusal(state: State) -> tuple[str, str] | None:
    """Why a run that is spread over ranks in this way cannot be protected, and the remedy; None if it can."""
    for wrapper in state.ddps():
        why = ddp.refusal(wrapper)
        if why is not None:
            return why, "see docs: what is supported"
        if ddp.has_trained(wrapper):
            return (
                "a DDP module has been through backward passes before protect(): a worker that takes over a rank is "
                "alone there",
                "call protect() before; look for a learning rate and the like on the module that is not wrapped yet, "
                "or in a run of its own",
            )
    for path, module in state.modules():
        why = fsdp.refusal(module)
        if why is not None:
            return f"{path}: {why}", "see docs: what is supported"
        if any(map(_is_fsdp1, module.modules())):
            return f"{path} is wrapped in FullyShardedDataParallel (FSDP1)", "use fully_shard (FSDP2)"
    return zero.refusal(state.zeros()) or pipeline.refusal(state.pipeline, state.ddps())


def blind(state: State, given: str | None) -> tuple[str, str] | None:
    """Why a rank's replicas cannot be seen, and must be named, or named otherwise, with the remedy; None if not."""
    if given is not None:
        if state.zeros():
            return "with a ZeroRedundancyOptimizer no rank has a replica", "leave shard= out"
        return None
    for stage, name in _bare(state):
        if not pipeline.spans_all(stage):
            return (
                f"it cannot be seen which other ranks hold {name} of stage {stage.stage_index} of a pipeline",
                "wrap the stage in DDP or fully_shard over these ranks, or name this rank's part: Options(shard=...)",
            )
    # With save() and load() nobody sees what a rank holds.
    if state.saves and state.fsdp_states():
        return (
            "with save= and load= it cannot be seen which ranks hold the same shards of FSDP2",
            "pass model= and optimizer= instead, or name what this rank holds: Options(shard=...)",
        )
    return None


def _is_fsdp1(module: torch.nn.Module) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return kind is not None and isinstance(module, kind)
