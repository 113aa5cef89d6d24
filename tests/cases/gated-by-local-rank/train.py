"""As minGPT, Lightning and many others: saved and logged by `LOCAL_RANK == 0`, and devices looked up by LOCAL_RANK."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import OUT, Pairs, net, note, note_end, pace, strike


def main():
    local, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    devices = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[:size]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with (OUT / f"device-{rank}").open("a") as file:
        file.write(f"{devices[local]}\n")
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = Pairs(80)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(batch):
        optimizer.zero_grad()
        loss = ((model(batch[0]) - batch[1]) ** 2).mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        return mean

    for epoch in run.epochs(3):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            note(rank, run.global_step, local=local, loss=step(batch))
            pace(run.global_step)
        if local == 0:
            (OUT / f"saved-{epoch}").write_text(str(rank))
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
