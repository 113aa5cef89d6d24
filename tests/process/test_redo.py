"""A call that was cut short and is run again ends in the bits of one that was not; or it is refused with the reason."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support.redone import SaverScript, Script, digests
from torchrelay.errors import RefusedError
from torchrelay.worker.retry import marks, redo
from torchrelay.worker.retry.redo import Redo
from torchrelay.worker.state.state import State

pytestmark = pytest.mark.usefixtures("left_as_found")


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


def test_looks_become_rarer() -> None:
    script = Script()
    looked = []
    script.before_gate = lambda: looked.append(script.redo.probing)
    digests(script, {}, 80)
    assert [call for call, looks in enumerate(looked, 1) if looks] == [1, 2, 3, 6, 12, 24, 48, 72]


def test_a_buffer_that_begins_to_move_late_is_found_by_a_later_look() -> None:
    script = Script()
    digests(script, {}, 4)
    script.before_gate = lambda: script.model.get_buffer("mask").add_(1)
    digests(script, {}, 3)
    assert script.model.get_buffer("mask").tolist() == [4.0] * 4
    digests(script, {0: "backward"}, 1)
    assert script.model.get_buffer("mask").tolist() == [5.0] * 4


def trained_late(cuts: dict[int, str]) -> list[str]:
    """BatchNorm only evaluates until all first looks are over, and there are no others."""
    script = Script()
    script.redo = Redo(script.state, every=1000)
    script.model[1].eval()
    digests(script, {}, 4)
    script.model[1].train()
    return digests(script, cuts, 3)


@pytest.mark.parametrize("place", ["forward", "backward", "gate"])
def test_buffers_that_begin_to_move_in_a_call_that_nobody_looks_at_are_put_back_from_then_on(place: str) -> None:
    assert trained_late({1: place, 2: place}) == trained_late({})


def test_a_fault_in_the_very_call_in_which_buffers_begin_to_move_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"model\.0\.1\.num_batches_tracked was changed before the gate"):
        trained_late({0: "backward"})


def test_a_buffer_that_is_written_to_and_stays_what_it_is_is_neither_kept_nor_refused() -> None:
    script = Script()
    script.before_gate = lambda: script.model.get_buffer("mask").mul_(1)
    digests(script, {4: "backward"}, 6)
    assert b"mask" not in script.state.private.record()
    incoming_for = Script()
    incoming_for.redo.take_over(script.redo.learned)
    incoming_for.before_gate = lambda: incoming_for.model.get_buffer("mask").mul_(1)
    digests(incoming_for, {0: "backward"}, 1)


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


def test_parameters_that_are_put_back_before_the_gate_are_copied_too() -> None:
    def climbing(script: Script) -> Script:
        def climb() -> None:
            with torch.no_grad():
                weight = script.model[0].weight
                kept = weight.clone()
                weight.mul_(1.1)
                weight.copy_(kept)

        script.before_gate = climb
        return script

    expected = digests(climbing(Script()), {})
    for number in (0, 2, 4, 5):
        assert digests(climbing(Script()), {number: "gate"}) == expected


# ---------------------------------------------------------------- what is refused


def test_something_large_that_changes_before_the_gate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redo, "COPY_LIMIT", 10)
    script = Script()
    script.before_gate = lambda: script.log["seen"].extend(range(200))
    with pytest.raises(RefusedError, match=r"state\['log'\] changes between the entry of a call and its gate.*0 MB"):
        script.call()


def test_optimizer_state_that_changes_before_the_gate_is_refused() -> None:
    script = Script()
    script.call()
    script.before_gate = lambda: script.optimizer.state[script.model[0].weight]["step"].add_(1)
    with pytest.raises(RefusedError, match="optimizer changes between the entry"):
        script.call()


def test_a_parameter_that_was_written_in_a_call_that_is_not_looked_at_is_refused_when_it_is_redone() -> None:
    script = Script()
    digests(script, {}, 4)

    def write() -> None:
        with torch.no_grad():
            script.unused.weight.add_(1)

    script.before_gate = write
    with pytest.raises(RefusedError, match=r"model\.1\.weight was changed before the gate"):
        script.call(cut="backward")


def test_what_cannot_be_copied_and_has_changed_is_refused_when_a_probed_call_is_redone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redo, "COPY_LIMIT", 10)
    script = Script()
    script.before_gate = lambda: script.log["seen"].extend(range(200))
    with pytest.raises(RefusedError, match=r"state\['log'\] was changed before the gate"):
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
    with pytest.raises(RefusedError, match=r"carried from one call into the next.*micro_batches"):
        script.call()


def test_gradients_that_are_carried_are_found_later_too() -> None:
    script = Script()
    digests(script, {}, 6)
    carrying(script, stale=False)
    for _ in range(5):
        script.call()  # not looked at
    with pytest.raises(RefusedError, match="carried"):
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


# ---------------------------------------------------------------- save and load


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
    with pytest.raises(RefusedError, match=r"what save\(\) returns changes .* pass model= and optimizer="):
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
    assert best < 150e-6  # 13 us on an idle core; the best of many, as the machine may be busy


# ---------------------------------------------------------------- layers that are frozen, and groups that are added


def test_what_a_call_has_frozen_is_trained_again_when_it_is_redone() -> None:
    model = nn.Linear(2, 2)
    redo_ = Redo(State(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    redo_.mark()
    model.requires_grad_(False)
    redo_.rewind()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_group_of_what_join_was_not_given_is_refused_at_the_next_entry() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    redo_ = Redo(State(model, optimizer))
    redo_.mark()
    optimizer.add_param_group({"params": list(other.parameters())})
    with pytest.raises(RefusedError, match=r"group 1 of an SGD was added after protect\(\)"):
        redo_.mark()
