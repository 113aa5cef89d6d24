"""Small trainings for tests of the backend "torchrelay"; the first argument is the puppet's `Actions`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.scripts.groups_ranks import Actions

BATCH = 8


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 300),
        torch.nn.BatchNorm1d(300),
        torch.nn.GELU(),
        torch.nn.Linear(300, 300),
        torch.nn.LayerNorm(300),
        torch.nn.Linear(300, 10),
    )


def train(wrapped: Any, optimizer: torch.optim.Optimizer, rank: int, steps: int) -> list[torch.Tensor]:
    """Losses of this rank, on data of its own."""
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(steps):
        inputs = torch.rand(BATCH, 64, generator=generator)
        targets = torch.randint(0, 10, (BATCH,), generator=generator)
        loss = torch.nn.functional.cross_entropy(wrapped(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def ddp(a: Actions, backend: str, steps: int) -> list[torch.Tensor]:
    """Losses and final parameters."""
    group = None if backend == "torchrelay" else a.kept["gloo"]
    wrapped = DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.1)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    losses = train(wrapped, optimizer, a.rank, steps)
    return [*losses, *(one.detach() for one in (*wrapped.module.parameters(), *wrapped.module.buffers()))]


def ddp_with_hook(a: Actions, steps: int) -> list[torch.Tensor]:
    """With a communication hook, whose callback is chained to the backend's future."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.1)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-2)
    return train(wrapped, optimizer, a.rank, steps)


def fsdp(a: Actions, backend: str, steps: int, shape: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """The same, with parameters in shards over a mesh (of one dimension, or of two: HSDP)."""
    shape = shape or (a.world_size,)
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override={name: backend for name in names})
    sharded = model()
    for layer in sharded:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    losses = train(sharded, optimizer, a.rank, steps)
    torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
    wholes = [one.full_tensor() if isinstance(one, DTensor) else one for one in sharded.parameters()]
    return [*losses, *(one.detach() for one in wholes)]


def digest(a: Actions, how: str, *arguments: Any, **named: Any) -> tuple[int, list[float]]:
    """Of all tensors that a training gives, on all ranks; and this rank's losses."""
    import xxhash

    found = globals()[how](a, *arguments, **named)
    mine = xxhash.xxh3_64_intdigest(b"".join(one.contiguous().numpy().tobytes() for one in found))
    gathered: list[Any] = [None] * a.world_size
    dist.all_gather_object(gathered, mine)
    return hash(tuple(gathered)), [one.item() for one in found if one.dim() == 0]


def ddp_until_cut(a: Actions) -> None:
    """Trains until a collective fails: what C++ raises then."""
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-2)
    a.kept["steps"] = 0
    while True:
        train(wrapped, optimizer, a.rank, 1)
        a.kept["steps"] += 1


def steps(a: Actions) -> int:
    return int(a.kept.get("steps", 0))
