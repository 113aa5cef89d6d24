"""Two networks with an optimizer and a step function each. Gradients of the one lie there while the other is trained.

MODE: "gan" lets the generator's backward add to gradients of the discriminator, which zeroes them when it is trained
next; "clip" has losses of their own, and clips all gradients in each step, those from the step before included; "log"
is "gan", and notes a norm of the discriminator's gradients between the steps.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1 + rank)
makes, judges = (DistributedDataParallel(net()) for _ in range(2))
first = torch.optim.Adam(judges.parameters(), lr=0.01)
second = torch.optim.Adam(makes.parameters(), lr=0.01)
data = Pairs(120)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, 3, sampler=sampler)
run = torchrelay.protect(model={"makes": makes, "judges": judges}, optimizer={"judges": first, "makes": second})


def update(optimizer, loss):
    loss.backward()
    if MODE == "clip":
        torch.nn.utils.clip_grad_norm_([*makes.parameters(), *judges.parameters()], 0.1)
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    return loss.detach()


@run.step
def train_judges(batch):
    first.zero_grad()
    made = makes(torch.randn(3, 8)).detach()
    both = judges(torch.cat([batch[0], made.repeat(1, 8)[:, :8]]))
    return update(first, F.softplus(-both[:3]).mean() + F.softplus(both[3:]).mean())


@run.step
def train_makes(batch):
    second.zero_grad()
    made = makes(batch[0])
    judged = made if MODE == "clip" else judges(made.repeat(1, 8)[:, :8])
    return update(second, F.softplus(-judged).mean())


for epoch in run.epochs(3):
    sampler.set_epoch(epoch)
    for batch in run.batches(loader):
        losses = train_judges(batch), train_makes(batch)
        if MODE == "log":
            note(rank, run.global_step, norm=sum(each.grad.pow(2).sum() for each in judges.parameters()))
        note(rank, run.global_step, judges=losses[0], makes=losses[1])
        pace(run.global_step)
run.atomic(dist.barrier)
note_end(rank, makes.module, judges.module)
