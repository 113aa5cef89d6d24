"""Progress of long work: on a terminal a line that goes away, elsewhere nothing."""

from __future__ import annotations

import os
import pty
import sys
import time
from contextlib import suppress

import pytest

from torchrelay.terminal import progress as module
from torchrelay.terminal.progress import line, progress


@pytest.mark.parametrize(
    ("done", "every", "passed_s", "note", "said"),
    [
        (0, 8, 0.0, "", f"[{' ' * 24}] 0 of 8 runs"),
        (2, 8, 1.0, "", f"[{'#' * 6}{' ' * 18}] 2 of 8 runs"),
        (2, 8, 3.0, "", f"[{'#' * 6}{' ' * 18}] 2 of 8 runs, 9 s left"),
        (2, 8, 61.6, "", f"[{'#' * 6}{' ' * 18}] 2 of 8 runs, 3 min 5 s left"),
        (2, 8, 0.5, "1 violation", f"[{'#' * 6}{' ' * 18}] 2 of 8 runs; 1 violation"),
        (8, 8, 9.0, "", f"[{'#' * 24}] 8 of 8 runs"),
        (0, 0, 9.0, "", f"[{'#' * 24}] 0 of 0 runs"),
    ],
)
def test_the_line_says_how_much_is_done_and_how_long_it_still_takes(
    done: int, every: int, passed_s: float, note: str, said: str
) -> None:
    assert line("runs", done, every, passed_s, note) == said


def test_where_nobody_looks_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("runs") as told:
        told(1, 2)
        told(2, 2, "a note")
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_the_line_is_drawn_now_and_then_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("COLUMNS", "40")
        monkeypatch.setattr(module, "AGAIN_S", 3600)
        with progress("runs") as told:
            for done in range(1, 101):
                told(done, 100, "a note that is longer than the line")
    shown = all_of(ours)
    first, last, end = shown.split("\r\x1b[K")[1:]
    assert "1 of 100 run" in first
    assert "100 of 100" in last
    assert max(len(first), len(last)) <= 39, "it would wrap, and then not go away"
    assert end == ""


def test_it_is_gone_also_when_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with pytest.raises(ValueError, match="broken"):
            fail()
    assert all_of(ours).endswith("\r\x1b[K")


def all_of(terminal: int) -> str:
    """What was printed on a terminal that is closed at its other end."""
    shown = b""
    with suppress(OSError):  # the end, as Linux says it
        while piece := os.read(terminal, 1 << 16):
            shown += piece
    os.close(terminal)
    return shown.decode()


def fail() -> None:
    with progress("runs") as told:
        told(1, 2)
        raise ValueError("broken")


def test_telling_costs_little() -> None:
    with progress("runs") as told:
        begun = time.process_time()
        for done in range(10_000):
            told(done, 10_000)
    assert time.process_time() - begun < 1
