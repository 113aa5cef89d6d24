"""Whoever starts an agent on another machine hands it a pass over its standard input, and may tell it to end there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from torchrelay.agent import joining
from torchrelay.agent.joining import Starter, take_pass
from torchrelay.wire.trust.authority import make_passes
from torchrelay.wire.trust.passes import Role, read_pass


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    """Where the agent reads, and where the other one writes."""
    reads, writes = os.pipe()
    yield reads, writes
    for end in (reads, writes):
        with suppress(OSError):  # the test has closed it
            os.close(end)


def test_what_comes_behind_the_pass_is_still_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: tuple[int, int]
) -> None:
    reads, writes = ends
    path = make_passes(tmp_path, "train")[Role.AGENT]
    monkeypatch.setattr(joining, "STDIN_DESCRIPTOR", reads)
    os.write(writes, path.read_bytes() + b"end 0\n")
    assert take_pass("-").token == read_pass(path).token
    assert Starter(reads).told_to_end() == 0.0


def test_a_word_may_come_in_pieces_and_others_mean_nothing(ends: tuple[int, int]) -> None:
    reads, writes = ends
    starter = Starter(reads)
    assert starter.told_to_end() is None
    for piece in (b"hello\nend\nend -1\nend 5x\n", b"en", b"d 2.", b"5"):
        os.write(writes, piece)
        assert starter.told_to_end() is None
    os.write(writes, b"\n")
    assert starter.told_to_end() == 2.5
    assert not starter.gone


def test_that_it_is_gone_is_no_word_to_end(ends: tuple[int, int]) -> None:
    reads, writes = ends
    os.close(writes)
    starter = Starter(reads)
    assert starter.told_to_end() is None
    assert starter.gone


def test_a_line_without_end_takes_no_memory(ends: tuple[int, int]) -> None:
    reads, writes = ends
    starter = Starter(reads)
    for _ in range(100):
        os.write(writes, b"x" * 4096)
        assert starter.told_to_end() is None
    assert len(starter._rest) <= joining.MOST_WORD
