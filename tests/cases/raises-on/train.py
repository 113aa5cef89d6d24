"""A step that raises on all ranks when their mean loss is too high; the script catches it and takes the next batch.

MODE  (none)  after the ranks have talked about it
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import Pairs, net, note, note_end, pace, strike


class Skipped(Exception):
    pass


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = Pairs(240)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(batch):
        optimizer.zero_grad()
        loss = ((model(batch[0]) - batch[1]) ** 2).mean()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if mean > 1.6:
            raise Skipped
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        optimizer.step()
        return loss.item()

    skipped = 0
    for epoch in run.epochs(1):
        sampler.set_epoch(epoch)
        for item, batch in enumerate(run.batches(loader)):
            try:
                loss = step(batch)
            except Skipped:
                skipped += 1
                continue
            note(rank, run.global_step, loss=loss, skipped=skipped, item=item)
            pace(run.global_step)
            strike("after", run.global_step, rank)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
