"""The check of the English that users read finds what it is there for, and nothing is left to find."""

from __future__ import annotations

import pytest

from tests import english


def test_nothing_is_left_to_find(capsys: pytest.CaptureFixture[str]) -> None:
    assert english.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize("word", english.WORDS)
def test_each_word_is_found(word: str) -> None:
    (found,) = english.wrong(f"Some text that {word} something else.")
    assert word in found
    assert list(english.wrong(f"Some text that x{word}x something else.")) == []


def test_a_long_sentence_is_found_and_a_list_is_no_sentence() -> None:
    assert list(english.wrong("word " * english.LONGEST)) == []
    assert len(list(english.wrong("word " * (english.LONGEST + 1)))) == 1
    page = "\n".join(f"- item {number} of a list" for number in range(40))
    assert [what for each in english.prose(page) for what in english.wrong(each)] == []


def test_code_is_no_english() -> None:
    page = "Call `anew()`.\n\n```\nnobody lies\n```\n\n[A page](ever.md)"
    assert [what for each in english.prose(page) for what in english.wrong(each)] == []
