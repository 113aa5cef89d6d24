"""The worker of the GPU bench: `train` under torchrelay, or `gates` as a plain NCCL rank."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay

WIDTH, DEPTH = 1024, 4


def build(device: torch.device, *, fused: bool) -> tuple[DistributedDataParallel, torch.optim.AdamW]:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(DEPTH):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Dropout(0.1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device), device_ids=[0], bucket_cap_mb=4)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


def train(options: argparse.Namespace) -> None:
    """Train, and die in backward every few steps: rank 1 first, then rank 0, and so on."""
    os.environ["NCCL_HOSTID"] = f"worker-{os.getpid()}"  # before NCCL is used: one device, a host per rank
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    model, optimizer = build(torch.device("cuda"), fused=False)
    folder = Path(options.folder)
    times = (folder / f"rank-{rank}.jsonl").open("a", buffering=1)
    run = torchrelay.protect(model=model, optimizer=optimizer)
    stride = options.steps // (options.kills + 1) if options.kills else 0

    def strike(grad: torch.Tensor) -> None:
        del grad
        number, due = divmod(run.global_step, stride) if stride else (0, 1)
        mark = folder / f"killed-{number}"
        if due == 0 and 1 <= number <= options.kills and rank == number % 2 and not mark.exists():
            mark.write_text(str(time.monotonic_ns()))
            os.kill(os.getpid(), signal.SIGKILL)

    next(iter(model.module.parameters())).register_hook(strike)

    @run.step
    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    fixed = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(rank)).cuda()
    for step in run.steps(options.steps):
        train_step(fixed + step * 1e-3)
        times.write(json.dumps([step + 1, time.monotonic_ns()]) + "\n")
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
    model, optimizer = build(torch.device("cuda"), fused=True)
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
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--folder", default=".")
    options = parser.parse_args()
    train(options) if options.what == "train" else gates()


if __name__ == "__main__":
    main()
