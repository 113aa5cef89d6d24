"""A small GPT trained with DDP by puppets, with a fault where the test wants one.

The step is what torchrelay makes of a script's step: `mark` at its entry, `settle` and the gate before the update.
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.scripts.groups_actions import world
from tests.scripts.groups_ranks import Actions
from torchrelay.worker.parallel import ddp as ddps

WORDS, WIDTH, LENGTH, BATCH = 61, 32, 12, 3


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
        self.between = torch.nn.LayerNorm(WIDTH)
        self.widen = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.narrow = torch.nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.narrow(functional.gelu(self.widen(self.between(x))))
        return x


class Gpt(torch.nn.Module):
    """Tied embeddings; with `buffers` a BatchNorm, with `unused` a branch that every third step leaves out."""

    def __init__(self, buffers: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.places = torch.nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(LENGTH) if buffers else torch.nn.LayerNorm(WIDTH)
        self.sometimes = torch.nn.Linear(WIDTH, WIDTH) if unused else None

    def forward(self, tokens: torch.Tensor, step: int) -> torch.Tensor:
        x = self.words(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        if self.sometimes is not None and step % 3:
            x = x + self.sometimes(x)
        return functional.linear(self.norm(x), self.words.weight)


class Interrupted(BaseException):
    """What unwinds an interrupted step, as torchrelay's own does."""


class Training:
    def __init__(
        self,
        rank: int,
        seed: int = 0,
        buffers: bool = False,
        unused: bool = False,
        hook: str | None = None,
        micro_batches: int = 1,
        **options: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.rank, self.micro_batches = rank, micro_batches
        model = Gpt(buffers=buffers, unused=unused)
        self.ddp: Any = DistributedDataParallel(model, bucket_cap_mb=0.02, find_unused_parameters=unused, **options)
        if hook == "fp16":
            self.ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if hook == "builtin":
            hooked: Any = self.ddp
            hooked._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-2)
        self.gate = torch.zeros(1, dtype=torch.int32)
        self.committed = 0
        assert ddps.find(self.ddp) == [self.ddp]
        assert ddps.refusal(self.ddp) is None, ddps.refusal(self.ddp)

    def step(self, at_gradient: int | None = None, fault: Callable[[], None] | None = None) -> float:
        """One step; `fault` is called when the `at_gradient`-th gradient of its last backward pass arrives."""
        step = self.committed
        ddps.mark(self.ddp)
        self.buffers = [buffer.clone() for buffer in self.ddp.buffers()]
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        torch.manual_seed(77 * step + self.rank)
        self.optimizer.zero_grad()
        for micro in range(self.micro_batches):
            tokens = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
            last = micro == self.micro_batches - 1
            with nullcontext() if last else self.ddp.no_sync():
                logits = self.ddp(tokens, step)
                loss: Any = functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
            with Arrivals(self.ddp, at_gradient, fault) if last else nullcontext():
                loss.backward()
        ddps.settle(self.ddp)
        world().allreduce([self.gate]).wait()
        self.optimizer.step()
        self.committed += 1
        if step % 2:
            self.evaluate()
        return float(loss.item())

    def evaluate(self) -> None:
        """As scripts do between steps: it leaves DDP with another idea of whether to broadcast buffers."""
        self.ddp.eval()
        with torch.no_grad():
            self.ddp(torch.zeros(1, LENGTH, dtype=torch.long), 1)
        self.ddp.train()

    def rewind(self) -> None:
        """Undo what an interrupted step has done to the buffers."""
        for buffer, before in zip(self.ddp.buffers(), self.buffers, strict=True):
            buffer.copy_(before)

    def digest(self) -> str:
        state = [*self.ddp.module.state_dict().values()]
        for values in self.optimizer.state.values():
            state += [value for value in values.values() if isinstance(value, torch.Tensor)]
        digest = hashlib.sha256()
        for tensor in state:
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class Arrivals:
    """While inside, call `fault` at the n-th gradient that arrives."""

    def __init__(self, ddp: torch.nn.Module, at_gradient: int | None, fault: Callable[[], None] | None) -> None:
        self.ddp, self.at_gradient, self.fault, self.seen = ddp, at_gradient, fault, 0
        self.hooks: list[Any] = []

    def arrived(self, _gradient: torch.Tensor) -> None:
        self.seen += 1
        if self.seen == self.at_gradient:
            assert self.fault is not None
            self.fault()

    def __enter__(self) -> None:
        if self.at_gradient is not None:
            parameters: list[Any] = [p for p in self.ddp.parameters() if p.requires_grad]
            self.hooks = [parameter.register_hook(self.arrived) for parameter in parameters]

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()


# -------------------------------------------------------- what puppets do (first argument: the puppet's `Actions`)


def build(actions: Actions, **options: Any) -> None:
    actions.kept["training"] = Training(actions.rank, **options)


def train(actions: Actions, steps: int) -> list[str]:
    """Train until `steps` are committed; returns the losses, as exact text."""
    training: Training = actions.kept["training"]
    return [training.step().hex() for _ in range(steps - training.committed)]


def step_and_raise(actions: Actions, at_gradient: int) -> str:
    """A step in whose backward pass the script, or we, raise."""

    def fault() -> None:
        raise Interrupted

    try:
        actions.kept["training"].step(at_gradient, fault)
    except Interrupted:
        return "interrupted"
    return "not interrupted"


def step_and_die(actions: Actions, at_gradient: int) -> None:
    actions.kept["training"].step(at_gradient, lambda: os.kill(os.getpid(), signal.SIGKILL))


def backward_only(actions: Actions) -> None:
    """A step up to, and without, its gate."""
    training: Training = actions.kept["training"]
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    training.ddp(tokens, 1).sum().backward()


def settle(actions: Actions) -> bool:
    return ddps.settle(actions.kept["training"].ddp)


def forward_only(actions: Actions) -> None:
    actions.kept["training"].ddp(torch.zeros(BATCH, LENGTH, dtype=torch.long), 1)


def layout(actions: Actions) -> ddps.Layout:
    return ddps.layout(actions.kept["training"].ddp)


def renew(actions: Actions, layout: ddps.Layout) -> None:
    ddps.renew(actions.kept["training"].ddp, layout)


def digest(actions: Actions) -> str:
    training: Training = actions.kept["training"]
    return training.digest()


def rewind(actions: Actions) -> None:
    actions.kept["training"].rewind()


def save(actions: Actions, path: str) -> None:
    training = actions.kept["training"]
    torch.save(
        {
            "model": training.ddp.module.state_dict(),
            "optimizer": training.optimizer.state_dict(),
            "committed": training.committed,
        },
        path,
    )


def load(actions: Actions, path: str) -> None:
    training = actions.kept["training"]
    state = torch.load(path, weights_only=True)
    training.ddp.module.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.committed = state["committed"]
