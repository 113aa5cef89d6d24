"""Spread: the model of the benches over the ranks, in each layout that is measured."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# By layout: on how many ranks, of 4 or 8, tensors are split in two, and parameters sharded; the rest are replicas.
TENSOR = {"tp-dp": 2, "tp-hsdp": 2}
SHARDS = {"fsdp": 4, "hsdp": 2, "tp-dp": 1, "tp-hsdp": 2}
LAYOUTS = ("ddp", *SHARDS)


def spread(layout: str, model: torch.nn.Sequential) -> torch.nn.Module:
    """The model, ready to be trained by all ranks. Its linear layers come in pairs where tensors are split."""
    if layout == "ddp":
        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    split, shards = TENSOR.get(layout, 1), SHARDS[layout]
    copies = dist.get_world_size() // (split * shards)
    mesh = init_device_mesh("cpu", (copies, shards, split), mesh_dim_names=("replicate", "shard", "tensor"))
    linear = [name for name, layer in model.named_children() if isinstance(layer, torch.nn.Linear)]
    if split > 1:
        ways = (ColwiseParallel(), RowwiseParallel())
        parallelize_module(model, mesh["tensor"], {name: ways[at % 2] for at, name in enumerate(linear)})
    data = mesh["shard"] if layout == "fsdp" else mesh["replicate", "shard"]
    for name in linear:
        fully_shard(model.get_submodule(name), mesh=data)
    fully_shard(model, mesh=data)
    return model
