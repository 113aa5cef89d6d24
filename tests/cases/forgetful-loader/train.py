"""A loader with a state_dict that does not tell all: the order of an epoch depends on how many there were before."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay
from casework import Pairs, net, note_end, strike, train


class Forgetful:
    def __init__(self, data, rank, world):
        self.data, self.rank, self.world, self.at, self.epoch = data, rank, world, 0, 0

    def __len__(self):
        return len(self.data) // self.world // 4

    def __iter__(self):
        order = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.epoch))
        mine = order[self.rank :: self.world].view(-1, 4)
        while self.at < len(self):
            self.at += 1
            rows = [self.data[int(index)] for index in mine[self.at - 1]]
            yield [torch.stack(column) for column in zip(*rows, strict=True)]
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
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

    train(run, step, Forgetful(Pairs(80), rank, world), epochs=2, rank=rank)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
