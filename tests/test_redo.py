"""A call that was cut short and is run again ends in the bits of one that was not; or it is refused with the reason."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from torchrelay.errors import Refused
from torchrelay.worker import marks, memory, random_state, redo
from torchrelay.worker.probe import Probe
from torchrelay.worker.record import Learned
from torchrelay.worker.redo import Redo
from torchrelay.worker.state import State


class Cut(BaseException):
    """What unwinds a step at a fault."""


class Script:
    """A step with all that a forward and backward pass may change; each hook lets a test add to it."""

    def __init__(self, *, zero: str = "inside") -> None:
        torch.manual_seed(1)
        self.model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 4))
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.model.register_buffer("mask", torch.ones(4))
        everything = nn.ModuleList([self.model, self.unused, self.frozen])
        self.optimizer = torch.optim.AdamW(everything.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        self.schedule = lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.generator = torch.Generator().manual_seed(3)
        self.log: dict[str, Any] = {"calls": 0, "seen": []}
        self.zero = zero
        self.before_gate: Callable[[], None] = lambda: None
        self.steps = 0
        extra = {"scaler": self.scaler, "schedule": self.schedule, "generator": self.generator, "log": self.log}
        self.state = State(everything, self.optimizer, extra)
        self.redo = Redo(self.state, every=6)

    def forward_and_backward(self) -> None:
        if self.zero.startswith("inside"):
            self.optimizer.zero_grad(set_to_none=self.zero == "inside")
        noise = torch.randn(6, 4, generator=self.generator)
        for _ in range(2):  # micro-batches
            self.scaler.scale(self.model(torch.randn(6, 4) + noise).square().mean()).backward()
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * (self.steps + 1)
        self.before_gate()

    def call(self, *, cut: str = "") -> None:
        """One call, as a run makes it; `cut` in one place, and redone."""
        while True:
            self.redo.mark()
            self.redo.probe_entry()
            rng = random_state.capture()
            try:
                self._attempt(cut)
            except Cut:
                cut = ""
                self.redo.rewind()
                for _, parameter in self.state.parameters():  # what renewing DDP does
                    parameter.grad = None
                self.redo.rewind()
                random_state.restore(rng)
            else:
                break
        self.steps += 1
        if self.zero == "after":
            self.optimizer.zero_grad(set_to_none=False)

    def _attempt(self, cut: str) -> None:
        if cut == "entry":
            raise Cut
        if cut == "forward":
            self.model(torch.randn(6, 4))
            raise Cut
        self.forward_and_backward()
        if cut == "backward":
            raise Cut
        self.redo.probe_gate(self.optimizer)
        if cut == "gate":
            raise Cut
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.log["calls"] += 1


@pytest.fixture(autouse=True)
def left_as_found() -> Iterator[None]:
    before, threads = random_state.capture(), torch.get_num_threads()
    torch.set_num_threads(1)  # for tiny tensors more of them only wait for one another
    yield
    torch.set_num_threads(threads)
    random_state.restore(before)


def digests(script: Script, cuts: dict[int, str], calls: int = 8) -> list[str]:
    torch.manual_seed(9)
    found = []
    for number in range(calls):
        script.call(cut=cuts.get(number, ""))
        found.append(script.state.digest())
    return found


@functools.cache
def undisturbed(zero: str) -> list[str]:
    return digests(Script(zero=zero), {})


# ---------------------------------------------------------------- what is redone


@pytest.mark.parametrize("zero", ["inside", "inside, to zeros", "after"])
@pytest.mark.parametrize("place", ["entry", "forward", "backward", "gate"])
@pytest.mark.parametrize("number", [0, 1, 2, 4, 5])  # 4 is not looked at; 0, 1, 2 and 5 are
def test_a_call_that_is_redone_ends_in_the_same_bits(zero: str, place: str, number: int) -> None:
    assert digests(Script(zero=zero), {number: place}) == undisturbed(zero)


def test_a_call_may_be_redone_again_and_again() -> None:
    assert digests(Script(), dict.fromkeys(range(8), "backward")) == undisturbed("inside")


LEFT_OUT: dict[str, Callable[[Script], object]] = {
    "Tensors": lambda script: script.model[1].running_mean.add_(1),
    "Draws": lambda script: torch.rand(1, generator=script.generator),
    "Scale": lambda script: script.scaler.update(2.0),
    "HyperParameters": lambda script: script.optimizer.param_groups[0].update(lr=0.7),
    "Schedule": lambda script: setattr(script.schedule, "last_epoch", 99),
    "Modes": lambda script: script.model[2].eval(),
}


@pytest.mark.parametrize("kind", list(LEFT_OUT))
def test_each_kind_of_thing_is_put_back_by_what_is_made_for_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    digests(script, {}, 4)
    script.redo.mark()
    before = script.state.digest()
    LEFT_OUT[kind](script)
    script.redo.rewind()
    assert script.state.digest() == before
    monkeypatch.setattr(getattr(marks, kind), "rewind", lambda _: None)
    LEFT_OUT[kind](script)
    script.redo.rewind()
    assert script.state.digest() != before


def test_a_gradient_of_zeros_is_put_back_as_one_and_none_as_none() -> None:
    # An optimizer decays a parameter with a gradient of zeros and leaves one without alone.
    def started(script: Script) -> Script:
        script.unused.weight.grad = torch.zeros(2, 2)
        return script

    expected = digests(started(Script(zero="after")), {})
    assert digests(started(Script(zero="after")), {1: "backward", 4: "backward"}) == expected
    script = started(Script(zero="after"))
    digests(script, {1: "backward", 4: "backward"})
    assert script.unused.bias.grad is None
    assert script.unused.weight.grad is not None


def test_an_update_that_is_skipped_is_undone_with_what_it_moved() -> None:
    # The gate of such a call comes at its end: scale and schedule have moved before it.
    script = Script()
    digests(script, {}, 4)
    script.redo.mark()
    script.redo.probe_entry()
    before, rate = script.state.digest(), script.schedule.get_last_lr()
    script.optimizer.zero_grad()
    script.scaler.scale(script.model(torch.full((6, 4), torch.inf)).sum()).backward()
    script.scaler.step(script.optimizer)
    script.scaler.update()
    script.schedule.step()
    assert script.state.digest() != before
    script.redo.rewind()
    for parameter in script.model.parameters():
        assert parameter.grad is not None
    assert script.schedule.get_last_lr() == rate
    # BatchNorm has seen infinities; all is as before.
    assert script.state.digest() == before


def test_a_group_that_was_added_is_taken_away() -> None:
    script = Script()
    script.redo.mark()
    script.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    script.redo.rewind()
    assert len(script.optimizer.param_groups) == 1


# ---------------------------------------------------------------- what is found out


def test_a_small_extra_that_changes_before_the_gate_is_copied() -> None:
    def noted(script: Script) -> Script:
        script.before_gate = lambda: script.log["seen"].append(script.steps)
        return script

    expected = digests(noted(Script()), {})
    for number in (0, 2, 4, 5):
        assert digests(noted(Script()), {number: "gate"}) == expected


def test_a_small_extra_that_begins_to_change_late_is_found_by_a_later_look() -> None:
    script = Script()
    digests(script, {}, 4)
    script.before_gate = lambda: script.log["seen"].append(script.steps)
    digests(script, {}, 3)  # the sixth is looked at
    assert digests(script, {0: "gate"}, 1)
    assert script.log["seen"] == [4, 5, 6, 7]


def test_a_buffer_that_begins_to_move_late_is_found_by_a_later_look() -> None:
    script = Script()
    digests(script, {}, 4)
    script.before_gate = lambda: script.model.get_buffer("mask").add_(1)
    digests(script, {}, 3)
    assert script.model.get_buffer("mask").tolist() == [4.0] * 4
    digests(script, {0: "backward"}, 1)
    assert script.model.get_buffer("mask").tolist() == [5.0] * 4


def test_only_buffers_that_move_are_copied_and_kept_in_the_end() -> None:
    script = Script()
    assert b"mask" in script.state.private.record()
    digests(script, {}, 3)
    record = script.state.private.record()
    assert b"mask" not in record
    assert b"running_mean" in record


def test_parameters_that_change_before_the_gate_are_copied_if_small() -> None:
    def clamped(script: Script) -> Script:
        def clamp() -> None:
            with torch.no_grad():
                script.model[0].weight.mul_(0.9)

        script.before_gate = clamp
        return script

    expected = digests(clamped(Script()), {})
    for number in (0, 2, 4, 5):
        assert digests(clamped(Script()), {number: "gate"}) == expected


# ---------------------------------------------------------------- what is refused


def test_something_large_that_changes_before_the_gate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redo, "COPY_LIMIT", 10)
    script = Script()
    script.before_gate = lambda: script.log["seen"].extend(range(200))
    with pytest.raises(Refused, match=r"extra\['log'\] changes between the entry of a call and its gate.*0 MB"):
        script.call()


def test_optimizer_state_that_changes_before_the_gate_is_refused() -> None:
    script = Script()
    script.call()
    script.before_gate = lambda: script.optimizer.state[script.model[0].weight]["step"].add_(1)
    with pytest.raises(Refused, match="optimizer changes between the entry"):
        script.call()


def test_a_parameter_that_was_written_in_a_call_that_is_not_looked_at_is_refused_when_it_is_redone() -> None:
    script = Script()
    digests(script, {}, 4)

    def write() -> None:
        with torch.no_grad():
            script.unused.weight.add_(1)

    script.before_gate = write
    with pytest.raises(Refused, match=r"model\.1\.weight was changed before the gate"):
        script.call(cut="backward")


def test_what_cannot_be_copied_and_has_changed_is_refused_when_a_probed_call_is_redone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redo, "COPY_LIMIT", 10)
    script = Script()
    script.before_gate = lambda: script.log["seen"].extend(range(200))
    with pytest.raises(Refused, match=r"extra\['log'\] was changed before the gate"):
        script.call(cut="backward")


def carrying(script: Script, *, stale: bool) -> None:
    """Sums of gradients go from one call into the next."""
    script.zero = "never"
    if stale:
        script.unused.weight.grad = torch.ones(2, 2)


@pytest.mark.parametrize("stale", [False, True])
def test_gradients_that_are_carried_into_the_next_call_are_refused(stale: bool) -> None:
    script = Script()
    script.call()
    carrying(script, stale=stale)
    if stale:  # only a gradient that nobody adds to, but the update uses it again
        for parameter in script.model.parameters():
            parameter.grad = None
    with pytest.raises(Refused, match=r"carried from one call into the next.*micro_batches"):
        script.call()


def test_gradients_that_are_carried_are_found_later_too() -> None:
    script = Script()
    digests(script, {}, 4)
    carrying(script, stale=False)
    script.call()  # not looked at
    with pytest.raises(Refused, match="carried"):
        script.call()


def test_gradients_that_no_update_will_use_may_lie_there() -> None:
    # Of a discriminator, say, while the generator's optimizer steps.
    script = Script()
    other = torch.optim.SGD(script.frozen.parameters(), lr=0.1)
    script.unused.weight.grad = torch.ones(2, 2)
    script.redo.mark()
    script.redo.probe_entry()
    script.redo.probe_gate(other)


def test_gradients_of_zeros_may_lie_there() -> None:
    digests(Script(zero="after"), {})


# ---------------------------------------------------------------- who takes over a rank


def taken_over(script: Script, before_gate: Callable[[Script], Callable[[], None]] | None = None) -> Script:
    """The same script in another process, which has the state and what was learned, and has called nothing."""
    heir = Script(zero=script.zero)
    data, tensors = script.state.manifest()
    for live, values in zip(heir.state.receive(data), tensors, strict=True):
        live.detach().copy_(values)
    heir.state.commit_received()
    heir.state.private.load(script.state.private.record())
    heir.steps = script.steps
    heir.before_gate = before_gate(heir) if before_gate else heir.before_gate
    heir.redo.take_over(script.redo.learned)
    return heir


def counting(script: Script) -> Callable[[], None]:
    def count() -> None:
        script.log["seen"].append(script.steps)

    return count


@pytest.mark.parametrize("place", ["", "backward", "gate"])
@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_a_successor_redoes_calls_as_its_predecessor_would(calls: int, place: str) -> None:
    script, whole = Script(), Script()
    script.before_gate, whole.before_gate = counting(script), counting(whole)
    expected = digests(whole, {}, calls + 3)
    digests(script, {}, calls)
    rng = random_state.capture()
    heir = taken_over(script, counting)
    random_state.restore(rng)
    found = []
    for number in range(3):
        heir.call(cut=place if number == 0 else "")
        found.append(heir.state.digest())
    assert found == expected[calls:]
    assert heir.log["seen"] == list(range(calls + 3))


def test_a_successor_does_not_look_at_its_first_calls_again(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    digests(script, {}, 3)
    heir = taken_over(script)
    looks: list[int] = []
    look = Probe.look

    def counted(probe: Probe, names: Iterable[str]) -> dict[str, str]:
        looks.append(heir.steps)
        return look(probe, names)

    monkeypatch.setattr(Probe, "look", counted)
    for _ in range(4):
        heir.call()
    assert looks == [5, 5]  # the sixth call of the rank, as with its predecessor: at its entry and at its gate
    names = heir.state.private._names
    assert names == script.state.private._names
    assert names


def test_of_another_script_nothing_is_taken_over() -> None:
    heir = Script()
    heir.redo.take_over(Learned(100, 3, b"n" * 16, b"\1", b"\1"))
    assert heir.redo.learned.calls == 0


def test_with_save_and_load_a_successor_looks_itself() -> None:
    script, heir = SaverScript(), SaverScript()
    for _ in range(4):
        script.call()
    heir.redo.take_over(script.redo.learned)
    assert heir.redo.learned.calls == 0


def test_what_is_large_is_looked_at_the_more_rarely_the_more_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redo, "COPY_LIMIT", 100)
    monkeypatch.setattr(Probe, "size", lambda _: 5 << 29)
    script = Script()
    digests(script, {}, 3)
    looked: dict[str, list[int]] = {}
    for _ in range(40):
        script.call()
        for name in script.redo._before:
            looked.setdefault(name, []).append(script.redo._calls)
    assert looked["extra['log']"] == list(range(6, 43, 6))
    assert looked["model"] == looked["optimizer"] == [18, 36]  # two and a half GB: one of 3 * 6 calls


@pytest.mark.parametrize("cut", ["forward", "backward"])
def test_calls_that_were_cut_short_are_no_first_ones(cut: str) -> None:
    script = Script()
    for place in (cut, "", ""):
        script.call(cut=place)
        assert script.redo._before
    assert (script.redo.learned.calls, script.redo.learned.looks) == (4, 3)
    script.call()
    assert not script.redo._before
    whole, heirs = Script(), Script()
    digests(whole, {}, 2)
    heirs.redo.take_over(whole.redo.learned)
    assert heirs.redo.learned == whole.redo.learned
    heirs.call(cut=cut)
    assert heirs.redo.learned.looks == 3


def test_what_was_learned_goes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    script.before_gate = counting(script)
    digests(script, {}, 3)
    heir = Script()
    turned = dict(reversed(heir.redo._probe.parts.items()))
    monkeypatch.setattr(heir.redo._probe, "parts", turned)
    heir.redo.take_over(script.redo.learned)
    assert list(heir.redo._copied) == list(script.redo._copied) == ["extra['log']"]
    other = Script()
    other.redo._probe.parts["extra['other']"] = other.redo._probe.parts.pop("extra['log']")
    other.redo.take_over(script.redo.learned)
    assert not other.redo._copied


def test_what_is_looked_at_is_the_state_without_what_is_put_back_anyway() -> None:
    script = Script()
    digests(script, {}, 2)
    everything = sum(map(memory.size, script.state.manifest()[1]))
    assert Probe(script.state).size() == everything - script.generator.get_state().numel()


# ---------------------------------------------------------------- save and load


class SaverScript:
    """A script that gave save and load, and whose optimizer is known by its step only."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.count = 0
        self.state = State(save=self.save, load=self.load)
        self.redo = Redo(self.state)

    def save(self) -> dict[str, Any]:
        return {"m": self.model.state_dict(), "o": self.optimizer.state_dict(), "count": self.count}

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["m"])
        self.optimizer.load_state_dict(saved["o"])

    def call(self, *, cut: bool = False, count: bool = False) -> None:
        self.redo.mark()
        self.redo.probe_entry()
        rng = random_state.capture()
        self.optimizer.zero_grad()
        self.optimizer.param_groups[0]["lr"] *= 0.9
        self.count += count
        self.model(torch.randn(3, 4)).square().sum().backward()
        if cut:
            self.redo.rewind()
            random_state.restore(rng)
            self.call()
            return
        self.state.watch(self.optimizer)  # from the hook of its step
        self.redo.probe_gate(self.optimizer)
        self.optimizer.step()


def test_with_save_and_load_a_call_is_redone_too() -> None:
    def weights(cuts: set[int]) -> list[float]:
        script = SaverScript()
        for number in range(6):
            script.call(cut=number in cuts)
        return [*script.model.weight.detach().flatten().tolist(), script.optimizer.param_groups[0]["lr"]]

    assert weights({1, 2, 4}) == weights(set())


def test_with_save_and_load_what_changes_before_the_gate_is_refused() -> None:
    script = SaverScript()
    script.call()
    with pytest.raises(Refused, match=r"what save\(\) returns changes .* pass model= and optimizer="):
        script.call(count=True)


# ---------------------------------------------------------------- cost


def test_a_mark_of_a_tiny_model_costs_microseconds() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    way_back = Redo(State(model, torch.optim.AdamW(model.parameters())))
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        for _ in range(10):
            way_back.mark()
        best = min(best, (time.perf_counter() - start) / 10)
    assert best < 30e-6  # 3 us on an idle core; the best of many, as the machine may be busy
