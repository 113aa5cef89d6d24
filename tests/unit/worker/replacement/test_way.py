"""Before its last recorded call a replacement's script reads state that is right for its place, or is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.optim.swa_utils import AveragedModel

from torchrelay.errors import UndeclaredError
from torchrelay.worker.replacement.changes import SWAPPED
from torchrelay.worker.replacement.tail import TailReplay
from torchrelay.worker.state.state import State


class Ahead:
    """Stands for the cursor."""

    point = 7

    def __init__(self, still: bool) -> None:
        self.still = still

    def still_ahead(self) -> bool:
        return self.still


class Script:
    """A model, its optimizer and an average."""

    def __init__(self, *, still: bool = True, known: bool = True) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.average = AveragedModel(self.model)
        self.brought = 0
        state = State(self.model, self.optimizer, {"average": self.average})
        cursor: Any = Ahead(still)
        self.way = TailReplay(state, cursor, self.bring)
        self.way.stands(values_known=known)

    def bring(self) -> None:
        self.brought += 1
        with torch.no_grad():
            self.model.weight.fill_(7)
        for parameter in self.model.parameters():
            self.optimizer.state[parameter] = {"step": torch.tensor(3.0)}

    @contextmanager
    def between(self) -> Iterator[None]:
        self.way.begin()
        try:
            yield
        finally:
            self.way.end()

    def clip(self) -> None:
        for parameter in self.model.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    def save(self) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        file.seek(0)
        saved: dict[str, Any] = torch.load(file, weights_only=True)
        return saved


READS: list[Callable[[Script], Any]] = [
    lambda script: script.save(),
    lambda script: copy.deepcopy(script.model),
    lambda script: script.model(torch.ones(1, 2)),
    lambda script: script.model.weight.detach().numpy(),
    lambda script: script.model.weight.data.tolist(),
    lambda script: torch._foreach_norm(list(script.model.parameters())),
    lambda script: script.optimizer.state_dict(),
    lambda script: script.optimizer.state[script.model.weight]["step"],
    lambda script: torch.zeros(2, 2).add_(script.model.weight.detach()),
]
NO_READS: list[Callable[[Script], Any]] = [
    lambda script: script.model.train(),
    lambda script: script.optimizer.zero_grad(),
    lambda script: script.model.weight.shape,
    lambda script: script.model.state_dict(),  # who looks into it is seen
    lambda script: script.clip(),
    lambda script: script.model.weight.data.mul_(2),
    lambda script: script.model.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)}),
]


@pytest.mark.parametrize("read", READS)
def test_if_nothing_ahead_changes_the_state_it_is_brought_once(read: Callable[[Script], Any]) -> None:
    script = Script()
    with script.between():
        read(script)
        read(script)
    assert script.brought == 1


def test_what_is_saved_is_what_was_brought() -> None:
    script = Script()
    with script.between():
        saved = script.save()
    assert torch.equal(saved["model"]["weight"], torch.full((2, 2), 7.0))
    assert saved["optimizer"]["state"][0]["step"] == 3


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(("still", "known"), [(False, True), (True, False)])
def test_what_nobody_has_is_refused(read: Callable[[Script], Any], still: bool, known: bool) -> None:
    script = Script(still=still, known=known)
    with script.between(), pytest.raises(UndeclaredError, match="between two calls, after 7"):
        read(script)
    assert script.brought == 0


@pytest.mark.parametrize("other", NO_READS)
@pytest.mark.parametrize("still", [False, True])
def test_what_reads_no_value_may_be_done_anywhere(other: Callable[[Script], Any], still: bool) -> None:
    script = Script(still=still)
    with script.between():
        other(script)
    assert script.brought == 0


def test_an_average_may_be_updated_where_the_state_is_brought() -> None:
    script = Script()
    with script.between():
        script.average.update_parameters(script.model)
        script.average.update_parameters(script.model)
    assert script.brought == 1


@pytest.mark.parametrize("first", ["reads", "writes"])
def test_who_changes_parameters_and_reads_them_would_get_others(first: str) -> None:
    script = Script()
    acts = [lambda: script.model.weight.sum(), script.clip]
    with script.between():
        (acts[0] if first == "reads" else acts[1])()
        with pytest.raises(UndeclaredError, match=SWAPPED[:40]):
            (acts[1] if first == "reads" else acts[0])()


def test_collectives_are_refused() -> None:
    script = Script()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with script.between(), pytest.raises(UndeclaredError, match=r"run\.atomic"):
            dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()
