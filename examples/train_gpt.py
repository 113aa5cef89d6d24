"""A small GPT that learns Python from the bytes of the standard library: plain PyTorch with DDP, FSDP2, HSDP,
tensor or pipeline parallelism.

    torchrelay run --nproc-per-node 4 --spares 1 examples/train_gpt.py      # goes on when a rank is lost
    torchrun --nproc-per-node 4 examples/train_gpt.py                       # the same script, unprotected
    python examples/train_gpt.py                                            # one process

The lines that torchrelay needs end in `# torchrelay`; everything else is what it would be without.
"""

import argparse
import hashlib
import json
import math
import os
import random
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import torchrelay  # torchrelay

# name: (width, layers, heads); the number of parameters is said at the start
SIZES = {"tiny": (64, 2, 2), "small": (128, 3, 4), "4m": (256, 5, 8)}
VOCABULARY = 256  # bytes
LAYOUTS = ("ddp", "fsdp", "hsdp", "tp", "pp")
TOGETHER = {"tp": 2, "pp": 2}  # ranks that go through one batch together
# Checkpoints do not depend on how many ranks there are, nor on the layout, but that stages have a head of their own.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
STAGE = StateDictOptions(full_state_dict=True)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", choices=SIZES, default="small", help="size of the model (default: small, 0.6 M)")
    parser.add_argument("--layout", choices=LAYOUTS, default="ddp", help="how ranks share the model")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--epoch-steps", type=int, default=100, help="steps in an epoch")
    parser.add_argument("--batch", type=int, default=4, help="windows in a rank's batch")
    parser.add_argument("--block", type=int, default=64, help="bytes in a window")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps until the learning rate is at its top")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=20, help="steps between two lines of rank 0")
    parser.add_argument("--checkpoint", metavar="FILE", help="written at the end of each epoch, loaded at the start")
    parser.add_argument("--losses", metavar="DIR", help="write each rank's losses, bit by bit, to DIR/rank-<r>.jsonl")
    return parser.parse_args()


# ---------------------------------------------------------------- data


def read_corpus():
    """The source text of the installed standard library, as one tensor of bytes: the same on every rank."""
    root = Path(sysconfig.get_paths()["stdlib"])
    others = {"site-packages", "dist-packages"}
    files = sorted(path for path in root.rglob("*.py") if others.isdisjoint(path.parts))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


class Windows(Dataset):
    """`count` windows of `block` bytes, spread evenly over the text, each with the bytes that follow by one."""

    def __init__(self, text, block, count):
        if count * block >= len(text):
            raise SystemExit(f"{count} windows of {block} bytes are more than the {len(text)} bytes of text")
        self.text, self.block, self.count = text, block, count
        self.stride = (len(text) - block - 1) // count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        start = index * self.stride
        window = self.text[start : start + self.block + 1].long()
        return window[:-1], window[1:]


def loaders(text, args, reader, readers):
    """The training loader with its sampler, and a loader of the last windows, which are kept for evaluation.

    `reader`, `readers`: ranks that go through one batch together are one reader.
    """
    held_out = 8 * args.batch * readers
    windows = Windows(text, args.block, args.epoch_steps * args.batch * readers + held_out)
    train = torch.utils.data.Subset(windows, range(len(windows) - held_out))
    rest = torch.utils.data.Subset(windows, range(len(windows) - held_out, len(windows)))
    sampler = DistributedSampler(train, readers, reader, shuffle=True, seed=args.seed, drop_last=True)
    steady = DistributedSampler(rest, readers, reader, shuffle=False)
    return DataLoader(train, args.batch, sampler=sampler), sampler, DataLoader(rest, args.batch, sampler=steady)


# ---------------------------------------------------------------- model


class Block(nn.Module):
    """One layer of the transformer: attention, then a two-layer perceptron, each beside a shortcut."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def attend(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.drop(self.attend(self.norm_attention(x)))
        return x + self.drop(self.mlp(self.norm_mlp(x)))


class GPT(nn.Module):
    """A decoder over bytes. Input: (batch, length) of int64; output: (batch, length, 256) of logits."""

    def __init__(self, width, layers, heads, block, dropout):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(block, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.apply(self.initialise)

    @staticmethod
    def initialise(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens):
        x = self.drop(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        return self.norm(self.blocks(x)) @ self.token.weight.T


class Part(nn.Module):
    """What one stage of a pipeline does of a GPT: some blocks, the embeddings before them, the logits behind them.

    The last stage has not the embeddings of the first, so its logits are made by weights of their own.
    """

    def __init__(self, whole, blocks, first, last):
        super().__init__()
        self.first, self.last = first, last
        if first:
            self.token, self.position, self.drop = whole.token, whole.position, whole.drop
        self.blocks = nn.ModuleDict({str(at): whole.blocks[at] for at in blocks})  # names as in the whole
        if last:
            self.norm, self.head = whole.norm, nn.Linear(*whole.token.weight.shape[::-1], bias=False)
            nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, x):
        if self.first:
            x = self.drop(self.token(x) + self.position.weight[: x.shape[1]])
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def loss_of(logits, following):
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def warm_up_then_cosine(warmup, total):
    """The learning rate as a share of its top, by step."""

    def share(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

    return share


class Together:
    """Each rank goes through the whole model: it is whole on each, in shards, or its layers are split between two."""

    def __init__(self, model, layout, world):
        self.model, self.layout = spread(model, layout, world), layout
        self.weight = 1 / world  # of this rank's loss in the average

    def train(self, batch):
        """The loss of this rank's batch, of which gradients are there afterwards."""
        tokens, following = batch
        loss = loss_of(self.model(tokens), following)
        loss.backward()
        return loss.detach()

    def evaluate(self, batch):
        tokens, following = batch
        with torch.no_grad():
            return loss_of(getattr(self.model, "module", self.model)(tokens), following)

    def clip(self):
        if self.layout == "tp":  # halves and wholes lie on different meshes, of which torch takes no common norm
            clip(self.model)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def whole(self, optimizer):
        """What a checkpoint holds of model and optimizer. On all ranks: shards are put together."""
        return get_state_dict(self.model, optimizer, options=WHOLE)


