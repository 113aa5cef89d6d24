"""The model of faulty.py, spread over the ranks in each of the ways that are supported."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

PIPES = ("pp", "pp-gpipe", "pp-interleaved", "pp-hsdp")
RICH = "-rich"  # with all that real runs have: see `enrich`
LAYOUTS = ("ddp", "zero", "fsdp", "hsdp", "tp", "tp-fsdp", "tp-hsdp", *PIPES, "ddp-rich", "fsdp-rich", "hsdp-rich")


class ShardedEma:
    """A moving average of a rank's own shards, as scripts keep it for FSDP2. Its state is a dict of DTensors."""

    def __init__(self, model):
        self.model = model
        self.averages = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self):
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.averages[name].lerp_(parameter.detach(), 0.1)


class WholeEma:
    """torch's own, of the module inside DDP."""

    def __init__(self, core):
        self.core = core
        self.averages = AveragedModel(core, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def update(self):
        self.averages.update_parameters(self.core)


def layers():
    return torch.nn.Sequential(
        torch.nn.Linear(16, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(64, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 4),
    )


def optimizer_of(layout, model):
    """AdamW; in rich layouts fused. With ZeRO each rank keeps its part of it, and sends all others what it updates."""
    if layout != "zero":
        return torch.optim.AdamW(model.parameters(), lr=3e-3, fused=layout.endswith(RICH))
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.999))


class Whole:
    """Each rank goes through the whole model with a batch of its own."""

    batch = 8

    def __init__(self, layout, world, rank):
        self.rich, self.layout = layout.endswith(RICH), layout.removesuffix(RICH)
        self.model, self.core, self.ema = build(self.layout, world, self.rich)
        self.struck = self.core[4]
        self.rank = rank
        self.samples = world, rank  # which share of the data this rank reads

    def train(self, x, y):
        """The loss, of which gradients are there afterwards."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.rich and self.layout == "ddp"):
            loss = torch.nn.functional.cross_entropy(self.model(x).float(), y)
        loss.backward()
        if self.rich:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        return loss.detach()

    def evaluate(self, x):
        """A sum over ranks says what the model makes of x."""
        self.model.eval()
        with torch.no_grad():
            total = self.core(x[self.rank :: 8]).square().mean()
        self.model.train()
        return total


def spread(layout, world, rank):
    """What a rank does of each step."""
    if layout in PIPES:
        from pipes import Piped

        return Piped(layout, world)
    return Whole(layout, world, rank)


def enrich(core):
    """Activation checkpointing and a compiled layer; `Whole.train` adds clipping, and autocast for DDP."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    core[0] = checkpoint_wrapper(core[0])
    core[1] = torch.nn.LayerNorm(64)  # FSDP2's mixed precision has no BatchNorm on the CPU
    core[6].compile(backend="aot_eager")
    return core


def build(layout, world, rich=False):
    """The model that is called, the layers in it, and an average of its parameters."""
    core = enrich(layers()) if rich else layers()
    if layout in ("ddp", "zero"):
        ema = WholeEma(core)
        return DistributedDataParallel(core, bucket_cap_mb=0.01), core, ema
    if layout.startswith("tp"):
        return split(layout, core, world)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if rich else None
    policy = {} if mixed is None else {"mp_policy": mixed}
    for layer in (core[0], core[4]):
        fully_shard(layer, mesh=mesh, **policy)
    fully_shard(core, mesh=mesh, **policy)
    return core, core, ShardedEma(core)


def split(layout, core, world):
    """Two ranks share each layer (tensor parallel); what they hold is replicated by FSDP2, or sharded once more."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    copies, parts = {"tp": (world // 2, 1), "tp-fsdp": (1, world // 2), "tp-hsdp": (2, world // 4)}[layout]
    mesh = init_device_mesh("cpu", (copies, parts, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    parallelize_module(core, mesh["tensor"], {"4": ColwiseParallel(), "6": RowwiseParallel()})
    for layer in (core[0], core[4]):
        fully_shard(layer, mesh=mesh["replicate", "shard"])
    fully_shard(core, mesh=mesh["replicate", "shard"])
    return core, core, ShardedEma(core)
