"""Who takes over a rank knows what its calls change, and redoes them to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.support.redone import SaverScript, Script, digests
from torchrelay.worker.retry import redo
from torchrelay.worker.retry.marks import Probe
from torchrelay.worker.state import random_state
from torchrelay.worker.state.record import Learned
from torchrelay.worker.tensors import memory

pytestmark = pytest.mark.usefixtures("left_as_found")


def taken_over(script: Script, before_gate: Callable[[Script], Callable[[], None]] | None = None) -> Script:
    """The same script in another process, which has the state and what was learned, and has called nothing."""
    incoming_for = Script(zero=script.zero)
    data, tensors = script.state.manifest()
    for live, values in zip(incoming_for.state.receive(data), tensors, strict=True):
        live.detach().copy_(values)
    incoming_for.state.commit_received()
    incoming_for.state.private.load(script.state.private.record())
    incoming_for.steps = script.steps
    incoming_for.before_gate = before_gate(incoming_for) if before_gate else incoming_for.before_gate
    incoming_for.redo.take_over(script.redo.learned)
    return incoming_for


def counting(script: Script) -> Callable[[], None]:
    def count() -> None:
        script.log["seen"].append(script.steps)

    return count


@pytest.mark.parametrize("place", ["", "backward", "gate"])
@pytest.mark.parametrize("calls", [1, 2, 3, 4])
def test_a_replacement_redoes_calls_as_its_predecessor_would(calls: int, place: str) -> None:
    script, whole = Script(), Script()
    script.before_gate, whole.before_gate = counting(script), counting(whole)
    expected = digests(whole, {}, calls + 3)
    digests(script, {}, calls)
    rng = random_state.capture()
    incoming_for = taken_over(script, counting)
    random_state.restore(rng)
    found = []
    for number in range(3):
        incoming_for.call(cut=place if number == 0 else "")
        found.append(incoming_for.state.digest())
    assert found == expected[calls:]
    assert incoming_for.log["seen"] == list(range(calls + 3))


def test_a_replacement_does_not_look_at_its_first_calls_again(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    digests(script, {}, 3)
    incoming_for = taken_over(script)
    looks: list[int] = []
    look = Probe.look

    def counted(probe: Probe, names: Iterable[str]) -> dict[str, str]:
        looks.append(incoming_for.steps)
        return look(probe, names)

    monkeypatch.setattr(Probe, "look", counted)
    for _ in range(4):
        incoming_for.call()
    assert looks == [5, 5]  # the sixth call of the rank, as with its predecessor: at its entry and at its gate
    names = incoming_for.state.private._names
    assert names == script.state.private._names
    assert names


def test_of_another_script_nothing_is_taken_over() -> None:
    incoming_for = Script()
    incoming_for.redo.take_over(Learned(100, 3, b"n" * 16, b"\1", b"\1"))
    assert incoming_for.redo.learned.calls == 0


def test_with_save_and_load_a_replacement_looks_itself() -> None:
    script, incoming_for = SaverScript(), SaverScript()
    for _ in range(4):
        script.call()
    incoming_for.redo.take_over(script.redo.learned)
    assert incoming_for.redo.learned.calls == 0


@pytest.mark.parametrize(
    ("size", "calls"),
    [(1 << 29, [6, 12, 24, 48, 72, 96]), (5 << 29, [24, 48, 72, 96]), (9 << 29, [48, 96]), (17 << 29, [72])],
)
def test_what_is_large_is_looked_at_the_more_rarely_the_more_there_is(
    monkeypatch: pytest.MonkeyPatch, size: int, calls: list[int]
) -> None:
    monkeypatch.setattr(redo, "COPY_LIMIT", 100)
    monkeypatch.setattr(Probe, "size", lambda _: size)
    script = Script()
    digests(script, {}, 3)
    looked: dict[str, list[int]] = {}
    for _ in range(95):
        script.call()
        for name in script.redo._before:
            looked.setdefault(name, []).append(script.redo._calls)
    assert looked["state['log']"] == [6, 12, 24, 48, 72, 96]
    assert looked["model"] == looked["optimizer"] == calls


@pytest.mark.parametrize("cut", ["forward", "backward"])
def test_calls_that_were_cut_short_are_no_first_ones(cut: str) -> None:
    script = Script()
    for place in (cut, "", ""):
        script.call(cut=place)
        assert script.redo._before
    assert (script.redo.learned.calls, script.redo.learned.looks) == (4, 3)
    script.call()
    assert not script.redo._before
    whole, incoming_ranks = Script(), Script()
    digests(whole, {}, 2)
    incoming_ranks.redo.take_over(whole.redo.learned)
    assert incoming_ranks.redo.learned == whole.redo.learned
    incoming_ranks.call(cut=cut)
    assert incoming_ranks.redo.learned.looks == 3


def test_what_was_learned_goes_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    script.before_gate = counting(script)
    digests(script, {}, 3)
    incoming_for = Script()
    turned = dict(reversed(incoming_for.redo._probe.parts.items()))
    monkeypatch.setattr(incoming_for.redo._probe, "parts", turned)
    incoming_for.redo.take_over(script.redo.learned)
    assert list(incoming_for.redo._copied) == list(script.redo._copied) == ["state['log']"]
    other = Script()
    other.redo._probe.parts["state['other']"] = other.redo._probe.parts.pop("state['log']")
    other.redo.take_over(script.redo.learned)
    assert not other.redo._copied


def test_what_is_looked_at_is_the_state_without_what_is_put_back_anyway() -> None:
    script = Script()
    digests(script, {}, 2)
    everything = sum(map(memory.size, script.state.manifest()[1]))
    assert Probe(script.state).size() == everything - script.generator.get_state().numel()
