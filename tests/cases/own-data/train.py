"""A step works on data that no loader gives it.

MODE  globals: batches are fetched ahead into globals; large: these are large; count: a counter of its own, in a
      closure, is read by the step; number: what an iterator gives is an argument; counted: a counter of the loop is;
      carried: the counter is kept in extra, as it should; noise: a generator of its own; unseeded: random numbers of
      NumPy, without a seed, drawn before the start; added: losses are added up; drawn: two steps an item, on samples
      drawn by chance
"""

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike

data = Pairs(160)
x = y = None
taken = 0
total = 0.0
noise = torch.Generator()


def fetch(rank):
    global x, y, taken
    at = [(taken * 8 + rank * 4 + each) % len(data) for each in range(4)]
    taken += 1
    x, y = data.inputs[at], data.targets[at]
    if MODE == "large":
        x, y = x.repeat(1000, 1), y.repeat(1000, 1)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    noise.manual_seed(rank)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kept = {"count": 0}
    count = 0
    order = np.random.default_rng(None if MODE == "unseeded" else 3).permutation(len(data))
    run = torchrelay.protect(model=model, optimizer=optimizer, state={"kept": kept})
    fetch(rank)

    factors = {"count": lambda: 1 + count % 3, "noise": lambda: 1 + torch.rand((), generator=noise)}
    factor = factors.get(MODE, lambda: 1)

    @run.step
    def step(*given):
        global total
        optimizer.zero_grad()
        if MODE in ("globals", "large"):
            inputs, targets = x, y
            fetch(rank)
        else:
            at = order[[(sum(given) * 8 + rank * 4 + each) % len(data) for each in range(4)]]
            inputs, targets = data.inputs[at], data.targets[at]
        loss = ((model(inputs) - targets) ** 2).mean()
        (loss * factor()).backward()
        strike("grad", run.global_step + 1, rank)
        optimizer.step()
        total += float(loss.detach())
        return loss.detach()

    twice = 2 if MODE == "drawn" else 1
    numbers = [iter(range(1, 1000))]  # where nobody looks for one
    for _ in (at for _ in run.steps(30 // twice) for at in range(twice)):
        count += 1
        kept["count"] += 1
        drawn = (int(torch.randint(1000, ())),) if MODE == "drawn" else ()
        number = next(numbers[0]) if MODE == "number" else 0
        given = {
            "drawn": drawn, "globals": (), "large": (), "number": (number,), "counted": (count,),
            "carried": (kept["count"],),
        }.get(MODE, (run.global_step,))  # fmt: skip
        loss = step(*given)
        note(rank, run.global_step, loss=loss)
        pace(run.global_step)
        strike("after", run.global_step, rank)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
