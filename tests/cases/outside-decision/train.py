"""A decision is made between two calls, from what the script has read there before the call.

MODE  scale: the usual snippet of GradScaler, a schedule is stepped if the scale did not fall; committed: the learning
      rate comes from run.global_step, as it should; counter: it comes from a counter of the script's own;
      iterator: from an iterator, which nobody can carry
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=100)
    data = Pairs(160)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)
    run = torchrelay.protect(model=model, optimizer=optimizer, state={"scaler": scaler, "schedule": schedule})

    @run.step
    def step(batch, bad):
        optimizer.zero_grad()
        loss = ((model(batch[0]) - batch[1]) ** 2).mean()
        if bad:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        strike("grad", run.global_step + 1, rank)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    mine, numbers = 0, [iter(range(1000))]  # where nobody looks for one
    for epoch in run.epochs(2):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            at = run.global_step + 1
            before = scaler.get_scale()
            mine = next(numbers[0]) if MODE == "iterator" else mine
            if MODE in ("counter", "iterator"):
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 / (1 + mine)
            if MODE == "committed":
                for group in optimizer.param_groups:
                    group["lr"] = 0.01 / at
            loss = step(batch, MODE == "scale" and at in (20, 21, 30))
            mine += 1
            if MODE == "scale" and scaler.get_scale() >= before:
                schedule.step()
            note(rank, run.global_step, loss=loss, scale=scaler.get_scale())
            pace(run.global_step)
            strike("after", run.global_step, rank)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
