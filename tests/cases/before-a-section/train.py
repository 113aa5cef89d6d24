"""Does things between a step and the section that follows, or another call; a rank dies behind that.

MODE: "save" writes a checkpoint before an evaluation in a section, and at the end of each epoch; "norm" logs a norm,
the learning rate and the schedule there; "final" saves the model when all is done, before a last section; "begin" saves
at the head of a turn; "two" reads between two steps; "clip" writes into parameters between two steps; "swap" lets an
average take the place of the parameters for an evaluation; "loads" has a section that changes parameters, and reads
before it; "draw" draws a number before a section, and "draw-two" between two steps; "rate-*" adds up learning rates for
a factor that counts from step 40 on: at the "head" of a turn, in an "own" loop, between "two" steps the first of which
ends with the schedule's, and between two "loops" of such. What is in a file is told at the end.
"""

import hashlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, OUT, Pairs, net, note, note_end, pace, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
drops = [torch.nn.Dropout(0.1)] if MODE.startswith("draw") else []
model = DistributedDataParallel(torch.nn.Sequential(*drops, *net()))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
data = Pairs(120)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, 3, sampler=sampler)


def evaluate():
    strike("eval", run.global_step, rank)
    with torch.no_grad():
        total = model.module(data.inputs).sum()
    dist.all_reduce(total)
    return total.item()


def load_best():
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.data.mul_(0.5)
    dist.barrier()


def save(name):
    if rank == 0:
        states = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save({"model": model.module.state_dict(), **states}, OUT / f"{name}.pt")


def norm():
    return sum(parameter.detach().pow(2).sum() for parameter in model.parameters()).sqrt()


class Average:
    """Takes the place of the parameters for an evaluation, as averages do."""

    def __init__(self):
        self.shadow = {name: one.detach().clone() for name, one in model.module.named_parameters()}
        self.backup = {}

    def update(self):
        with torch.no_grad():
            for name, one in model.module.named_parameters():
                self.shadow[name].mul_(0.9).add_(one, alpha=0.1)

    def apply(self):
        with torch.no_grad():
            for name, one in model.module.named_parameters():
                self.backup[name] = one.detach().clone()
                one.copy_(self.shadow[name])

    def restore(self):
        with torch.no_grad():
            for name, one in model.module.named_parameters():
                one.copy_(self.backup[name])
        self.backup = {}

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)


average = Average()
scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
scaler.scale(torch.ones(1))
state = {"schedule": schedule, "average": average, "scaler": scaler}
run = torchrelay.protect(model=model, optimizer=optimizer, state=state)


@run.step
def step(batch, factor=1.0):
    optimizer.zero_grad()
    loss = ((model(batch[0]) - batch[1]) ** 2).mean() * factor
    loss.backward()
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    if MODE in ("rate-two", "rate-loops"):
        schedule.step()
    return loss.detach()


def factor(total):
    return 1 / (1 + total) if run.global_step >= 40 else 1.0


def rates():
    """By a loop of the script's own, and by two of ours in each turn of another."""
    total = 0.0
    while MODE == "rate-own" and run.global_step < 60:
        total += schedule.get_last_lr()[0]
        at = run.global_step % 20
        loss = step([each[3 * at : 3 * at + 3] for each in (data.inputs, data.targets)], factor(total))
        schedule.step()
        note(rank, run.global_step, loss=loss, total=total)
        pace(run.global_step)
    for _ in run.epochs(10 if MODE == "rate-loops" else 0):
        for at in run.steps(3):
            step([data.inputs[at : at + 3], data.targets[at : at + 3]])
        total += optimizer.param_groups[0]["lr"]
        for at in run.steps(3):
            loss = step([data.inputs[at : at + 3], data.targets[at : at + 3]], factor(total))
            pace(run.global_step)
        note(rank, run.global_step, loss=loss, total=total)


total = 0.0
rates()
for epoch in run.epochs(0 if MODE in ("rate-own", "rate-loops") else 3):
    sampler.set_epoch(epoch)
    for batch in run.batches(loader):
        due = (run.global_step + 1) % 10 == 0
        if MODE == "begin" and due:
            save(f"step-{run.global_step}")
        if MODE == "rate-head":
            total += schedule.get_last_lr()[0]
        loss = step(batch, factor(total))
        if MODE == "rate-two":
            total += schedule.get_last_lr()[0]
            note(rank, run.global_step, total=total)
            loss = step(batch)
        else:
            schedule.step()
        if MODE == "norm":
            scaler.update(scaler.get_scale() + 1)
        if MODE == "swap":
            average.update()
        if MODE == "clip":
            for parameter in model.parameters():
                parameter.data.clamp_(-0.5, 0.5)
        if MODE in ("two", "draw-two"):
            between = norm() if MODE == "two" else torch.rand(())
            loss = step([batch[0] * (1 + between / 100), batch[1]] if MODE == "draw-two" else batch)
            note(rank, run.global_step, between=between)
        note(rank, run.global_step, loss=loss)
        if due and MODE == "save":
            save(f"step-{run.global_step}")
        if due and MODE in ("norm", "loads"):
            rate = optimizer.param_groups[0]["lr"]
            note(rank, run.global_step, norm=norm(), rate=rate, last=schedule.last_epoch, scale=scaler.get_scale())
        if due and MODE == "draw":
            total += float(torch.rand(()))
            note(rank, run.global_step, total=total)
        if due and MODE == "loads":
            run.atomic(load_best)
        elif due and MODE == "swap":
            average.apply()
            note(rank, run.global_step, value=run.atomic(evaluate))
            average.restore()
        elif due:
            note(rank, run.global_step, value=run.atomic(evaluate))
        pace(run.global_step)
    if MODE == "save":
        save(f"epoch-{epoch}")
        run.atomic(evaluate)
if MODE == "final":
    save("final")
    run.atomic(evaluate)
    strike("end", 0, rank)
note_end(rank, model.module)
if rank == 0:
    for number, path in enumerate(sorted(OUT.glob("*.pt"))):
        told = torch.load(path, weights_only=True)
        text = repr([told["model"], told["optimizer"], told["schedule"]])
        note(rank, 1000 + number, file=hashlib.sha256(text.encode()).hexdigest())
