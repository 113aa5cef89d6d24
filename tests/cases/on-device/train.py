"""What training scripts keep on the accelerator: averages, counters, windows, prefetched batches, generators, graphs.

Runs on a GPU where there is one, its ranks sharing it, else on the CPU with Gloo. MODE: see KINDS.
"""

import collections
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchrelay
from casework import MODE, note, note_end, pace, strike

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
if CUDA:  # ranks that share a device pass for hosts of their own
    os.environ["NCCL_HOSTID"] = f"worker-{os.getpid()}"
    os.environ |= {"NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0"}
    os.environ |= {"NCCL_MAX_CTAS": "2", "NCCL_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
torch.use_deterministic_algorithms(True, warn_only=True)
STEPS, WIDTH = 30, 64

total = torch.zeros(1, device=DEVICE)
means = {"loss": torch.zeros(1, device=DEVICE)}
window = collections.deque(maxlen=4)
counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)
static = torch.zeros(16, WIDTH, device=DEVICE)
large = torch.zeros(300, 400, device=DEVICE)
elapsed = []


class Meter:
    """As those of metric libraries: sums on the device."""

    def __init__(self):
        self.sum = torch.zeros((), device=DEVICE)
        self.count = torch.zeros((), dtype=torch.int64, device=DEVICE)

    def update(self, value):
        self.sum += value
        self.count += 1

    def compute(self):
        return self.sum / self.count


class Prefetcher:
    """Copies the next batch on a stream of its own while this one is trained on."""

    def __init__(self, batches):
        self.batches = iter(batches)
        self.stream = torch.cuda.Stream() if CUDA else None
        self.load()

    def load(self):
        batch = next(self.batches, None)
        if batch is None or self.stream is None:
            self.next = batch
            return
        with torch.cuda.stream(self.stream):
            self.next = batch.pin_memory().to(DEVICE, non_blocking=True)

    def __iter__(self):
        return self

    def __next__(self):
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        batch = self.next
        if batch is None:
            raise StopIteration
        self.load()
        return batch


meter = Meter()
half = torch.zeros(1, dtype=torch.bfloat16, device=DEVICE)
late = torch.zeros(1, device=DEVICE)
beside = torch.zeros(1, device=DEVICE)
table = torch.zeros(8, WIDTH, device=DEVICE)
pinned = torch.zeros(1).pin_memory() if CUDA else torch.zeros(1)
nested = {"rows": []}
last = [None]


def make_closed():
    seen = torch.zeros(1, device=DEVICE)

    def closed(inputs):
        nonlocal seen
        seen = seen * 0.9 + inputs.sum()
        return seen

    return closed


closed = make_closed()


def of_total(inputs):
    global total
    total = total * 0.9 + inputs.sum()
    return total


def of_means(inputs):
    means["loss"] *= 0.9
    means["loss"] += inputs.sum()
    return means["loss"]


def of_window(inputs):
    window.append(inputs.sum().detach())
    return torch.stack(list(window)).mean()


def of_meter(inputs):
    meter.update(inputs.sum())
    return meter.compute()


def of_counter(_):
    counter.add_(rank + 1)
    return counter.float()


def of_hung(inputs):
    layer.kept = layer.kept * 0.9 + inputs.sum()
    return layer.kept


def of_inplace(inputs):
    layer.kept.mul_(0.9).add_(inputs.sum())
    return layer.kept


def of_half(inputs):
    global half
    half = half * 0.9 + inputs.sum().bfloat16()
    return half.float()


def of_result(_):
    number = 0.0 if last[0] is None else last[0].detach() * 1e-2
    return number


def of_group(inputs):
    optimizer.param_groups[0]["seen"].mul_(0.9).add_(inputs.sum())
    return optimizer.param_groups[0]["seen"]


def of_schedule(inputs):
    schedule.seen = schedule.seen * 0.9 + inputs.sum()
    return schedule.seen


def of_nested(inputs):
    nested["rows"].append({"sum": inputs.sum().detach()})
    del nested["rows"][:-3]
    return sum(row["sum"] for row in nested["rows"])


def of_closure(inputs):
    return closed(inputs)


def of_pinned(inputs):
    """The sum comes to the host while the next step begins, and is read there."""
    found = pinned.clone()
    pinned.copy_(inputs.sum(), non_blocking=True)
    return found.to(DEVICE)


def of_side(inputs):
    """A running sum that is kept on a stream of its own."""
    if CUDA:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(200):
                beside.mul_(1.0)
            beside.mul_(0.9).add_(inputs.sum())
        torch.cuda.current_stream().wait_stream(side)
    else:
        beside.mul_(0.9).add_(inputs.sum())
    return beside


def of_late(_):
    return late


def of_bigger(inputs):
    layer.bigger[:16, :WIDTH].mul_(0.5).add_(inputs)
    return layer.bigger.sum()


def of_table(inputs):
    """A memory bank: a row is written in each step."""
    table[run.global_step % len(table)] = inputs.mean(0)
    return table.sum()


def of_buffer(inputs):
    layer.seen.mul_(0.9).add_(inputs.sum())
    return layer.seen


def of_static(inputs):
    static.mul_(0.5).add_(inputs)
    return static.sum()


def of_large(inputs):
    large[:16, :WIDTH].mul_(0.5).add_(inputs)
    return large.sum()


def of_generator(_):
    return torch.rand(1, generator=own, device=DEVICE)