def spread(model, layout, world):
    """Let the ranks share the model: whole on each of them, in shards, in pairs of shards, or of halves of layers."""
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout != "fsdp" and world % 2:
        raise SystemExit(f"--layout {layout} needs an even number of ranks, not {world}")
    sizes = {"shard": world} if layout == "fsdp" else {"replicate": world // 2, "shard": 2}
    if layout == "tp":
        sizes = {"replicate": world // 2, "shard": 1, "tensor": 2}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    shards = mesh["replicate", "shard"] if layout == "tp" else mesh
    for block in model.blocks:
        if layout == "tp":
            parallelize_module(block.mlp, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=shards)
    return fully_shard(model, mesh=shards)


class Piped:
    """Two ranks have half of the blocks each, and go through a batch together, chunk by chunk."""

    CHUNKS = 2

    def __init__(self, model, args, rank, world):
        if world % 2 or args.batch % self.CHUNKS:
            raise SystemExit("--layout pp needs an even number of ranks, and even batches")
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "stage"))
        at = rank % 2
        # A dimension over all ranks is the default group, and torchrelay wants stages to have one of their own.
        self.group = mesh["stage"].get_group() if world > 2 else dist.new_group()
        half = len(model.blocks) // 2
        part = Part(model, range(half) if at == 0 else range(half, len(model.blocks)), at == 0, at == 1)
        self.model = DistributedDataParallel(part, process_group=mesh["replicate"].get_group())
        self.last, self.weight = at == 1, 2 / world
        rows, width = args.batch // self.CHUNKS, model.token.weight.shape[1]
        between = torch.zeros(rows, args.block, width, requires_grad=True)
        tokens = torch.zeros(rows, args.block, dtype=torch.long)
        logits = torch.zeros(rows, args.block, VOCABULARY, requires_grad=True)
        shapes = {"input_args": between if at else tokens, "output_args": logits if at else between}
        stage = PipelineStage(self.model, at, 2, torch.device("cpu"), group=self.group, **shapes)
        self.schedule = Schedule1F1B(stage, self.CHUNKS, loss_of)

    def train(self, batch):
        return self.go(self.schedule.step, batch)

    def evaluate(self, batch):
        with torch.no_grad():
            return self.go(self.schedule.eval, batch)

    def go(self, through, batch):
        """The loss is known behind the last stage; elsewhere it is zero."""
        tokens, following = batch
        losses = []
        if self.last:
            through(target=following, losses=losses)
            return torch.stack(losses).mean().detach()
        through(tokens)
        return torch.zeros(())

    def clip(self):
        clip(self.model, self.group)

    def whole(self, optimizer):
        """The same of all stages: their names tell them apart. Torch pickles what its ranks send one another here."""
        parts = [None, None]
        dist.all_gather_object(parts, get_state_dict(self.model, optimizer, options=STAGE), group=self.group)
        (model, steps), (more, further) = parts
        groups = [
            {**one, "params": one["params"] + other["params"]}
            for one, other in zip(steps["param_groups"], further["param_groups"], strict=True)
        ]
        return {**model, **more}, {"state": {**steps["state"], **further["state"]}, "param_groups": groups}


