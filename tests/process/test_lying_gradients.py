"""Gradients of one network lie there while another is trained: a call that is made again finds them as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchrelay.errors import RefusedError
from torchrelay.worker.retry.redo import Redo
from torchrelay.worker.state.state import State


class Cut(BaseException):
    """What unwinds a step at a fault."""


class Script:
    """Two networks, an optimizer and a step function for each, that take turns."""

    def __init__(self, *, adds: bool = False, clips: bool = False, zeroes: bool = True) -> None:
        """`adds`: backward of the second goes through the first. `zeroes`: each step clears its own gradients."""
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.optimizers = [torch.optim.Adam(each.parameters(), lr=0.05) for each in (self.first, self.second)]
        self.state = State([self.first, self.second], self.optimizers)
        self.redo = Redo(self.state)
        self.adds, self.clips, self.zeroes = adds, clips, zeroes
        self.norms: list[float] = []
        self.calls = 0

    def backward(self, at: int, inputs: torch.Tensor) -> None:
        if self.zeroes:
            self.optimizers[at].zero_grad()
        made = self.second(inputs) if at else self.first(inputs)
        (self.first(made) if at and self.adds else made).square().mean().backward()
        if self.clips:
            torch.nn.utils.clip_grad_norm_([*self.first.parameters(), *self.second.parameters()], 0.1)
        self.norms.append(sum(float(each.grad.sum()) for each in self.first.parameters() if each.grad is not None))

    def call(self, cut: str = "") -> None:
        at, inputs = self.calls % 2, torch.full((3, 4), 0.5 + self.calls)
        while True:
            self.redo.mark()
            self.redo.probe_entry(at)
            try:
                self._attempt(at, inputs, cut)
            except Cut:
                if cut in ("backward", "gate"):
                    self.norms.pop()
                cut = ""
                self.redo.rewind()
                told = self.state.gradients()
                for _, parameter in self.state.parameters():  # what renewing DDP does
                    parameter.grad = None
                self.state.put_gradients(told)
            else:
                break
        self.calls += 1

    def _attempt(self, at: int, inputs: torch.Tensor, cut: str) -> None:
        if cut == "entry":
            raise Cut
        self.backward(at, inputs)
        if cut == "backward":
            raise Cut
        self.redo.probe_gate(self.optimizers[at])
        if cut == "gate":
            raise Cut
        self.optimizers[at].step()

    def told(self) -> list[str]:
        return [self.state.digest(), *map(float.hex, self.norms)]


def run(script: Script, cuts: dict[int, str], calls: int = 12) -> list[str]:
    for number in range(calls):
        script.call(cuts.get(number, ""))
    return script.told()


KINDS: dict[str, Callable[[], Script]] = {
    "untouched": Script,
    "added to": lambda: Script(adds=True),
    "clipped": lambda: Script(clips=True),
    "added to and clipped": lambda: Script(adds=True, clips=True),
}


@pytest.mark.parametrize("place", ["entry", "backward", "gate"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_is_made_again_reads_what_it_read(kind: str, place: str) -> None:
    expected = run(KINDS[kind](), {})
    for number in (1, 2, 3, 8):
        assert run(KINDS[kind](), {number: place}) == expected, f"cut in call {number}"


def test_they_go_to_a_replacement_with_the_state() -> None:
    expected = run(Script(clips=True), {}, 10)
    source, target = Script(clips=True), Script(clips=True)
    run(source, {}, 5)
    data, tensors = source.state.manifest()
    for place, tensor in zip(target.state.receive(data), tensors, strict=True):
        place.copy_(tensor)
    target.state.commit_received()
    target.calls, target.norms = source.calls, source.norms
    del source, tensors
    assert run(target, {}, 5) == expected


def test_what_an_update_takes_must_not_lie_there() -> None:
    script = Script(adds=True, zeroes=False)
    with pytest.raises(RefusedError, match="not zeroed before this call added to it"):
        run(script, {})


def test_nor_what_a_second_optimizer_takes_behind_the_gate() -> None:
    script = Script()
    both = nn.Sequential(script.first, script.second)
    both(torch.ones(3, 4)).sum().backward()
    script.redo.mark()
    script.redo.probe_entry(0)
    script.optimizers[0].zero_grad()
    both(torch.ones(3, 4)).sum().backward()
    script.redo.probe_gate(script.optimizers[0])
    with pytest.raises(RefusedError, match="not zeroed before this call added to it"):
        script.redo.also_steps(script.optimizers[1])


def test_values_are_told_of_no_gradient_where_all_optimizers_step_together() -> None:
    script = Script()
    for _ in range(2):
        script.redo.mark()
        script.redo.probe_entry(0)
        nn.Sequential(script.first, script.second)(torch.ones(3, 4)).sum().backward()
        script.redo.probe_gate(script.optimizers[0])
        script.redo.also_steps(script.optimizers[1])
        for each in script.optimizers:
            each.step()
            each.zero_grad()
    nn.Sequential(script.first, script.second)(torch.ones(3, 4)).sum().backward()
    assert script.state.gradients().lying == {}


def test_until_it_is_known_whether_they_do_all_count() -> None:
    script = Script()
    script.call()
    assert sorted(script.state.gradients().lying) == ["model[0].bias", "model[0].weight"]


def test_one_that_is_too_large_to_be_copied_in_a_first_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrelay.worker.retry.redo.COPY_LIMIT", 0)
    script = Script(clips=True)
    script.call()
    with pytest.raises(RefusedError, match="was changed in a call that a fault has cut short"):
        script.call("backward")
