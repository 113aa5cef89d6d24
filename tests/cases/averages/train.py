"""An average of the model in state=, updated between steps, and used there every ten steps; or in a later section.

MODE: "module", "object" (that has state_dict()), "dict" (of tensors that are replaced); "sections" makes two at the end
of an epoch, and saves between them.
"""

import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, digest, net, note, note_end, pace, strike


class Average:
    def __init__(self, model):
        self.shadow = {name: each.detach().clone() for name, each in model.named_parameters()}
        self.updates = 0

    def update(self, model):
        self.updates += 1
        for name, each in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * each.data

    def state_dict(self):
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state):
        self.shadow, self.updates = dict(state["shadow"]), state["updates"]


def evaluate(module):
    with torch.no_grad():
        found = module(data.inputs[rank::2]).sum()
    dist.all_reduce(found)
    return found.item()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
inner = net()
model = DistributedDataParallel(inner)
average = Average(inner) if MODE in ("object", "dict") else AveragedModel(inner)
shadow = average.shadow if MODE == "dict" else average
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = Pairs(120)
sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, 4, sampler=sampler)
run = torchrelay.protect(model=model, optimizer=optimizer, state={"average": shadow})


def update():
    if MODE == "module":
        average.update_parameters(inner)
    elif MODE in ("object", "dict"):
        average.update(inner)


def used():
    if MODE == "module":
        with torch.no_grad():
            return average(data.inputs).sum()
    return sum(each.sum() for each in copy.deepcopy(average.shadow).values())


@run.step
def step(inputs, targets):
    optimizer.zero_grad()
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    return loss.detach()


for epoch in run.epochs(3):
    sampler.set_epoch(epoch)
    for inputs, targets in run.batches(loader):
        loss = step(inputs, targets)
        update()
        note(rank, run.global_step, loss=loss)
        if run.global_step % 10 == 0 and MODE != "sections":
            note(rank, 1000 + run.global_step, used=used())
            strike("used", run.global_step, rank)
        pace(run.global_step)
    if MODE == "sections":
        average.update_parameters(inner)
        found = run.atomic(evaluate, inner)
        note(rank, 2000 + epoch, found=found, updates=int(average.n_averaged), average=digest(average))
        found = run.atomic(evaluate, average)
        strike("evaluated", epoch, rank)
        note(rank, 3000 + epoch, found=found)
run.atomic(dist.barrier)
note_end(rank, inner, *([average] if MODE in ("module", "sections") else []))
