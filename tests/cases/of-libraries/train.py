"""Objects of libraries that change while a script trains: an environment, a scaler, a sorted list, a distribution.

MODE: KIND-PLACE.

KIND    see KINDS. progress: for people; nothing is computed with it   once: it makes itself ready in its first use
        fitted: to the data of its first use   third, late: to those of step 3, of step 16   unread: so, and not used
PLACE   step: in an attribute, used in the step   global: in a global variable, used in the step
        between: in an attribute, used between steps   local: in a variable of the function with the loop
"""

import configparser
import decimal
import email.message
import io
import queue

import networkx
import numpy as np
import torch
import torch.distributed as dist
from numpy.polynomial import Polynomial
from rich.progress import Progress
from sortedcontainers import SortedDict, SortedList
from torch import distributions, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import torchrelay
from casework import MODE, note, note_end, pace, strike

kind, place = MODE.split("-")


def sort(kept, number):
    kept.add(number)
    return kept[len(kept) // 2]


def file_in(kept, number):
    kept[round(number)] = kept.get(round(number), 0.0) + 1.0
    return kept.peekitem(0)[0] + kept.peekitem(-1)[1] + len(kept)


def link(kept, number):
    kept.add_edge(round(number), len(kept))
    return float(kept.number_of_nodes())


def bend(kept, number):
    kept.coef = kept.coef + 0.1 * number
    return float(kept(1.0))


def centre(kept, number):
    kept.loc = kept.loc * 0.9 + number
    return float(kept.loc)


def write(kept, number):
    kept.write(b"more" if number > 0 else b"-")
    return float(kept.tell())


def head(kept, number):
    del kept["mean"]
    kept["mean"] = repr(float(kept.get("last", "0")) + number)
    kept.replace_header("last", kept["mean"])
    return float(kept["mean"])


def queue_up(kept, number):
    kept.put(number)
    return kept.queue[0]


def round_more(kept, number):
    kept.prec += number > 0
    return float(kept.prec)


def mask(kept, number):
    kept += number
    return float(kept.sum())


def set_up(kept, number):
    kept["kept"]["sum"] = repr(kept.getfloat("kept", "sum") + number)
    return kept.getfloat("kept", "sum")


def go_on(kept, number):
    kept.advance(kept.task_ids[0])
    return number


def be_ready(kept, number):
    if not kept.coef.any():
        kept.coef = np.ones(2)
    return float(kept(1.0)) + number


def fit_first(kept, number):
    if not kept.coef.any():
        kept.coef = np.array([number, 1.0])
    return float(kept(1.0)) + number


def fit_at(step, *, read=True):
    def fit(kept, number):
        if run.global_step == step - 1:
            kept.coef = np.array([number, 1.0])
        return number + (float(kept(1.0)) if read else 0.0)

    return fit


def made_message():
    found = email.message.Message()
    found["last"] = "0"
    return found


def made_progress():
    found = Progress(disable=True)
    found.add_task("steps", total=30)
    return found


def made_settings():
    found = configparser.ConfigParser()
    found["kept"] = {"sum": "0"}
    return found


KINDS = {
    "sorted": (SortedList, sort), "filed": (SortedDict, file_in), "graph": (networkx.Graph, link),
    "polynomial": (lambda: Polynomial([1.0, 2.0]), bend),
    "normal": (lambda: distributions.Normal(torch.zeros(1), torch.ones(1)), centre),
    "bytes": (io.BytesIO, write), "message": (made_message, head), "queue": (queue.PriorityQueue, queue_up),
    "context": (decimal.Context, round_more),
    "masked": (lambda: np.ma.masked_array(np.zeros(4), mask=[0, 0, 1, 0]), mask),
    "settings": (made_settings, set_up), "progress": (made_progress, go_on),
    "once": (lambda: Polynomial([0.0, 0.0]), be_ready), "fitted": (lambda: Polynomial([0.0, 0.0]), fit_first),
    "third": (lambda: Polynomial([0.0, 0.0]), fit_at(3)), "late": (lambda: Polynomial([0.0, 0.0]), fit_at(16)),
    "unread": (lambda: Polynomial([0.0, 0.0]), fit_at(16, read=False)),
}  # fmt: skip
make, use = KINDS[kind]


class Batches(Dataset):
    def __init__(self):
        self.all = torch.randn(30, 4, 8, generator=torch.Generator().manual_seed(3 + rank))

    def __len__(self):
        return len(self.all)

    def __getitem__(self, at):
        return self.all[at]


class Trainer:
    def __init__(self):
        self.kept = make()

    def step(self, inputs, number):
        if number is None:
            number = use(kept if place == "global" else self.kept, float(inputs.sum()))
        loss = (model(inputs).mean() - 0.01 * number) ** 2
        optimizer.zero_grad()
        loss.backward()
        strike("grad", run.global_step + 1, rank)
        optimizer.step()
        return loss.item()


def main():
    mine = make() if place == "local" else trainer.kept
    for inputs in run.batches(DataLoader(Batches(), batch_size=None)):
        number = use(mine, float(inputs.sum())) if place in ("local", "between") else None
        loss = step(inputs, number)
        strike("after", run.global_step, rank)
        note(rank, run.global_step, loss=loss)
        pace(run.global_step)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
trainer = Trainer()
kept = make() if place == "global" else None
run = torchrelay.protect(model=model, optimizer=optimizer)
step = run.step(trainer.step)
main()
note_end(rank, model.module)
