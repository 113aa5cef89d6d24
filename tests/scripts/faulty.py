"""A script with everything that makes resuming hard, and faults that strike inside it as a plan says.

    torchrelay run --nproc-per-node 4 faulty.py --steps 60 --plan plan.json --marks DIR

The plan is a list of {"id", "ranks", "step", "phase", "how"}: when a rank that is named has committed `step` steps and
is in `phase` (forward, backward, gate, update, between, section; cut: its backward pass was; chunk: the second one of
a pipeline's step; gather: of ZeRO's parameters), it does `how` (kill, raise, exit, stop, oom, comm, stick, spin, flip)
to itself, once per job: a file in --marks named after id and rank remembers it. With "together" those that are named
wait for one another before. A fault with "after" is a second one: it strikes during the recovery from the fault of that
id, in "report", "catch up", "reconfigure", "restore" or "resume".

With --live DIR a test's driver says what strikes while the job trains: DIR/plan.json is read again whenever it changes
("from" in place of "step": at this step or later), DIR/cell.json is for strikes within moves (see `striking`), and
when there is DIR/stop the script ends after the epoch.
"""

import argparse
import ctypes
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import striking
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import layouts
import torchrelay


class Noisy(Dataset):
    """Samples with augmentation from all three random generators."""

    def __init__(self, length):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(length, 16, generator=generator)
        self.y = torch.randint(0, 4, (length,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        shift = random.random() * 0.1 + np.random.rand() * 0.1
        return self.x[index] + shift + 0.1 * torch.randn(16), self.y[index]


class Faults:
    """The plan, as far as this rank is concerned."""

    def __init__(self, path, marks, rank, live=False):
        self.path, self.live = path, live
        self.kept = json.loads(Path(path).read_text()) if path and not live else []
        self.marks, self.rank = Path(marks), rank

    @property
    def plan(self):
        # Read anew each time: a thread looks too, and what is kept of it would change within an update, now and then.
        # A rank that is lost there is refused, rightly: what such a value would have been nobody can tell.
        return json.loads(Path(self.path).read_text()) if self.live else self.kept

    def begun(self, fault, run):
        if "after" in fault:
            return any(self.marks.glob(f"{fault['after']}.rank*"))
        # Not before: a step that asks for it is not rehearsed further. In an update the step that it is of counts.
        step = run and run.global_step + (fault["phase"] == "update")
        if "from" in fault:
            return step is not None and step >= fault["from"]
        return fault["step"] == step

    def awaits_gate(self, run):
        """Whether another rank is to be struck while it waits for us in the gate."""
        return any(
            fault["phase"] == "gate"
            and self.rank not in fault["ranks"]
            and self.begun(fault, run)
            and not all((self.marks / f"{fault['id']}.rank{rank}").exists() for rank in fault["ranks"])
            for fault in self.plan
        )

    def due(self, run, phase):
        for fault in self.plan:
            if fault["phase"] == phase and self.rank in fault["ranks"] and self.begun(fault, run):
                mark = self.marks / f"{fault['id']}.rank{self.rank}"
                if fault.get("always") or not mark.exists():
                    return fault, mark
        return None

    def strike(self, run, phase):
        found = self.due(run, phase)
        if found is not None:
            self.hit(*found, run)

    def hit(self, fault, mark, run):
        if fault["how"] == "flip":
            flip_a_bit(self.model)
        mark.write_text(json.dumps({"pid": os.getpid(), "at_ns": time.monotonic_ns(), **fault}))
        others = [self.marks / f"{fault['id']}.rank{rank}" for rank in fault["ranks"]]
        while fault.get("together") and not all(other.exists() for other in others):
            time.sleep(0.001)
        do(fault["how"], run)


def flip_a_bit(model):
    """As a cosmic ray does it: nobody is told, and no count of versions."""
    parameter = next(model.parameters())
    memory = getattr(parameter, "_local_tensor", parameter)
    ctypes.c_uint32.from_address(memory.data_ptr()).value ^= 1 << 20


def do(how, run):
    """Break this process."""
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError(f"a planned exception at step {run and run.global_step}")
        case "comm":
            raise RuntimeError(
                "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
            )
        case "exit":
            os._exit(7)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "stick":
            threading.Event().wait()
        case "spin":
            while True:
                pass
        case "oom":
            # What the kernel's OOM killer does to a process: no handler, no unwinding, in an allocation.
            ctypes.memset(ctypes.create_string_buffer(1 << 20), 1, 1 << 20)
            os.kill(os.getpid(), signal.SIGKILL)


def interval(text):
    return text if text == "auto" else int(text)


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layout", choices=layouts.LAYOUTS, default="ddp")
    parser.add_argument("--plan")
    parser.add_argument("--marks", default=".")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds added to each step")
    parser.add_argument("--live", metavar="DIR", help="a driver says what strikes, and when the end comes")
    parser.add_argument("--buddies", type=int, default=1, help="nodes that get a copy of a snapshot")
    parser.add_argument("--snapshots", type=interval, help="steps between two of them, or auto")
    parser.add_argument("--ballast", type=int, default=0, help="megabytes of state beside the model, changed each step")
    parser.add_argument("--mark", default="", help="a text that stands in the state, again and again")
    parser.add_argument("--compare", type=int, help="steps between two comparisons of replicas")
    parser.add_argument("--forget", default="", help="leave this out of the state on purpose: rng, cursor")
    return parser.parse_args()


def forget(what):
    """Sabotage for the tests of the tests: a replacement that lacks a part of the state."""
    if what == "rng":
        from torchrelay.worker.state import random_state

        random_state.restore = lambda *_: None
    elif what == "cursor":
        from torchrelay.worker.data.loaders import InProcess

        entered = InProcess.enter
        InProcess.enter = lambda self, mark, _: entered(self, mark, 0)


def build(layout, rank):
    torch.manual_seed(1)
    spread = layouts.spread(layout, dist.get_world_size(), rank)
    optimizer = layouts.optimizer_of(layout, spread.model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10_000)
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    np.random.seed(100 + rank)
    return spread, optimizer, scheduler


def second_faults(faults):
    """Strikes in the middle of a recovery: inside our own library, where a worker can die as well as anywhere."""
    from torchrelay.worker.control.position import Position
    from torchrelay.worker.process_groups import groups
    from torchrelay.worker.replacement import taking_over
    from torchrelay.worker.step.safepoint import Safepoint
    from torchrelay.worker.transfer import transfer

    places = {
        "report": (Position, "interrupt"),
        "catch up": (taking_over, "decode_record"),
        "reconfigure": (groups, "reconfigure"),
        "restore": (transfer, "fetch_state"),
        "resume": (Safepoint, "_say_resumed"),
    }
    for phase, (owner, name) in places.items():
        if faults.live or any(fault["phase"] == phase for fault in faults.plan):
            setattr(owner, name, struck_in(faults, phase, getattr(owner, name)))


def struck_in(faults, phase, function, run=None):
    """The function, which meets a fault at its beginning."""

    def wrapped(*args, **kwargs):
        faults.strike(run, phase)
        return function(*args, **kwargs)

    return wrapped


def gate_watcher(faults, run):
    """Strikes while the main thread waits in the gate, seen from another thread."""

    def watch():
        while True:
            due = faults.due(run, "gate")
            if due and in_gate():
                faults.hit(*due, run)
            time.sleep(0.0005 if due or not faults.live else 0.005)

    threading.Thread(target=watch, daemon=True).start()


def in_gate():
    """Whether the main thread's innermost frames are in the gate."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None:
        if frame.f_code.co_filename.endswith("worker/agreement/gate.py"):
            return True
        frame = frame.f_back
    return False


def come_late(faults, run):
    """To the gate, if another one is to be struck there: until it has written its mark, and a moment more."""
    until, late = time.monotonic() + 3.0, faults.awaits_gate(run)
    while faults.awaits_gate(run) and time.monotonic() < until:
        time.sleep(0.002)
    if late:
        time.sleep(0.1)


def faults_of(options, rank):
    if not options.live:
        return Faults(options.plan, options.marks, rank)
    striker = striking.Striker(options.live, rank)
    striking.place_hooks(striker)
    striker.here("joining")
    return Faults(Path(options.live, "plan.json"), options.live, rank, live=True)


def intervals_of(options: argparse.Namespace) -> torchrelay.Options:
    """What protect() is told of snapshots and comparisons."""
    return torchrelay.Options(
        snapshot_every=options.snapshots, snapshot_buddies=options.buddies, compare_every=options.compare
    )


def main():
    options = arguments()
    forget(options.forget)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    spread, optimizer, scheduler = build(options.layout, rank)
    data = Noisy(800)
    sampler = DistributedSampler(data, *spread.samples, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=spread.batch, sampler=sampler)
    faults = faults_of(options, rank)
    second_faults(faults)
    seen = {"rows": 0}
    extra = {"scheduler": scheduler, "ema": spread.ema.averages, "seen": seen, "ballast": ballast(options, optimizer)}
    if options.mark:  # beside the model, so that no broadcast of torch's own carries it
        extra["mark"] = torch.tensor(list(options.mark.encode() * 100), dtype=torch.uint8)
    run = torchrelay.protect(model=spread.model, optimizer=optimizer, state=extra, options=intervals_of(options))
    faults.model = spread.model
    # After ours, hence past the gate: inside the update.
    optimizer.register_step_pre_hook(lambda *_: faults.strike(run, "update"))
    if options.layout == "zero":
        optimizer._broadcast_params_from_rank = struck_in(faults, "gather", optimizer._broadcast_params_from_rank, run)
    spread.halfway = lambda: faults.strike(run, "chunk")
    spread.struck.register_forward_hook(lambda _module, _inputs, output: strike_in_backward(faults, run, output))

    @run.step
    def train_step(batch):
        x, y = batch
        optimizer.zero_grad()
        seen["rows"] += len(x)  # before the gate: a call that is redone must not count twice
        faults.strike(run, "forward")
        try:
            loss = spread.train(x, y)
        except RuntimeError:
            faults.strike(run, "cut")
            raise
        come_late(faults, run)
        optimizer.step()
        spread.ema.update()
        return loss

    def evaluate():
        faults.strike(run, "section")
        total = spread.evaluate(data.x)
        dist.all_reduce(total)
        stop = torch.tensor(int(bool(options.live) and Path(options.live, "stop").exists()))
        dist.all_reduce(stop)
        return total.item(), stop.item()

    while_training(run, options, loader, sampler, scheduler, train_step, evaluate, faults)
    dist.destroy_process_group()


def ballast(options, optimizer):
    """State beside the model, that changes in each step."""
    values = torch.arange(options.ballast << 18, dtype=torch.float32)
    optimizer.register_step_post_hook(lambda *_: values.mul_(1.01))
    return values


def strike_in_backward(faults, run, output):
    if output.requires_grad:
        output.register_hook(lambda _: faults.strike(run, "backward"))


def while_training(run, options, loader, sampler, scheduler, train_step, evaluate, faults):
    """The loop; epochs are short, so that faults fall on their safepoints too."""
    watching = not faults.live and not any(fault["phase"] == "gate" for fault in faults.plan)
    for epoch in run.epochs(10_000):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            if run.global_step >= options.steps:
                return
            if not watching:  # not before: another thread must not be the first to ask for our place
                gate_watcher(faults, run)
                watching = True
            loss = train_step(batch)
            scheduler.step()
            faults.strike(run, "between")
            if run.rank == 0:
                print(f"step {run.global_step} loss {loss.item():.4f}", flush=True)
            if options.pace:
                time.sleep(options.pace)
        value, stop = run.atomic(evaluate)
        if run.rank == 0:
            print(f"epoch {epoch} value {value:.6f}", flush=True)
        if stop:
            return


if __name__ == "__main__":
    main()
