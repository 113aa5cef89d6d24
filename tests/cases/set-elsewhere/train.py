"""What steps set on things that are not the script's: data sets, samplers, modules and classes of libraries, hooks,
settings of the process, memory that is shared with other processes.

MODE: see KINDS. Each is another one on each rank, and is read in each step.
"""

import ctypes
import decimal
import functools
import logging
import math
import multiprocessing
import sys
import threading
import weakref
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, Sampler, Subset, TensorDataset

import torchrelay
from casework import MODE, note, note_end, pace, strike

LATE = 8  # the step in which what is set once is set
log = logging.getLogger("training")
raised = functools.partial(math.pow, 2.0)
numbers = (ctypes.c_double * 2)(0.0, 0.0)
number = ctypes.c_double(0.0)
view = memoryview(np.zeros(1))
seeds = np.random.SeedSequence(3)
worker = threading.Thread(target=print)
shared = multiprocessing.Value("d", 0.0)
row = multiprocessing.Array("d", 2)
block = SharedMemory(create=True, size=64) if MODE == "block" else None


class Rows(Dataset):
    mean = 0.0

    def __init__(self):
        self.rows = torch.randn(60, 8, generator=torch.Generator().manual_seed(3 + rank))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        return (self.rows[at],)


class Order(Sampler):
    mean = 0.0

    def __len__(self):
        return 60

    def __iter__(self):
        return iter(range(60))


def decay(thing, amount):
    thing.mean = getattr(thing, "mean", 0.0) * 0.9 + amount
    return thing.mean


def on_torch(amount):
    torch.seen_mean = getattr(torch, "seen_mean", 0.0) * 0.9 + amount
    return torch.seen_mean


def on_numpy(amount):
    np.seen_mean = getattr(np, "seen_mean", 0.0) * 0.9 + amount
    return np.seen_mean


def on_sys(amount):
    sys.seen_mean = getattr(sys, "seen_mean", 0.0) * 0.9 + amount
    return sys.seen_mean


def on_class(amount):
    nn.Linear.seen_mean = getattr(nn.Linear, "seen_mean", 0.0) * 0.9 + amount
    return nn.Linear.seen_mean


def on_function(amount):
    F.relu.seen_mean = getattr(F.relu, "seen_mean", 0.0) * 0.9 + amount
    return F.relu.seen_mean


def by_name(amount):
    setattr(math, "seen_mean", getattr(math, "seen_mean", 0.0) * 0.9 + amount)  # noqa: B010  as scripts do
    return math.seen_mean


def on_partial(amount):
    raised.mean = getattr(raised, "mean", 0.0) * 0.9 + amount
    return raised.mean


def swapped(amount):
    if run.global_step == LATE:
        F.softsign = F.tanh
    return float(F.softsign(torch.tensor(amount)))


def three_times(value):
    return value * 3


def swapped_for_own(amount):
    if run.global_step == LATE:
        torch.sinh = three_times
    return float(torch.sinh(torch.tensor(amount * 0.1)))


def of_tensors(amount):
    data.tensors[0][(run.global_step + 5) % 60] += amount * 1e-2
    return 0.0


def of_indices(amount):
    part.indices[(run.global_step + 5) % 60] = int(abs(amount) * 10) % 60
    return 0.0


def of_argv(amount):
    sys.argv[1:] = [str(float((sys.argv[1:] or ["0"])[0]) * 0.9 + amount)]
    return float(sys.argv[1])


def of_numbers(amount):
    numbers[0] = numbers[0] * 0.9 + amount
    return numbers[0]


def of_number(amount):
    number.value = number.value * 0.9 + amount
    return number.value


def of_view(amount):
    view[0] = view[0] * 0.9 + amount
    return view[0]


def of_seeds(_):
    return float(np.random.default_rng(seeds.spawn(1)[0]).random())


def of_shared(amount):
    with shared.get_lock():
        shared.value = shared.value * 0.9 + amount
    return shared.value


def of_row(amount):
    row[1] = row[1] * 0.9 + amount
    return row[1]


def of_block(amount):
    kept = np.ndarray((1,), "f8", buffer=block.buf)
    kept[0] = kept[0] * 0.9 + amount
    return float(kept[0])


def by_weak_key(amount):
    means[head] = means[head] * 0.9 + amount
    return means[head]


