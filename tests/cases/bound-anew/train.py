"""Another function, class or module decides from some step on: MODE says where it stands, joined by +.

attribute, method, global, variable, entry, row, partial, builtin, class    found by a name
strategy, module, activation                                                made of values: they are made anew
lambda, added, layer                                                        cannot be had: a replacement is refused
"""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, note, note_end, pace, strike


def squared(out, wanted):
    return ((out - wanted) ** 2).mean()


def absolute(out, wanted):
    return (out - wanted).abs().mean()


def smooth(out, wanted, beta=1.0):
    return F.smooth_l1_loss(out, wanted, beta=beta)


class Squared:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, out, wanted):
        return self.scale * squared(out, wanted)


class Absolute(Squared):
    def __call__(self, out, wanted):
        return self.scale * absolute(out, wanted)


class Trainer:
    def __init__(self):
        self.loss = squared
        self.phase = self.first
        self.kind = Squared
        self.strategy = Squared(0.5)
        self.criterion = nn.MSELoss()
        self.bend = torch.tanh

    def first(self, out, wanted):
        return squared(out, wanted)

    def second(self, out, wanted):
        return absolute(out, wanted)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)

    def forward(self, inputs):
        return self.last(self.act(self.first(inputs)))


trainer = Trainer()
by_name = {"loss": squared}
row = [squared]
current = squared
given = functools.partial(smooth, beta=1.0)


def losses(out, wanted, found):
    total = trainer.loss(out, wanted) + trainer.phase(out, wanted) + trainer.kind(0.3)(out, wanted)
    total = total + trainer.strategy(out, wanted) + trainer.criterion(trainer.bend(out), wanted)
    total = total + by_name["loss"](out, wanted) + sum(each(out, wanted) for each in row)
    return total + current(out, wanted) + given(out, wanted) + found(out, wanted)


def switch_current(function):
    global current
    current = function


def switch_given(function):
    global given
    given = function


SWITCHES = {
    "attribute": lambda _: setattr(trainer, "loss", absolute),
    "method": lambda _: setattr(trainer, "phase", trainer.second),
    "class": lambda _: setattr(trainer, "kind", Absolute),
    "strategy": lambda _: setattr(trainer, "strategy", Absolute(0.25)),
    "module": lambda _: setattr(trainer, "criterion", nn.SmoothL1Loss(beta=0.3)),
    "builtin": lambda _: setattr(trainer, "bend", torch.relu),
    "entry": lambda _: by_name.update(loss=absolute),
    "row": lambda _: row.__setitem__(0, absolute),
    "added": lambda _: row.append(absolute),
    "global": lambda _: switch_current(absolute),
    "partial": lambda _: switch_given(functools.partial(smooth, beta=0.1)),
    "lambda": lambda _: setattr(trainer, "loss", lambda out, wanted: 0.5 * absolute(out, wanted)),
    "activation": lambda net: setattr(net, "act", nn.LeakyReLU(0.2)),
    "layer": lambda net: setattr(net, "act", nn.Sequential(nn.Linear(16, 16), nn.Tanh())),
    "hook": lambda net: net.first.register_forward_hook(halved),
}


def halved(_, __, out):
    return 0.5 * out


def switch(net):
    for each in MODE.split("+"):
        if each in SWITCHES:
            SWITCHES[each](net)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = Pairs(160)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, 4, sampler=sampler)
    run = torchrelay.protect(model=model, optimizer=optimizer)
    found = squared

    @run.step
    def step(batch):
        if "within" in MODE and run.global_step == 19:
            trainer.loss = absolute
        optimizer.zero_grad()
        loss = losses(model(batch[0]), batch[1], found)
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        optimizer.step()
        return mean

    for epoch in run.epochs(2):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            note(rank, run.global_step + 1, loss=step(batch))
            if run.global_step == 12:
                switch(net)
                found = absolute if "variable" in MODE else found
            pace(run.global_step)
            strike("after", run.global_step, rank)
    note_end(rank, model.module)
    run.atomic(dist.barrier)


if __name__ == "__main__":
    main()