def clip(model, stages=None, limit=1.0):
    """Clip by the norm of all gradients, on whichever ranks they are; `stages`: the group of this rank's pipeline."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norms = [gradient.norm() for gradient in gradients]
    square = sum(norm.full_tensor() ** 2 if hasattr(norm, "full_tensor") else norm**2 for norm in norms)
    if stages is not None:
        dist.all_reduce(square, group=stages)
    share = min(1.0, limit / (float(square) ** 0.5 + 1e-6))
    for gradient in gradients:
        gradient.mul_(share)


# ---------------------------------------------------------------- training


class Losses:
    """A rank's losses as lines of JSON. A replacement may repeat its predecessor's last line, never with other bits."""

    def __init__(self, folder, rank):
        self.file = None
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.file = (Path(folder) / f"rank-{rank}.jsonl").open("a", buffering=1)

    def note(self, **line):
        if self.file:
            self.file.write(json.dumps({**line, "at": time.time()}) + "\n")


def save(path, epoch, shared, optimizer, schedule):
    """Write the checkpoint so that a reader sees the old one or the new one, and a second try does no harm."""
    whole, steps = shared.whole(optimizer)
    if dist.get_rank() == 0:
        parts = {"model": whole, "optimizer": steps, "schedule": schedule.state_dict()}
        torch.save({"epoch": epoch, **parts}, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)


def load(path, model, optimizer, schedule):
    """Return the number of epochs that the checkpoint has behind it; 0 without a checkpoint."""
    if not path or not Path(path).exists():
        return 0
    saved = torch.load(path, weights_only=True)
    here = {name for name, _ in getattr(model, "module", model).named_parameters()}  # of a pipeline, this rank's stage
    groups = [
        {**group, "params": [name for name in group["params"] if name in here]}
        for group in saved["optimizer"]["param_groups"]
    ]
    state = {name: value for name, value in saved["optimizer"]["state"].items() if name in here}
    parts = {
        "model_state_dict": {name: value for name, value in saved["model"].items() if name in here},
        "optim_state_dict": {"state": state, "param_groups": groups},
    }
    set_state_dict(model, optimizer, **parts, options=WHOLE)
    schedule.load_state_dict(saved["schedule"])
    return saved["epoch"]


def digest(model):
    """A fingerprint of all parameters, to the last bit."""
    sums = hashlib.sha256()
    for parameter in model.parameters():
        parameter = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        sums.update(parameter.detach().contiguous().numpy().tobytes())
    return sums.hexdigest()


def seed_all(seed):
    """Seed every generator there is. Only torch's is drawn from here, but two runs are compared with all of them."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def connect():
    """Join the process group; one process alone is a group of one."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def main():
    args = arguments()
    seed_all(args.seed)
    text = read_corpus()
    width, layers, heads = SIZES[args.params]
    model = GPT(width, layers, heads, args.block, args.dropout)
    # Up to here every rank does the same; from here on this process has a number.
    rank, world = connect()
    together = TOGETHER.get(args.layout, 1)
    train, sampler, held_out = loaders(text, args, rank // together, world // together)
    shared = Piped(model, args, rank, world) if args.layout == "pp" else Together(model, args.layout, world)
    model = shared.model
    # Dropout differs between ranks, but not between halves of layers: both compute what lies between them.
    seed_all(args.seed + 1 + (rank // 2 if args.layout == "tp" else rank))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, warm_up_then_cosine(args.warmup, args.epochs * args.epoch_steps)
    )
    # Once: who takes over a rank would find a checkpoint that this very job has written, and count from there.
    done = torchrelay.once("start", load, args.checkpoint, model, optimizer, schedule)  # torchrelay
    losses = Losses(args.losses, rank)
    if rank == 0:
        size = sum(parameter.numel() for parameter in model.parameters())
        print(f"{size / 1e6:.2f} M parameters, {len(text) / 1e6:.1f} MB of text, {world} ranks", flush=True)

    run = torchrelay.protect(model=model, optimizer=optimizer, state={"schedule": schedule})  # torchrelay

    @run.step  # torchrelay
    def train_step(batch):
        optimizer.zero_grad()
        loss = shared.train(batch)
        shared.clip()
        average = loss * shared.weight
        dist.all_reduce(average)  # before the update: after it only local work may follow
        optimizer.step()
        return average

    def evaluate():
        model.eval()
        total = sum(map(shared.evaluate, held_out)) / len(held_out) * shared.weight
        model.train()
        dist.all_reduce(total)
        return total

    for epoch in run.epochs(args.epochs):  # torchrelay
        if epoch < done:
            continue
        sampler.set_epoch(epoch)
        for batch in run.batches(train):  # torchrelay
            loss = train_step(batch)
            schedule.step()
            # Not a counter of our own: a replacement enters this loop in the middle.
            step = done * args.epoch_steps + run.global_step
            losses.note(step=step, loss=float(loss).hex())
            if rank == 0 and step % args.log_every == 0:
                print(f"step {step}  loss {loss:.4f}", flush=True)
        validation = run.atomic(evaluate)  # torchrelay
        if rank == 0:
            print(f"epoch {epoch + 1} of {args.epochs}  validation {validation:.4f}", flush=True)
        if args.checkpoint:
            run.atomic(save, args.checkpoint, epoch + 1, shared, optimizer, schedule)  # torchrelay
    losses.note(parameters=run.atomic(digest, model))  # torchrelay
    # Right after a collective, Gloo's thread may still want Python's lock to let go of a tensor, and the end of DDP's
    # group waits for that thread with the lock held. A barrier has no tensor, and lets the thread have the lock.
    run.atomic(dist.barrier)  # torchrelay
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
