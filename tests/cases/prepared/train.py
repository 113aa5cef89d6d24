"""Model, optimizer and loader as a library prepares them.

MODE    accelerate   a sampler without a seed of its own: ranks agree on it before each epoch
        seedable     Accelerate's sampler whose order is a function of the epoch
        fabric       Lightning Fabric
"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import torchrelay
from casework import MODE, Pairs, net, note_end, strike, train

DATA = Pairs(80)


def with_accelerate(model, optimizer, loader):
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(use_seedable_sampler=MODE == "seedable")
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    return *accelerator.prepare(model, optimizer, loader), accelerator.backward


def with_fabric(model, optimizer, loader):
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment

    class Ours(LightningEnvironment):
        def set_world_size(self, size):
            pass

        def set_global_rank(self, rank):
            pass

        def world_size(self):
            return dist.get_world_size()

        def global_rank(self):
            return dist.get_rank()

        def local_rank(self):
            return dist.get_rank()

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=[Ours()])
    fabric.launch()
    return *fabric.setup(model, optimizer), fabric.setup_dataloaders(loader), fabric.backward


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    loader = DataLoader(DATA, 4, shuffle=True)
    prepare = with_fabric if MODE == "fabric" else with_accelerate
    model, optimizer, loader, backward = prepare(model, optimizer, loader)
    run = torchrelay.protect(model=model, optimizer=optimizer)

    @run.step
    def step(batch):
        optimizer.zero_grad()
        loss = ((model(batch[0]) - batch[1]) ** 2).mean()
        backward(loss)
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / 2
        dist.all_reduce(mean)
        optimizer.step()
        return mean

    train(run, step, loader, epochs=3, rank=rank)
    note_end(rank, model)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