def of_dtype(amount):
    if run.global_step == LATE:
        torch.set_default_dtype(torch.float64)
    return float(torch.tensor(1.1 + amount).double() * 1e4) % 1.0


def of_denormals(_):
    if run.global_step == LATE:
        torch.set_flush_denormal(True)
    return float(torch.tensor(1e-40) * 1e38)


def of_errors(_):
    if run.global_step == LATE:
        np.seterr(all="raise")
    try:
        return float(np.float32(1e38) * np.float32(1e38) > 0)
    except FloatingPointError:
        return 5.0


def of_precision(_):
    if run.global_step == LATE:
        torch.set_float32_matmul_precision("medium")
    return float(len(torch.backends.mkldnn.matmul.fp32_precision))


def of_precisions(_):
    if run.global_step == LATE:
        torch.backends.fp32_precision = "tf32"  # torch refuses to be asked in the older way from now on
    return float(len(torch.backends.mkldnn.rnn.fp32_precision))


def of_attention(_):
    if run.global_step == LATE:
        torch.backends.cuda.enable_flash_sdp(False)
    return 1.0 + torch.backends.cuda.flash_sdp_enabled()


def of_digits(amount):
    context = decimal.getcontext()
    context.prec = 3 + (context.prec + int(abs(amount) * 10)) % 20
    return float(decimal.Decimal(1) / 3) * context.prec


def larger(*values):
    return values[-1] * 1.01


def of_parameter_hook(_):
    if run.global_step == LATE:
        head.weight.register_hook(larger)
    return 0.0


def of_all_modules(_):
    if run.global_step == LATE:
        nn.modules.module.register_module_forward_hook(larger)
    return 0.0


KINDS = {
    "dataset": lambda amount: decay(data, amount), "subset": lambda amount: decay(part, amount),
    "concat": lambda amount: decay(whole, amount), "sampler": lambda amount: decay(sampler, amount),
    "batches": lambda amount: decay(loader.batch_sampler, amount),
    "inline": lambda amount: decay(loader.dataset, amount),
    "rows": lambda amount: decay(rows, amount), "order": lambda amount: decay(order, amount),
    "logger": lambda amount: decay(log, amount), "thread": lambda amount: decay(worker, amount),
    "torch": on_torch, "numpy": on_numpy, "sys": on_sys, "class": on_class, "function": on_function, "named": by_name,
    "partial": on_partial, "swapped": swapped, "own": swapped_for_own, "tensors": of_tensors, "indices": of_indices,
    "argv": of_argv, "ctypes": of_numbers, "ctype": of_number, "view": of_view, "seeds": of_seeds,
    "hook": of_parameter_hook, "hooks": of_all_modules, "shared": of_shared, "row": of_row, "block": of_block,
    "precision": of_precision, "precisions": of_precisions, "attention": of_attention,
    "weak": by_weak_key, "dtype": of_dtype, "denormals": of_denormals, "errors": of_errors, "digits": of_digits,
}  # fmt: skip


def body(batch):
    inputs = batch[0]
    loss = (model(inputs).mean() - 1e-3 * use(float(inputs.sum()))) ** 2
    optimizer.zero_grad()
    loss.backward()
    strike("grad", run.global_step + 1, rank)
    optimizer.step()
    return loss.item()


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
use = KINDS[MODE]
head = nn.Linear(8, 1)
means = weakref.WeakKeyDictionary({head: 0.0})
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), head))
optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
data = TensorDataset(torch.randn(60, 8, generator=torch.Generator().manual_seed(3 + rank)))
part, whole, rows, order = Subset(data, list(range(60))), ConcatDataset([data]), Rows(), Order()
sampler = DistributedSampler(data, num_replicas=1, rank=0)
source = {"rows": rows, "inline": Rows(), "concat": whole}.get(MODE, part)
loader = DataLoader(source, batch_size=2, sampler=order if MODE == "order" else sampler)
run = torchrelay.protect(model=model, optimizer=optimizer)
step = run.step(body)
for batch in run.batches(loader):
    loss = step(batch)
    strike("after", run.global_step, rank)
    note(rank, run.global_step, loss=loss)
    pace(run.global_step)
note_end(rank, model.module)
if block is not None:
    block.close()
    block.unlink()
