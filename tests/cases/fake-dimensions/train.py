"""As TorchTitan makes its meshes: dimensions of size 1, and such as nobody uses, get the backend `fake`."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import Pairs, net, note_end, strike, train


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    everybody = init_device_mesh("cpu", (world,), mesh_dim_names=("world",))
    mesh = everybody._unflatten(0, (1, world, 1), ("pp", "dp", "tp"), backend_override={"pp": "fake", "tp": "fake"})
    unused = everybody._unflatten(0, (1, world), ("cp", "batch"), backend_override={"cp": "fake", "batch": "fake"})
    lone = dist.new_group([0], backend="fake")
    assert mesh["tp"].size() == unused["cp"].size() == 1
    assert (lone != dist.GroupMember.NON_GROUP_MEMBER) == (rank == 0)

    torch.manual_seed(1)
    model = DistributedDataParallel(net(), process_group=mesh.get_group("dp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Pairs(80)
    sampler = DistributedSampler(data, seed=5)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(batch):
        optimizer.zero_grad()
        loss = ((model(batch[0]) - batch[1]) ** 2).mean()
        loss.backward()
        dist.all_reduce(loss.detach(), group=mesh.get_group("tp"))
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean, group=mesh.get_group("dp"))
        optimizer.step()
        return mean

    train(run, step, DataLoader(data, 4, sampler=sampler), epochs=2, rank=rank, before=sampler.set_epoch)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
