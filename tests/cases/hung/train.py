"""What a script hangs on objects of torch's own: a running value on a layer, rows on a schedule, a flag on a loader.

MODE: KIND-PLACE.

KIND    see KINDS: what is hung there, and how it is used in each step; each rank's is another one
PLACE   layer, activation, model, loss, parameter, optimizer, schedule, loader: on what
        hook: on a layer, by a hook that it calls   group: in the options of the optimizer
        option: one of its own options is each rank's own, of a layer that is not trained
"""

import collections

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import torchrelay
from casework import MODE, note, note_end, pace, strike

kind, place = MODE.split("-")


class Own:
    mean = 0.0


def add_to_list(thing, number):
    thing["kept"].append(number)
    return sum(thing["kept"]) / len(thing["kept"])


def add_to_window(thing, number):
    thing["kept"].append(number)
    return sum(thing["kept"])


def decay_entry(thing, number):
    thing["kept"]["mean"][0] = thing["kept"]["mean"][0] * 0.9 + number
    return thing["kept"]["mean"][0]


def decay_in_place(thing, number):
    thing["kept"] *= 0.9
    thing["kept"] += number
    return float(thing["kept"].sum())


def decay(thing, number):
    thing["kept"] = thing["kept"] * 0.9 + number
    return float(np.sum(np.asarray(thing["kept"])))


def begin_or_decay(thing, number):
    thing["kept"] = torch.full((3,), number) if thing["kept"] is None else thing["kept"] * 0.9 + number
    return float(thing["kept"].sum())


def decay_own(thing, number):
    thing["kept"].mean = thing["kept"].mean * 0.9 + number
    return thing["kept"].mean


def decay_first(thing, number):
    thing["kept"] = (thing["kept"][0] * 0.9 + number, 1.0)
    return thing["kept"][0]


def draw(thing, _):
    return float(torch.rand(1, generator=thing["kept"]))


def draw_by_numpy(thing, _):
    return float(thing["kept"].random())


def count(thing, number):
    thing["kept"][round(number) % 5] += 1
    return float(max(thing["kept"].values()))


def go_on(thing, _):
    return float(next(thing["kept"]))


KINDS = {
    "list": (list, add_to_list), "window": (lambda: collections.deque(maxlen=3), add_to_window),
    "nested": (lambda: {"mean": [0.0]}, decay_entry), "tensor": (lambda: torch.zeros(3), decay_in_place),
    "rebound": (lambda: torch.zeros(3), decay), "array": (lambda: np.zeros(3), decay_in_place),
    "later": (lambda: None, begin_or_decay), "own": (Own, decay_own), "tuple": (lambda: (0.0, 1.0), decay_first),
    "generator": (lambda: torch.Generator().manual_seed(rank), draw), "counter": (collections.Counter, count),
    "numpy": (lambda: np.random.default_rng(rank), draw_by_numpy), "number": (float, decay),
    "large": (lambda: torch.zeros(100_000), decay_in_place), "replaced": (lambda: torch.zeros(100_000), decay),
    "iterator": (lambda: iter(range(1000)), go_on),
}  # fmt: skip
make, use = KINDS[kind]


class Batches(Dataset):
    def __init__(self):
        self.all = torch.randn(30, 4, 8, generator=torch.Generator().manual_seed(3 + rank))

    def __len__(self):
        return len(self.all)

    def __getitem__(self, at):
        return self.all[at]


def here():
    """Where it hangs: nothing else refers to it."""
    if place in ("group", "option"):
        return optimizer.param_groups[0]
    things = {
        "layer": layer, "hook": layer, "activation": activation, "model": model, "loss": measure,
        "parameter": layer.weight, "optimizer": optimizer, "schedule": schedule, "loader": loader,
    }  # fmt: skip
    return vars(things[place])


def use_in_hook(module, inputs):
    return (inputs[0] + 1e-3 * use(vars(module), float(inputs[0].sum())),)


def body(inputs):
    if place == "option":
        optimizer.param_groups[1]["weight_decay"] = 0.1 * rank
    number = 0.0 if place == "hook" else use(here(), float(inputs.sum()))
    outputs = model(inputs)
    loss = (outputs.mean() - 1e-3 * number) ** 2 + 0.0 * measure(outputs, torch.zeros(4, 1))
    optimizer.zero_grad()
    loss.backward()
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    schedule.step()
    return loss.item()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
layer, activation, measure = nn.Linear(8, 8), nn.ReLU(), nn.MSELoss()
if place == "hook":
    layer.register_forward_pre_hook(use_in_hook)
model = DistributedDataParallel(nn.Sequential(layer, activation, nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
loader = DataLoader(Batches(), batch_size=None)
here()["kept"] = make()
if place == "option":
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
run = torchrelay.protect(model=model, optimizer=optimizer, state={"schedule": schedule})
step = run.step(body)
for inputs in run.batches(loader):
    loss = step(inputs)
    strike("after", run.global_step, rank)
    note(rank, run.global_step, loss=loss)
    pace(run.global_step)
note_end(rank, model.module)
