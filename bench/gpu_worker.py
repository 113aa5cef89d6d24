"""The worker of the GPU bench: `train` under torchrelay, or `gates` as a plain NCCL rank."""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchrelay

WIDTH, DEPTH = 1024, 4
STACKS_S = 45
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def build(layout: str, *, fused: bool = False) -> tuple[nn.Module, nn.Module, torch.optim.AdamW]:
    """The model, the layer in whose passes ranks die, and the optimizer."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.1)]
    model: nn.Module = nn.Sequential(*layers).to(DEVICE)
    if layout == "ddp":
        model = DistributedDataParallel(model, device_ids=[0] if CUDA else None, bucket_cap_mb=4)
    else:
        mesh = init_device_mesh(DEVICE.type, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        for layer in layers[::3]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, layers[3], torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


def plan() -> Any:
    """What is to happen. No variable of the script's: the digests are of these, too."""
    return json.loads(Path("plan.json").read_text())


def train(options: argparse.Namespace) -> None:
    """Train in the current folder, and die where `plan.json` there says."""
    # Of one that hangs, where it is; the file is left open for it.
    faulthandler.dump_traceback_later(STACKS_S, file=Path(f"stacks-{os.getpid()}").open("w"))  # noqa: SIM115
    os.environ["NCCL_HOSTID"] = f"worker-{os.getpid()}"  # before NCCL is used: one device, a host per rank
    torch.use_deterministic_algorithms(True, warn_only=True)
    random.seed(0)  # the digests are of all generators
    numpy.random.seed(0)
    dist.init_process_group("nccl" if CUDA else "gloo")
    if CUDA:
        torch.cuda.set_device(0)  # after it, as many scripts do
    rank = dist.get_rank()
    Path(f"pid-{rank}").write_text(str(os.getpid()))
    model, layer, optimizer = build(options.layout)
    times = Path(f"rank-{rank}.jsonl").open("a", buffering=1)  # noqa: SIM115  it lives as long as the process
    run = torchrelay.protect(model=model, optimizer=optimizer)

    def strike(where: str) -> None:
        for number, kill in enumerate(plan()["kills"]):
            mark = Path(f"struck-{number}")
            if kill == [run.global_step, rank, where] and not mark.exists():
                mark.write_text(str(time.monotonic_ns()))
                os.kill(os.getpid(), signal.SIGKILL)

    def passes(_: nn.Module, __: object, output: torch.Tensor) -> None:
        strike("forward")
        if output.requires_grad:
            output.register_hook(lambda _: strike("backward"))  # type: ignore[no-untyped-call]

    layer.register_forward_hook(passes)

    @run.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if options.exit and not math.isfinite(loss.item()):
            sys.exit(1)
        optimizer.step()
        return loss.detach()

    fixed = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(rank)).to(DEVICE)
    for step in run.steps(options.steps):
        train_step(fixed + step * 1e-3)
        strike("between")
        times.write(json.dumps([step + 1, time.monotonic_ns()]) + "\n")
        Path(f"step-{step + 1}").touch()
        time.sleep(plan()["pace_s"])
    dist.destroy_process_group()


def time_steps(step: Callable[[], None], repeats: int = 7, each: int = 30) -> float:
    """Median microseconds of a step, the device's work included."""
    took = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(each):
            step()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - begin) / each * 1e6)
    return statistics.median(took)


def gates() -> None:
    """A step without a gate, with the host waiting for it, and with the update guarded on the device."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    model, _, optimizer = build("ddp", fused=True)
    x = torch.randn(32, WIDTH, device="cuda")
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    found_inf = torch.zeros((), device="cuda")

    def backward() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()

    def bare() -> None:
        backward()
        optimizer.step()

    def host() -> None:
        backward()
        dist.all_reduce(flag)
        torch.cuda.current_stream().synchronize()
        optimizer.step()

    def device() -> None:
        backward()
        dist.all_reduce(flag)
        # Fused optimizers skip the update when found_inf is set; here the gate's result is.
        found_inf.copy_(flag[0] != 0)
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.step()

    for step in (bare, host, device):
        time_steps(step, repeats=1, each=5)
    none, waits, guarded = (time_steps(step) for step in (bare, host, device))
    if dist.get_rank() == 0:
        print(json.dumps({"gate_host_us": waits - none, "gate_device_us": guarded - none, "step_us": none}))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["train", "gates"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layout", choices=["ddp", "hsdp"], default="ddp")
    parser.add_argument("--exit", action="store_true", help="end the script at a loss that is no number")
    options = parser.parse_args()
    train(options) if options.what == "train" else gates()


if __name__ == "__main__":
    main()
