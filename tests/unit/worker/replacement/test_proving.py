"""Whose numbers are shown to be right, after ranks have changed hands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from torchrelay.errors import UnprovedError
from torchrelay.protocol.messages.ids import Rank
from torchrelay.worker.agreement import agreement
from torchrelay.worker.replacement.given import MOST, Doubt, Proving, Told, is_open, unproved
from torchrelay.worker.tensors.arguments import digest


def told(text: str) -> Told:
    """`f 0 3, h 1 / f 0 4`: functions and their numbers before the fault, and now; `f 0 ?3`: that one is in doubt."""
    before, now = text.split("/")
    calls = [call.split() for call in before.split(",")]
    doubts = {digest(call[0]): [at for at, word in enumerate(call) if word.startswith("?")] for call in calls}
    known = {digest(call[0]): made(call) for call in calls}
    return Told({name: entries for name, entries in doubts.items() if entries}, known, made(now.split()))


def made(words: Sequence[str]) -> bytes:
    return b"".join(digest(word.lstrip("?")) for word in words)


@pytest.mark.parametrize(
    ("ranks", "wrong"),
    [
        ("f 3 / f 4 | f 3 / f 4", []),
        ("f 3 / f 4 | f 7 / f 9", []),  # nobody is in doubt: numbers may be a rank's own
        ("f 3 / f 4 | f ?3 / f 4", []),
        ("f 3 / f 4 | f ?3 / f 2", [1]),  # a counter that began anew
        ("f 3 / f 4 | f ?5 / f 4", [1]),  # no rank had its number, so none can tell
        ("f ?3 / f 4 | f ?3 / f 4", [0, 1]),  # two that are in doubt are no proof for one another
        ("f 3 / f 4 | f 3 / f 5 | f ?3 / f 5", []),  # one that had the same has the same
        ("f 0 3 / f 0 4 | f 1 ?3 / f 1 4", []),  # what is a rank's own, and not in doubt, is none of it
        ("f 0 3 / f 0 4 | f 1 ?3 / f 1 2", [1]),
        ("f 3 8 / f 4 8 | f ?3 ?8 / f 4 9", [1]),  # each number in doubt is to be shown
        ("f 3 / g 4 | f ?3 / g 4", []),
        ("f 3 / g 4 | f ?3 / g 5", [1]),
        ("f ?3 / f 4", [0]),
        ("f 3, h / h | f ?3, h / h", []),  # it is not called now, and what is has no numbers: see below
        ("f 3, h 1 / f 4 | f ?3, h 1 / f 2", [1]),  # the call before the fault was another one
        ("f 3, h 1 / f 4 | f ?3, h 1 / f 4", []),
        ("h 1 / f 4 | f ?3, h 1 / f 4", [1]),  # nobody else has ever called it
    ],
)
def test_numbers_are_right_if_one_that_had_the_same_has_them_too(ranks: str, wrong: list[int]) -> None:
    assert unproved([told(rank) for rank in ranks.split("|")]) == wrong


def test_a_function_in_doubt_is_waited_for_until_it_is_called() -> None:
    assert is_open([told("f 3, h / h"), told("f ?3, h / h")])
    assert not is_open([told("f 3, h / f 4"), told("f ?3, h / f 4")])
    assert not is_open([told("f 3 / h"), told("f 3 / h")])


class Ranks:
    """Rank 0 was there before, rank 1 was taken over; both are after `f 3` and `h`, and nobody can tell of that 3."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.both = [Proving(lambda: Rank(0)), Proving(lambda: Rank(1))]
        for one in self.both:
            one.note(made(["f", "3"]))
            one.note(made(["h"]))
        self.both[1].take_over({digest("f"): Doubt((1,), "its number")})

    def step(self, *calls: str, steps: int = 1) -> None:
        """The next step's gate, of both."""
        nows = [made(call.split()) for call in calls]
        looks: list[Any] = [one.look(now, steps) for one, now in zip(self.both, nows, strict=True)]
        told = [msgspec.msgpack.encode(look.args[0]) for look in looks]
        self._patch.setattr(agreement, "gather", lambda _: told)
        try:
            for look in reversed(looks):
                look()
        finally:
            for one, now in zip(self.both, nows, strict=True):
                one.note(now)

    @property
    def settled(self) -> list[bool]:
        return [one.settled for one in self.both]


def test_the_number_is_looked_at_when_its_function_is_called_next(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    ranks.step("h", "h", steps=1)
    assert ranks.settled == [False, False], "both go on with it, or one would wait for the other"
    with pytest.raises(UnprovedError, match="its number"):
        ranks.step("f 4", "f 1", steps=2)


def test_that_is_over_when_it_has_been_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    ranks.step("h", "h", steps=1)
    ranks.step("f 4", "f 4", steps=2)
    assert ranks.settled == [True, True]


def test_a_function_that_is_not_called_any_more_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(monkeypatch)
    ranks.step("h", "h", steps=MOST - 1)
    assert ranks.settled == [False, False]
    ranks.step("h", "h", steps=MOST)
    assert ranks.settled == [True, True]
    assert "nobody can tell whether it is right: its number" in capsys.readouterr().err
