"""Steps that are called with something each, until the test says that it is enough: targets.py WAY --marks DIR."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import torchrelay

REHEARSE = {"wanted": True, "unwanted": False}
COUNTS = ("counts", "wanted")  # the step is called with a number
MARKS = Path(sys.argv[sys.argv.index("--marks") + 1])


class Pair(NamedTuple):
    x: Any
    last: bool


class Own:
    def __init__(self, x):
        self.x = x


def enough():
    flag = torch.tensor(float((MARKS / "enough").exists()))
    dist.all_reduce(flag)
    return flag.item() > 0


def mark(name):
    with (MARKS / name).open("a") as file:
        file.write(f"{dist.get_rank()}\n")


def fail(way):
    if way == "raises":
        raise ValueError("a batch of zeros")
    if way == "exits":
        sys.exit(3)


def main(way):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)]
    if way == "wide":  # with buffers of 64 KB that each rank has for itself
        layers[1:] = [torch.nn.Linear(4, 8192), torch.nn.BatchNorm1d(8192)]
    ways = {"static": {"static_graph": True}, "unused": {"find_unused_parameters": True}}
    model = DistributedDataParallel(torch.nn.Sequential(*layers), **ways.get(way, {}))
    if way == "hook":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    options = torchrelay.Options(rehearse=REHEARSE.get(way))
    run = torchrelay.protect(model=model, optimizer=optimizer, state={"scaler": scaler}, options=options)
    run.once("settings", mark, "once")

    def train_step(batch):
        x = batch["x"] if isinstance(batch, dict) else getattr(batch, "x", batch)
        pretended = x.abs().max() < 10
        if pretended:
            print("trying", flush=True)
            fail(way)
        if way == "place":
            mark(f"at {run.global_step}")
        if way == "once":
            run.once(f"pretended {pretended}", mark, "pretended" if pretended else "real")
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if way == "skips" and pretended:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    step = run.step(train_step) if way != "late" else None
    print("between join and loops", flush=True)
    with torch.no_grad():
        assert run.global_step == 0 or way != "asks"
    for at in run.steps(100_000):
        if step is None:
            step = run.step(train_step)
        x = 100 + torch.randn(2, 4) + at
        batch = {"dict": {"x": x, "n": [None]}, "named": Pair(x, True), "own": Own(x)}.get(way, x)
        step({"x": x, "n": [at]} if way in COUNTS else batch)
        if run.atomic(enough):
            break
    assert not (MARKS / "pretended").exists()
    print("end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
