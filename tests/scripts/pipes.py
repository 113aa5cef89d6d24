"""The model of layouts.py as a pipeline: two ranks hold a part of it each, or two; and there are as many pipelines."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

from layouts import ShardedEma, layers

CHUNKS = 4
CUTS = {2: (0, 4, 7), 4: (0, 1, 4, 6, 7)}  # between which layers
WIDTHS = {2: (16, 64, 4), 4: (16, 64, 64, 64, 4)}
DEEP = 2  # ranks in a pipeline


class Averages:
    """A moving average of what this rank holds, whole or in shards."""

    def __init__(self, modules):
        self.each = [ShardedEma(module) for module in modules]
        self.averages = {f"{at}.{name}": one for at, ema in enumerate(self.each) for name, one in ema.averages.items()}

    def update(self):
        for ema in self.each:
            ema.update()


class Piped:
    """This rank's stages, and the schedule by which all ranks of its pipeline go through them together."""

    batch = 16

    def __init__(self, layout, world):
        mesh = init_device_mesh("cpu", (world // DEEP, 1, DEEP), mesh_dim_names=("replicate", "shard", "stage"))
        place, group = mesh["stage"].get_local_rank(), mesh["stage"].get_group()
        count = 4 if layout == "pp-interleaved" else 2
        whole = layers()
        if layout == "pp-hsdp":  # what comes from the neighbour is not known before: torch tries with empty memory
            whole[1] = torch.nn.LayerNorm(64)
        mine = range(place, count, DEEP)
        parts = [whole[CUTS[count][at] : CUTS[count][at + 1]] for at in mine]
        self.model = torch.nn.ModuleList([wrapped(layout, part, mesh) for part in parts])
        self.core, self.ema = self.model, Averages(self.model)
        self.struck = parts[0][0]
        self.struck.register_forward_pre_hook(self.count)
        self.chunk, self.halfway = 0, lambda: None
        self.samples = world // DEEP, mesh["replicate"].get_local_rank()
        self.first, self.last = mine[0] == 0, mine[-1] == count - 1
        told = [travelling(WIDTHS[count], at) if layout != "pp-hsdp" else {} for at in mine]
        stages = [
            PipelineStage(module, at, count, torch.device("cpu"), group=group, **shapes)
            for module, at, shapes in zip(self.model, mine, told, strict=True)
        ]
        loss = torch.nn.functional.cross_entropy
        if layout == "pp-interleaved":
            self.schedule = ScheduleInterleaved1F1B(stages, CHUNKS, loss)
        else:
            self.schedule = (ScheduleGPipe if layout == "pp-gpipe" else Schedule1F1B)(stages[0], CHUNKS, loss)

    def count(self, *_):
        self.chunk += 1
        if self.chunk == CHUNKS // 2:
            self.halfway()

    def train(self, x, y):
        """The loss, known in the last stage, of which gradients are there afterwards."""
        losses = []
        self.chunk = 0
        self.schedule.step(*([x] if self.first else []), target=y if self.last else None, losses=losses)
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    def evaluate(self, x):
        """A sum over ranks says what the model makes of x. Torch settles anew what travels, before it and after it."""
        self.model.eval()
        part = x[self.samples[1] :: 50][: self.batch]
        target = torch.zeros(len(part), dtype=torch.long) if self.last else None
        with torch.no_grad():
            out = self.schedule.eval(*([part] if self.first else []), target=target)
        self.model.train()
        return out.square().mean() if self.last else torch.zeros(())


def wrapped(layout, part, mesh):
    """A part of the model, whole on the ranks that hold the same one; or in shards, of which there are copies."""
    if layout == "pp-hsdp":
        from torch.distributed.fsdp import fully_shard

        return fully_shard(part, mesh=mesh["replicate", "shard"])
    return DistributedDataParallel(part, process_group=mesh["replicate"].get_group(), bucket_cap_mb=0.01)


def travelling(widths, at):
    """What a stage is called with, and what it returns, of one chunk."""
    rows = Piped.batch // CHUNKS
    shapes = {"input_args": torch.zeros(rows, widths[at]), "output_args": torch.zeros(rows, widths[at + 1])}
    shapes["input_args"].requires_grad_(at > 0)
    shapes["output_args"].requires_grad_()
    return shapes
