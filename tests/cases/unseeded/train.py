"""As minGPT: nothing is seeded, and the data are split at random after the rank is known."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, random_split

import torchrelay
from casework import OUT, Pairs, net, note_end, strike, train


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    part, _ = random_split(Pairs(100), [80, 20])
    with (OUT / f"split-{rank}").open("a") as file:
        file.write(f"{list(part.indices)}\n")
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = DistributedSampler(part, seed=5)
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

    train(run, step, DataLoader(part, 4, sampler=sampler), epochs=2, rank=rank, before=sampler.set_epoch)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
