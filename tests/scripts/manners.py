"""Scripts that misbehave in one way each: manners.py WAY --marks DIR."""

import os
import queue
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import torchrelay

MARKS = Path(sys.argv[sys.argv.index("--marks") + 1]) if "--marks" in sys.argv else Path()


def build(width=4):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(width, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def joined(**options):
    model, optimizer = build()
    return model, optimizer, torchrelay.protect(model=model, optimizer=optimizer, **options)


def step_of(run, model, optimizer, inside=lambda: None, after=lambda: None):
    @run.step
    def train_step():
        optimizer.zero_grad()
        inside()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        after()
        return loss.detach()

    return train_step


def once(name):
    """True the first time, whoever asks."""
    try:
        (MARKS / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def kill_rank_1_at(run, step, name="killed"):
    if dist.get_rank() == 1 and run.global_step == step and once(name):
        os.kill(os.getpid(), signal.SIGKILL)


def refusals():
    """Everything that is refused before anything is harmed, one after the other; each is told."""
    told = []

    def expect(what, function, *args):
        try:
            function(*args)
        except torchrelay.RefusedError as error:
            told.append(f"{what}: {error}")
        else:
            told.append(f"{what}: NOT REFUSED")

    expect("before init", torchrelay.protect)
    expect("wrong size", lambda: dist.init_process_group("gloo", world_size=5, rank=0))
    dist.init_process_group("gloo")
    expect("no state", torchrelay.protect)
    model, optimizer, run = joined()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    expect("twice", joined)
    expect("nested", run.atomic, lambda: run.atomic(print))
    expect("update outside", optimizer.step)
    expect("update in a section", run.atomic, optimizer.step)
    expect("unknown optimizer", run.step(other.step))
    expect("collective after the update", step_of(run, model, optimizer, after=dist.barrier))
    expect("random numbers after the update", step_of(run, model, optimizer, after=random.random))
    group = dist.new_group([0, 1])
    twice = step_of(run, model, optimizer, after=lambda: dist.barrier(group))
    twice()  # it might be a thread of the script's own
    expect("collective of a group after the update", twice)
    expect("endless", lambda: list(run.batches(iter([1]))))
    expect("result", run.atomic, lambda: object())
    expect("large result", run.atomic, lambda: torch.zeros(1 << 20))
    expect("once", torchrelay.once, "x", lambda: object())
    print("\n".join(told))
    sys.stdout.flush()


def carried():
    model, optimizer, run = joined()
    step = step_of(run, model, optimizer)
    optimizer.zero_grad = lambda: None
    for _ in run.steps(3):
        step()


def differs():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4 + rank, 4)
    torchrelay.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def values_differ():
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 4)
    torchrelay.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def drifts():
    """Ranks that begin alike and train their own: a stage, an expert, an adapter. Nobody reduces its gradients."""
    torch.manual_seed(0)
    shared = DistributedDataParallel(torch.nn.Linear(4, 4))
    adapter = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.zeros_(adapter.weight)
    model = {"shared": shared, "adapter": adapter}
    optimizer = torch.optim.SGD([*shared.parameters(), *adapter.parameters()], lr=0.1)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def train_step(used):
        optimizer.zero_grad()
        x = shared(torch.ones(2, 4))
        (x + adapter(x * dist.get_rank()) if used else x).square().mean().backward()
        optimizer.step()

    for step in run.steps(9):
        train_step(step > 2)  # an expert that no token comes to at first
        print(f"committed {run.global_step}", flush=True)


def swallow():
    """Catches everything that comes out of its steps' insides, as handlers of out-of-memory errors do."""
    model, optimizer, run = joined()

    @run.step
    def train_step():
        for _ in range(2):
            try:
                optimizer.zero_grad()
                kill_rank_1_at(run, 3)
                loss = model(torch.ones(2, 4)).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()
            except BaseException as error:  # noqa: BLE001  on purpose
                print(f"swallowed {type(error).__name__}", flush=True)
        return None

    for _ in run.steps(6):
        assert train_step() is not None


def own_error():
    model, optimizer, run = joined()

    def inside():
        if run.global_step == 3:
            raise ValueError(f"bad batch on rank {dist.get_rank()} at {time.time()}")

    step = step_of(run, model, optimizer, inside)
    for _ in run.steps(6):
        step()


