"""Two step functions take turns within an item; the first is called with a number that an iterator counts.

MODE says what lies between it and the next call with that number: "other" another step without numbers, "again" the
other one twice. "kept" counts by run.global_step, which is right.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, strike


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Pairs(80)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, seed=5))
    run = torchrelay.protect(model=model, optimizer=optimizer)

    def update(loss):
        optimizer.zero_grad()
        loss.backward()
        strike("grad", run.global_step + 1, dist.get_rank())
        optimizer.step()
        return loss.detach()

    @run.step
    def first(batch, seen):
        return update((1 + 0.01 * seen) * ((model(batch[0]) - batch[1]) ** 2).mean())

    @run.step
    def second(batch):
        return update((model(batch[0]) ** 2).mean())

    numbers = [iter(range(1, 1000))]  # where nobody looks for one
    for _ in run.epochs(2):
        for batch in run.batches(loader):
            seen = run.global_step if MODE == "kept" else next(numbers[0])
            note(rank, run.global_step, loss=first(batch, seen))
            for _ in range(2 if MODE == "again" else 1):
                note(rank, run.global_step, loss=second(batch))
    note_end(rank, model.module)


if __name__ == "__main__":
    main()