def of_global(_):
    return torch.rand(1, device=DEVICE)


def of_events(inputs):
    if CUDA:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        inputs.sum()
        end.record()
        end.synchronize()
        elapsed.append(begin.elapsed_time(end))
    return 0.0


def of_memory(_):
    if CUDA:
        elapsed.append(torch.cuda.max_memory_allocated())
    return 0.0


def of_average(inputs):
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)
        return average(inputs).mean()


def of_main_grads(inputs):
    for parameter in model.parameters():
        parameter.main_grad.mul_(0.5).add_(inputs.sum())
    return sum(parameter.main_grad.sum() for parameter in model.parameters())


def of_stale_grads(_):
    return sum(parameter.grad.sum() for parameter in model.parameters() if parameter.grad is not None)


def of_zeroed_grads(inputs):
    return of_stale_grads(inputs)


def of_momentum(_):
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.main_grad.mul_(0.5).add_(parameter.grad)
    return sum(parameter.main_grad.sum() for parameter in model.parameters())


def of_nothing(_):
    return 0.0


KINDS = {
    "total": of_total, "means": of_means, "window": of_window, "meter": of_meter, "counter": of_counter,
    "inplace": of_inplace, "half": of_half, "result": of_result, "group": of_group, "schedule": of_schedule,
    "nested": of_nested, "closure": of_closure, "pinned": of_pinned, "side": of_side, "late": of_late,
    "bigger": of_bigger, "table": of_table, "buffer": of_buffer,
    "hung": of_hung, "static": of_static, "large": of_large, "generator": of_generator, "global": of_global,
    "events": of_events, "memory": of_memory, "average": of_average, "main": of_main_grads,
    "stale": of_stale_grads, "zeroed": of_zeroed_grads, "momentum": of_momentum,
    "prefetch": of_nothing, "scaler": of_nothing, "autocast": of_nothing, "graphed": of_nothing,
    "captured": of_nothing, "fused": of_nothing, "stream": of_nothing, "compiled": of_nothing,
}  # fmt: skip


def loss_of(inputs):
    if MODE == "autocast":
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            return model(inputs).float().mean()
    if MODE == "stream" and CUDA:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            scaled = inputs * 1.5
        torch.cuda.current_stream().wait_stream(side)
        return model(scaled).mean()
    return model(inputs).mean()


def body(inputs):
    inputs = inputs.to(DEVICE)
    if MODE == "captured" and CUDA:
        static.copy_(inputs)
        graph.replay()
        for parameter, value in zip(model.parameters(), captured, strict=True):
            parameter.grad = value.clone()
            dist.all_reduce(parameter.grad)
        strike("grad", run.global_step + 1, rank)
        optimizer.step()
        return float(static.sum())
    loss = (loss_of(inputs) - 1e-3 * use(inputs)) ** 2
    loss = loss.sum()
    optimizer.zero_grad(set_to_none=MODE != "zeroed")
    scaler.scale(loss).backward()
    strike("grad", run.global_step + 1, rank)
    scaler.step(optimizer)
    scaler.update()
    if MODE == "late":
        late.mul_(0.9).add_(inputs.sum())
    if MODE == "result":
        last[0] = loss
    return loss.detach()


dist.init_process_group("nccl" if CUDA else "gloo")
if CUDA:
    torch.cuda.set_device(0)
rank = dist.get_rank()
use = KINDS[MODE]
torch.manual_seed(1)
layer = nn.Linear(WIDTH, WIDTH).to(DEVICE)
layer.kept = torch.zeros(1, device=DEVICE)
layer.bigger = torch.zeros(300, 400, device=DEVICE)
layer.register_buffer("seen", torch.zeros(1, device=DEVICE))
inner = nn.Sequential(layer, nn.Dropout(0.1), nn.ReLU(), nn.Linear(WIDTH, 1)).to(DEVICE)
average = copy.deepcopy(inner).eval() if MODE == "average" else None
own = torch.Generator(device=DEVICE).manual_seed(rank)
side = torch.cuda.Stream() if CUDA else None
scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0, growth_interval=3, enabled=MODE == "scaler")
if MODE == "graphed" and CUDA:
    inner = torch.cuda.make_graphed_callables(inner, (torch.zeros(16, WIDTH, device=DEVICE),))
if MODE == "captured" and CUDA:
    model = inner
    for _ in range(3):
        model(static).mean().backward()
    for parameter in model.parameters():
        parameter.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(static).mean().backward()
    captured = [parameter.grad for parameter in model.parameters()]
else:
    model = DistributedDataParallel(torch.compile(inner) if MODE == "compiled" else inner, broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **({"fused": True} if MODE == "fused" else {}))
if MODE in ("main", "momentum"):
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
if MODE == "group":
    optimizer.param_groups[0]["seen"] = torch.zeros(1, device=DEVICE)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
schedule.seen = torch.zeros(1, device=DEVICE)
run = torchrelay.protect(model=model, optimizer=optimizer, state={"scaler": scaler} if MODE == "scaler" else {})
step = run.step(body)
batches = [torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(100 * rank + at)) for at in range(STEPS)]
source = Prefetcher(batches) if MODE == "prefetch" else batches
for inputs in run.batches(source):
    loss = step(inputs)
    strike("after", run.global_step, rank)
    note(rank, run.global_step, loss=loss)
    pace(run.global_step)
note_end(rank, model.module if hasattr(model, "module") else model)