def caught_error():
    """All ranks catch the same error of a step and go on."""
    model, optimizer, run = joined()

    def inside():
        if number == 3:
            raise ValueError("bad batch")

    step = step_of(run, model, optimizer, inside)
    for number in run.steps(7):  # noqa: B007  `inside` looks at it
        try:
            step()
        except ValueError:
            print("skipped", flush=True)
    print(f"committed {run.global_step}")


def caught_after_update():
    """All ranks catch an error that leaves their step after its update, and go on."""
    model, optimizer, run = joined()

    def after():
        raise ValueError("not finite")

    step = step_of(run, model, optimizer, after=after)
    for _ in run.steps(7):
        try:
            step()
        except ValueError:
            print("caught", flush=True)


def cut_before_join():
    """A collective fails on all ranks before protect(), and nobody is lost."""
    dist.barrier()
    raise RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1ms for recv operation")


def strays():
    """Its way depends on a queue of its own, where nobody looks, and which a replacement's script begins anew."""
    model, optimizer, run = joined()
    step = step_of(run, model, optimizer, lambda: kill_rank_1_at(run, 5))
    numbers = queue.SimpleQueue()
    for at in range(40):
        numbers.put(at)
    for _ in run.steps(40):
        step()
        if numbers.get() % 10 == 9:
            run.atomic(dist.barrier)


def exits():
    _, _, run = joined()
    run.atomic(dist.barrier)
    sys.exit(7)


def undeclared():
    """Averages its loss between the steps, in no section, and a rank dies while the others wait for it there."""
    model, optimizer, run = joined()
    step = step_of(run, model, optimizer)
    for _ in run.steps(6):
        loss = step()
        if run.global_step == 3:
            if dist.get_rank() == 0:
                (MARKS / "past the gate").touch()
            while not (MARKS / "past the gate").exists():  # rank 0 could be behind, and the step be made again
                time.sleep(0.001)
        kill_rank_1_at(run, 3)
        dist.all_reduce(loss)


def undeclared_tail():
    """The same, but the others have it behind them when a rank dies: the replacement would have to do it alone."""
    model, optimizer, run = joined()
    step = step_of(run, model, optimizer, lambda: kill_rank_1_at(run, 3))
    for _ in run.steps(6):
        loss = step()
        dist.all_reduce(loss)


def last_words():
    """A rank dies when the others have finished."""
    model, optimizer, run = joined()
    step = step_of(run, model, optimizer)
    for _ in run.steps(4):
        loss = step()
    if dist.get_rank() == 1:
        while once("finished?") or not (MARKS / "rank-0-finished").exists():
            time.sleep(0.01)
        kill_rank_1_at(run, 4)
    dist.destroy_process_group()
    print(f"last loss {loss:.4f}, committed {run.global_step}", flush=True)


def killed_when_finished():
    """Waits to be killed by the test, after its end."""
    model, optimizer, run = joined()
    step = step_of(run, model, optimizer)
    for _ in run.steps(4):
        step()
    run.atomic(dist.barrier)
    print(f"committed {run.global_step}", flush=True)


def paced():
    """Trains until the test says that it is enough."""
    model, optimizer, run = joined()
    step = step_of(run, model, optimizer, lambda: time.sleep(0.01))
    for _ in run.steps(100_000):
        step()
        if run.atomic(enough):
            break


def enough():
    flag = torch.tensor(float((MARKS / "enough").exists()))
    dist.all_reduce(flag)
    return flag.item() > 0


def joinless():
    dist.init_process_group("gloo")
    dist.barrier()
    print("done", flush=True)


def late_refusal():
    """Something is refused on one rank only."""
    _, _, run = joined()
    if dist.get_rank() == 1:
        run.batches({"a": 1})
    run.atomic(dist.barrier)


def own_files():
    """Looks at itself as a script does."""
    _, _, run = joined()
    print("name", __name__, "file", __file__, "argv", sys.argv[1:], "path", sys.path[0])
    main = sys.modules["__main__"]
    print("main", main.own_files is own_files)
    items = list(run.batches(DataLoader(range(8), batch_size=3)))
    print("items", [item.tolist() for item in items])


def main():
    way = sys.argv[1]
    if way not in ("refusals", "differs", "values_differ", "joinless"):
        dist.init_process_group("gloo")
    globals()[way]()


if __name__ == "__main__":
    main()
