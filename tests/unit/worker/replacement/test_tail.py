"""Between its last recorded call and the safepoint a replacement's script reads state that is there, or is refused."""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from torchrelay.errors import UndeclaredError
from torchrelay.worker.replacement.tail import Tail
from torchrelay.worker.state.state import State


class Script:
    """A model, its optimizer and an average; `state` has what they hold on a rank that trains."""

    def __init__(self, moved: tuple[str, ...] = ()) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.average = AveragedModel(self.model)
        self.kept = {"sums": [torch.zeros(2)]}
        self.brought = 0
        state = State(self.model, self.optimizer, {"average": self.average, "kept": self.kept})
        self.tail = Tail(state, self.bring, frozenset(moved))

    def bring(self) -> None:
        self.brought += 1
        with torch.no_grad():
            self.model.weight.fill_(7)
        for parameter in self.model.parameters():
            self.optimizer.state[parameter] = {"step": torch.tensor(3.0)}

    @contextmanager
    def between(self) -> Iterator[None]:
        self.tail.begin()
        try:
            yield
        finally:
            self.tail.end()


def in_a_thread(read: Callable[[], Any]) -> None:
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()


POOL = ThreadPoolExecutor(1)
POOL.submit(int).result()  # its thread is there
WORK: queue.Queue[Any] = queue.Queue()


READS: list[Callable[[Script], Any]] = [
    lambda script: torch.save(script.model.state_dict(), io.BytesIO()),
    lambda script: torch.save(script.model.weight, io.BytesIO()),
    lambda script: script.model(torch.ones(1, 2)),
    lambda script: script.model.weight.detach().numpy(),
    lambda script: script.model.weight.data,
    lambda script: script.model.weight.tolist(),
    lambda script: float(script.model.weight.detach()[0, 0]),
    lambda script: torch.stack([one.norm() for one in script.model.parameters()]),
    lambda script: torch._foreach_norm(list(script.model.parameters())),
    lambda script: np.asarray(script.model.weight.detach()),
    lambda script: script.average.update_parameters(script.model),
    lambda script: script.optimizer.state_dict(),
    lambda script: script.kept["sums"][0].sum(),
    lambda script: repr(script.model.weight),
    lambda script: in_a_thread(lambda: script.model.weight.sum()),
    lambda script: POOL.submit(lambda: script.model.weight.sum()).result(),
    lambda script: WORK.put(script.model),
]


@pytest.mark.parametrize("read", READS)
def test_the_state_is_brought_once_before_it_is_read(read: Callable[[Script], Any]) -> None:
    script = Script()
    with script.between():
        read(script)
        read(script)
    assert script.brought == 1
    read(script)
    assert script.brought == 1, "when it is over nothing is brought any more"


def test_what_is_read_is_what_was_brought() -> None:
    script = Script()
    file = io.BytesIO()
    with script.between():
        torch.save({"model": script.model.state_dict(), "optimizer": script.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert torch.equal(saved["model"]["weight"], torch.full((2, 2), 7.0))
    assert saved["optimizer"]["state"][0]["step"] == 3


def test_what_reads_nothing_of_it_brings_nothing() -> None:
    script = Script()
    with script.between():
        script.model.train()
        script.optimizer.zero_grad()
        assert script.model.weight.shape == (2, 2)
        assert sum(one.numel() for one in script.model.parameters()) == 6
        assert torch.ones(3).sum() == 3
        torch.save({"losses": torch.ones(3)}, io.BytesIO())
    assert script.brought == 0


def test_a_state_that_is_known_by_functions_alone_was_brought_before() -> None:
    brought: list[int] = []
    model = nn.Linear(2, 2)
    tail = Tail(State(save=model.state_dict, load=lambda told: model.load_state_dict(told)), lambda: brought.append(1))
    tail.begin()
    model.weight.sum()
    tail.end()
    assert brought == []


def test_what_no_rank_has_as_it_was_is_not_given_away_but_may_go_on() -> None:
    script = Script(moved=("state['average']",))
    with script.between():
        script.average.update_parameters(script.model)
        torch.save(script.model.state_dict(), io.BytesIO())
        with pytest.raises(UndeclaredError, match=r"state\['average'\] changes between two steps"):
            torch.save(script.average.state_dict(), io.BytesIO())
        with pytest.raises(UndeclaredError, match=r"state\['average'\]"):
            next(script.average.parameters()).detach().numpy()


def test_threads_of_loaders_and_those_that_other_threads_start_bring_nothing() -> None:
    script = Script()
    plain = threading.Thread.start
    with script.between():
        data = torch.utils.data.TensorDataset(torch.zeros(4))
        assert len(list(torch.utils.data.DataLoader(data, num_workers=1))) == 4
        assert script.brought == 0
    assert threading.Thread.start is plain
