"""HSDP over a module of a class of the script, which keeps layers, a lock and a stream in containers of its own."""

import collections
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import Pairs, note, note_end, pace, strike


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)
        self.by_name = collections.OrderedDict(first=self.first, last=self.last)
        self.held = collections.OrderedDict(lock=threading.Lock(), file=sys.stderr)
        self.calls = 0

    def forward(self, inputs):
        self.calls += 1
        with self.held["lock"]:
            return self.by_name["last"](torch.tanh(self.by_name["first"](inputs)))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(1)
    model = Net()
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = Pairs(240)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(batch):
        optimizer.zero_grad()
        loss = (1 + 0.01 * model.calls) * ((model(batch[0]) - batch[1]) ** 2).mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        optimizer.step()
        return loss.detach()

    for epoch in run.epochs(2):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            note(rank, run.global_step + 1, loss=step(batch), calls=model.calls)
            pace(run.global_step)
    whole = nn.Module()
    whole.layers = nn.ParameterList(each.full_tensor().detach() for each in model.parameters())
    note_end(rank, whole)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
