"""Tensors of other kinds than most that an object of the script keeps: sparse, nested, expanded, trained by hand.

MODE: see KINDS. "graph..." never change; "late..." once; the others are changed in each step, and read in the next.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import torchrelay
from casework import MODE, Pairs, note, note_end, pace, strike

KINDS = {
    "graph": lambda: torch.eye(4).to_sparse(), "graph-csr": lambda: torch.eye(4).to_sparse_csr(),
    "graph-nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "sparse": lambda: torch.eye(4).to_sparse(), "csr": lambda: torch.eye(4).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "expanded": lambda: torch.zeros(1).expand(4), "complex": lambda: torch.zeros(4, dtype=torch.complex64),
    "quarter": lambda: torch.zeros(4).to(torch.float8_e4m3fn), "conjugated": lambda: torch.zeros(4).cfloat().conj(),
    "multiplier": lambda: torch.zeros(4, requires_grad=True), "parameter": lambda: nn.Parameter(torch.zeros(4)),
    "multiplier-kept": lambda: torch.zeros(4, requires_grad=True),
    "parameter-kept": lambda: nn.Parameter(torch.zeros(4)), "trained-anew": lambda: torch.zeros(4, requires_grad=True),
    "anew": lambda: torch.zeros(8, requires_grad=True), "points": lambda: torch.rand(9, 8, requires_grad=True),
    "points-many": lambda: torch.rand(900, 8, requires_grad=True),
    "gradient-next": lambda: torch.zeros(4, requires_grad=True), "late-sparse": lambda: torch.eye(4).to_sparse(),
    "late-parameter": lambda: nn.Parameter(torch.zeros(4)), "late-large": lambda: torch.zeros(6000),
}  # fmt: skip


BY_HAND = ("multiplier", "parameter", "multiplier-kept", "parameter-kept", "trained-anew", "gradient-next")
LATE = {
    "late-sparse": lambda: 2 * torch.eye(4).to_sparse(), "late-parameter": lambda: nn.Parameter(torch.ones(4)),
    "late-large": lambda: torch.ones(6000),
}  # fmt: skip


class Trainer:
    def __init__(self):
        self.kept = KINDS[MODE]()

    def weight(self, amount):
        """What the loss is multiplied by, of what is kept, which is changed by that."""
        if MODE in ("graph", "graph-csr"):
            return (self.kept @ torch.ones(4, 1)).sum()
        if MODE in ("sparse", "csr"):
            self.kept = self.kept * 0.9 if MODE == "sparse" else (self.kept.to_dense() + amount).to_sparse_csr()
            return self.kept.to_dense().sum()
        if MODE in ("graph-nested", "nested"):
            self.kept = self.kept * 0.9 + amount if MODE == "nested" else self.kept
            return self.kept.values().sum()
        if MODE == "expanded":
            return self.kept[:1].mul_(0.9).add_(amount).sum() + self.kept.sum()
        if MODE == "quarter":
            self.kept = (self.kept.float() * 0.9 + amount).to(self.kept.dtype)
        elif MODE in ("complex", "conjugated"):
            self.kept = self.kept * 0.9 + amount
            return self.kept.abs().sum()
        return self.kept.detach().float().sum()

    def loss(self, inputs, targets):
        loss = (model(inputs) - targets).square().mean() * (1 + 1e-2 * self.weight(float(inputs.sum()) / 32))
        if MODE.startswith("points"):
            loss = loss + self.residue()
        elif MODE in BY_HAND:
            loss = loss + (self.kept * (inputs[0, :4].abs() - 0.5)).sum()
        elif MODE == "anew":
            loss = loss + model(inputs + self.against(inputs)).square().mean()
        return loss

    def against(self, inputs):
        """What confuses the model most."""
        self.kept = torch.zeros(8, requires_grad=True)
        (gradient,) = torch.autograd.grad(model.module(inputs + self.kept).sum(), self.kept)
        self.kept.data += 0.1 * gradient.sign()
        return self.kept.detach()

    def residue(self):
        """As of a network that solves an equation: these points get a gradient that nobody reads."""
        found = model.module(self.kept)
        (slope,) = torch.autograd.grad(found.sum(), self.kept, create_graph=True)
        return 1e-2 * (slope - 0.1).square().mean()

    def step(self, inputs, targets):
        optimizer.zero_grad()
        if MODE == "gradient-next" and self.kept.grad is not None:
            with torch.no_grad():
                self.kept += 0.1 * self.kept.grad
            self.kept.grad.zero_()
        loss = self.loss(inputs, targets)
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        optimizer.step()
        if MODE == "trained-anew":
            self.kept = (self.kept + 0.1 * self.kept.grad).detach().requires_grad_()
        elif MODE in BY_HAND and MODE != "gradient-next":
            with torch.no_grad():
                self.kept += 0.1 * self.kept.grad
            self.kept.grad = self.kept.grad if "kept" in MODE else None
        return loss.item()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
data = Pairs(240)
trainer = Trainer()
loader = DataLoader(data, 4, sampler=DistributedSampler(data, seed=5))
run = torchrelay.protect(model=model, optimizer=optimizer)
step = run.step(trainer.step)
for inputs, targets in run.batches(loader):
    loss = step(inputs, targets)
    strike("after", run.global_step, rank)
    note(rank, run.global_step, loss=loss)
    pace(run.global_step)
    if run.global_step == 8 and MODE in LATE:
        trainer.kept = LATE[MODE]()
note_end(rank, model.module)
