"""What tests of the backend "torchrelay" let puppets do; the first argument is the puppet's `Actions`.

The default group is ours; what Gloo would have done is asked of a group of Gloo's over the same ranks.
"""

from __future__ import annotations

import gc
import hashlib
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.scripts.groups_ranks import Actions
from torchrelay.netpath import backend, binding
from torchrelay.netpath.backend import TorchrelayGroup

SEED = 11


def init(
    actions: Actions, address: str, timeout_s: float = 60.0, reference: bool = True, alone: bool = False
) -> None:
    """The default group, and one of Gloo's to compare with."""
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=30))
    backend.make_alone(alone)
    dist.init_process_group(
        "torchrelay", store=dist.PrefixStore("first", store), rank=actions.rank, world_size=actions.world_size,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip
    actions.kept["client"] = store
    if reference:
        actions.kept["gloo"] = dist.new_group(backend="gloo")


def world() -> TorchrelayGroup:
    group = dist.group.WORLD
    assert isinstance(group, TorchrelayGroup)
    return group


# ---------------------------------------------------------------- each collective, beside Gloo's

Result = list[torch.Tensor]
OPS = {name: getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}


def values(rank: int, elements: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Random values of a rank, of which products of a few do not overflow."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.rand(elements, generator=generator, dtype=torch.float64).add(0.5).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (elements,), generator=generator).bool()
    return torch.randint(1, 4, (elements,), generator=generator).to(dtype)


def all_reduce(a: Actions, group: Any, elements: int, dtype: torch.dtype, op: str = "SUM") -> Result:
    tensor = values(a.rank, elements, dtype)
    dist.all_reduce(tensor, OPS[op], group)
    return [tensor]


def all_reduce_coalesced(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    tensors = [values(a.rank, elements + extra, dtype, extra) for extra in range(3)]
    opts = torch._C._distributed_c10d.AllreduceCoalescedOptions()
    group.allreduce_coalesced(tensors, opts).wait()
    return tensors


def reduce(a: Actions, group: Any, elements: int, dtype: torch.dtype, op: str = "SUM") -> Result:
    tensor = values(a.rank, elements, dtype)
    dist.reduce(tensor, a.world_size - 1, OPS[op], group)
    return [tensor] if a.rank == a.world_size - 1 else []


def broadcast(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    found = []
    for root in range(a.world_size):
        tensor = values(a.rank, elements, dtype, root)
        dist.broadcast(tensor, root, group)
        found.append(tensor)
    return found


def all_gather(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    found = [torch.zeros(elements, dtype=dtype) for _ in range(a.world_size)]
    dist.all_gather(found, values(a.rank, elements, dtype), group)
    return found


def all_gather_into(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    found = torch.zeros(elements * a.world_size, dtype=dtype)
    group._allgather_base(found, values(a.rank, elements, dtype)).wait()
    return [found]


def all_gather_objects(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    found: list[Any] = [None] * a.world_size
    dist.all_gather_object(found, {"rank": a.rank, "values": values(a.rank, elements, dtype)}, group)
    assert [one["rank"] for one in found] == list(range(a.world_size))
    return [one["values"] for one in found]


def broadcast_objects(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    found: list[Any] = [values(a.rank, elements, dtype)]
    dist.broadcast_object_list(found, 1, group)
    return found


def reduce_scatter(a: Actions, group: Any, elements: int, dtype: torch.dtype, op: str = "SUM") -> Result:
    found = torch.zeros(elements, dtype=dtype)
    parts = [values(a.rank, elements, dtype, salt) for salt in range(a.world_size)]
    dist.reduce_scatter(found, parts, OPS[op], group)
    return [found, *parts]  # which must be as they were


def reduce_scatter_tensor(a: Actions, group: Any, elements: int, dtype: torch.dtype, op: str = "SUM") -> Result:
    found = torch.zeros(elements, dtype=dtype)
    opts = torch._C._distributed_c10d.ReduceScatterOptions()
    opts.reduceOp = OPS[op]
    whole = values(a.rank, elements * a.world_size, dtype)
    group._reduce_scatter_base(found, whole, opts).wait()
    return [found, whole]


def gather(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    found = [torch.zeros(elements, dtype=dtype) for _ in range(a.world_size)] if a.rank == 1 else None
    dist.gather(values(a.rank, elements, dtype), found, 1, group)
    return found or []


def scatter(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    found = torch.zeros(elements, dtype=dtype)
    parts = [values(0, elements, dtype, salt) for salt in range(a.world_size)] if a.rank == 0 else None
    dist.scatter(found, parts, 0, group)
    return [found]


def all_to_all_single(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    """Rank r sends r + s rows to rank s."""
    out = [a.rank + other for other in range(a.world_size)]
    given = values(a.rank, sum(out) * elements, dtype).view(sum(out), elements)
    found = torch.zeros(sum(out), elements, dtype=dtype)  # as many as are sent: the matrix is symmetric
    dist.all_to_all_single(found, given, out, out, group)
    return [found]


def functions(a: Actions, group: Any, elements: int, dtype: torch.dtype) -> Result:
    """What DTensor and compiled code call."""
    mine = values(a.rank, elements * a.world_size, dtype)
    found = [
        functional.all_reduce(mine, "sum", group),
        functional.all_gather_tensor(mine, 0, group),
        functional.reduce_scatter_tensor(mine, "sum", 0, group),
        functional.all_to_all_single(mine, None, None, group),
        functional.broadcast(mine, 1, group),
        *functional.all_reduce_coalesced([mine, mine[:1]], "sum", group),
        *functional.all_gather_into_tensor_coalesced([mine, mine[:3]], group),
    ]
    return [torch.ops._c10d_functional.wait_tensor(one) if not hasattr(one, "wait") else one.wait() for one in found]


def compare(
    actions: Actions, name: str, elements: int, dtype: torch.dtype, exact: bool = True, **how: Any
) -> int:
    """Do a collective in both groups; their results must be equal. Returns how many tensors these are."""
    collective: Callable[..., Result] = globals()[name]
    ours = collective(actions, world(), elements, dtype, **how)
    theirs = collective(actions, actions.kept["gloo"], elements, dtype, **how)
    for one, other in zip(ours, theirs, strict=True):
        same = torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-2 if dtype.itemsize < 4 else 1e-5)
        assert same, f"{name} of {elements} {dtype}: {one.flatten()[:8]} and Gloo's {other.flatten()[:8]}"
    return len(ours)
