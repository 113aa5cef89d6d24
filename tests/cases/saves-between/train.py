"""Rank 0 saves, logs and decides between steps, in no section, as most scripts do.

MODE  full: model, optimizer and schedule; model: only the model; ema: an average is updated between steps, and saved;
      lr: the learning rate is logged; norm: the norm of the parameters is
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, OUT, Pairs, net, note, note_end, pace, strike


def content(path):
    """What a checkpoint holds, to the bit."""
    saved = torch.load(path, weights_only=True)
    told = [f"{name} {value.double().sum().item().hex()}" for name, value in saved["model"].items()]
    for at, kept in saved.get("optimizer", {}).get("state", {}).items():
        told += [f"{at} {name} {float(value.double().sum()).hex()}" for name, value in kept.items()]
    told += [str(group["lr"].hex()) for group in saved.get("optimizer", {}).get("param_groups", [])]
    return "; ".join([*told, str(saved.get("schedule"))])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = AveragedModel(model.module)
    data = Pairs(96)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)
    run = torchrelay.protect(model=model, optimizer=optimizer, state={"schedule": schedule, "average": average})

    @run.step
    def step(batch):
        optimizer.zero_grad()
        loss = ((model(batch[0]) - batch[1]) ** 2).mean()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        optimizer.step()
        return loss.detach()

    for epoch in run.epochs(2):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            loss = step(batch)
            told = {}
            if MODE == "ema":
                average.update_parameters(model.module)
            if MODE == "lr":
                told["lr"] = schedule.get_last_lr()[0]
            if MODE == "norm":
                told["norm"] = sum(one.detach().square().sum() for one in model.parameters()).sqrt()
            if MODE in ("full", "model", "ema") and rank == 0:
                saved = {"model": (average if MODE == "ema" else model).module.state_dict()}
                if MODE == "full":
                    saved |= {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
                path = OUT / f"step-{run.global_step}.pt"
                torch.save(saved, path)
                told["saved"] = content(path)
            schedule.step()
            note(rank, run.global_step, loss=loss, **told)
            pace(run.global_step)
            strike("after", run.global_step, rank)
    note_end(rank, model.module, average.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
