"""Whose numbers are shown to be right, after ranks have changed hands."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from torchrelay.worker.arguments import digest
from torchrelay.worker.proving import Told, unproved


def told(text: str) -> Told:
    """`f 0 3 / f 0 4`: a function and its numbers before the fault, and now; `f 0 ?3 / ...`: that one is in doubt."""
    before, now = (part.split() for part in text.split("/"))
    doubt = [at for at, word in enumerate(before) if word.startswith("?")]
    return Told(doubt, made(before), made(now))


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
    ],
)
def test_numbers_are_right_if_one_that_had_the_same_has_them_too(ranks: str, wrong: list[int]) -> None:
    assert unproved([told(rank) for rank in ranks.split("|")]) == wrong
