"""What one step keeps for the next one, or for people, in each shape and size.

MODE: PLACE-KIND-SIZE, with "-first" where it is there from the start, "-put" where it is put into what is there, and
"-late" where it is kept after the update.

PLACE   trainer: an attribute of the object whose method the step is   module: of the model   global: a variable
        shown: the step does not read it; the script prints it after the step   unread: nobody reads it
        counted: nothing but a count of the steps
KIND    see KINDS
SIZE    small: 64 numbers, carried   large: 8,192, not carried
"""

import collections
import dataclasses
import types
import typing

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import torchrelay
from casework import MODE, note, note_end, pace, strike

place, kind, size, *more = MODE.split("-")
batch_size, width = (4, 16) if size == "small" else (64, 128)

Pair = collections.namedtuple("Pair", "h c")


class Typed(typing.NamedTuple):
    h: object
    c: object
    n: int = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    h: object
    c: object


@dataclasses.dataclass
class Record:
    h: object
    c: object


@dataclasses.dataclass(slots=True)
class Slots:
    h: object
    c: object


class Plain:
    def __init__(self, h, c):
        self.h, self.c = h, c


class Attributes(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Itself(dict):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.__dict__ = self


class Row(list):
    pass


class Own(tuple):
    pass


KINDS = {
    "pair": Pair, "typed": Typed, "frozen": Frozen, "record": Record, "slots": Slots, "plain": Plain,
    "space": types.SimpleNamespace, "dict": dict, "ordered": collections.OrderedDict, "attributes": Attributes,
    "itself": Itself, "user": collections.UserDict,
    "default": lambda h, c: collections.defaultdict(list, h=h, c=c),
    "tuple": lambda h, c: (h, c), "list": lambda h, c: [h, c], "deque": lambda h, c: collections.deque([h, c]),
    "row": lambda h, c: Row([h, c]), "own": lambda h, c: Own((h, c)),
    "arrays": lambda h, c: Pair(h.detach().numpy(), c.detach().numpy()),
    "pairs": lambda h, c: Pair(Pair(h, c), c), "in_list": lambda h, c: [Pair(h, c)],
    "in_dict": lambda h, c: {"rnn": Pair(h, c)}, "of_lists": lambda h, c: Pair([h], {"c": c}),
    "in_tuples": lambda h, c: ((h, c), (h, c)), "in_plain": lambda h, c: Plain(Pair(h, c), 0),
    "in_attributes": lambda h, c: Attributes(rnn=Attributes(h=h, c=c)),
}  # fmt: skip


def read(kept):
    """Its two tensors; None if there is nothing yet."""
    if kept is None:
        return None
    if kind in ("in_list", "in_tuples"):
        kept = kept[0]
    elif kind in ("in_dict", "in_attributes"):
        kept = kept["rnn"]
    elif kind in ("pairs", "in_plain"):
        kept = kept.h
    if kind == "of_lists":
        return kept.h[0], kept.c["c"]
    if kind == "arrays":
        return torch.from_numpy(kept.h), torch.from_numpy(kept.c)
    if isinstance(kept, (tuple, list, collections.deque)):
        return kept[0], kept[1]
    return (kept["h"], kept["c"]) if hasattr(kept, "keys") else (kept.h, kept.c)


def beginning():
    return KINDS[kind](h=torch.zeros(1, batch_size, width), c=torch.zeros(1, batch_size, width))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(8, width, batch_first=True), nn.Linear(width, 1)
        self.kept = beginning() if "first" in more else None

    def forward(self, inputs, kept):
        if place == "module":
            kept = read(self.kept)
        found, (h, c) = self.rnn(inputs, kept)
        if place == "module":
            self.kept = put(self.kept, h.detach(), c.detach())
        return self.out(found), h, c


def put(kept, h, c):
    if "put" in more and kept is not None:
        kept["h"], kept["c"] = h, c
        return kept
    return KINDS[kind](h=h, c=c)


class Trainer:
    def __init__(self):
        self.kept, self.count = beginning() if "first" in more else None, 0

    def step(self, inputs):
        global kept
        before = read(self.kept) if place == "trainer" else read(kept) if place == "global" else None
        found, h, c = model(inputs, before)
        loss = ((found - inputs.mean(-1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        if "late" not in more:
            self.keep(h, c, loss)
        strike("grad", run.global_step + 1, rank)
        optimizer.step()
        strike("upd", run.global_step + 1, rank)
        if "late" in more:
            self.keep(h, c, loss)
            self.count += 1
        strike("put", run.global_step + 1, rank)
        return loss.item()

    def keep(self, h, c, loss):
        global kept
        if place == "trainer":
            self.kept = put(self.kept, h.detach(), c.detach())
        elif place == "global":
            kept = put(kept, h.detach(), c.detach())
        elif place == "shown":
            self.kept = KINDS[kind](h=loss, c=loss * 2)
        elif place == "unread":
            self.kept = put(self.kept, h, c)


class Chunks(Dataset):
    def __init__(self):
        self.all = torch.randn(30, batch_size, 3, 8, generator=torch.Generator().manual_seed(3 + rank))

    def __len__(self):
        return len(self.all)

    def __getitem__(self, at):
        return self.all[at]


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
model = DistributedDataParallel(Net())
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
kept = beginning() if "first" in more and place == "global" else None
trainer = Trainer()
run = torchrelay.protect(model=model, optimizer=optimizer)
step = run.step(trainer.step)
for inputs in run.batches(DataLoader(Chunks(), batch_size=None)):
    loss = step(inputs)
    strike("after", run.global_step, rank)
    if place == "shown":
        loss = float(sum(read(trainer.kept)))
    note(rank, run.global_step, loss=loss, count=trainer.count)
    pace(run.global_step)
note_end(rank, model.module)
