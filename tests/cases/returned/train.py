"""Dies in its update, when what its step returns is known to itself alone. MODE: what that is."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torchrelay
from casework import MODE, Pairs, net, note, note_end, pace, strike

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
data = Pairs(200)
run = torchrelay.protect(model=model, optimizer=optimizer)


def of(loss, norm):
    """What MODE says, of what was known before the update."""
    if MODE == "item":
        return loss.item()
    if MODE == "all":
        return {"loss": loss.item(), "norm": [norm], "name": "train", "none": None}
    if MODE == "later":
        return loss.item() * 3.7
    if MODE == "rate":
        return loss.item(), optimizer.param_groups[0]["lr"] * 1.5
    return loss if MODE == "graph" else loss.detach()


@run.step
def step(at):
    optimizer.zero_grad()
    loss = ((model(data.inputs[at : at + 3]) - data.targets[at : at + 3]) ** 2).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if MODE == "own-clip":
        norm *= rank + 1
    optimizer.step()
    strike("update", run.global_step + 1, rank)
    return norm if MODE == "own-clip" else of(loss, norm)


@torch.no_grad()
def measure():
    found = (rank + 1) * float(model.module(data.inputs[:8]).sum())
    dist.barrier()
    return found


def told(found):
    if isinstance(found, dict):
        return [found["loss"], float(found["norm"][0]), found["name"]]
    return list(found) if isinstance(found, tuple) else found.detach() if isinstance(found, torch.Tensor) else found


for _ in run.steps(12):
    found = step((run.global_step * 6 + rank * 3) % 190)
    note(rank, run.global_step, found=told(found), measured=run.atomic(measure) if run.global_step % 5 == 0 else 0)
    pace(run.global_step)
note_end(rank, model.module)
run.atomic(dist.barrier)
