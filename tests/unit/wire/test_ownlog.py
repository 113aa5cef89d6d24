"""The logs of agents and orchestrators cannot fill a disk, whatever makes them write."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchrelay.wire.files import ownlog
from torchrelay.wire.files.ownlog import BURST, LONGEST, OwnLog

Log = Callable[..., None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.log"


@pytest.fixture
def log(path: Path) -> Iterator[Log]:
    logger = logging.Logger("test")
    with path.open("a") as stream:
        logger.addHandler(OwnLog(stream, path, size=100_000))
        yield logger.info


def test_it_turns_over(path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownlog, "BURST", 1e9)
    monkeypatch.setattr(ownlog, "LINES_S", 1e9)
    for number in range(30_000):
        log("%08d", number)
    older = path.with_name("agent.log.1")
    assert path.stat().st_size <= 100_009
    assert older.stat().st_size <= 100_009
    numbers = [int(line) for line in (older.read_text() + path.read_text()).split()]
    assert numbers == list(range(30_000 - len(numbers), 30_000))
    with path.open("a") as other:  # whoever has it open writes to the same file afterwards
        other.write("crash\n")
    assert path.read_text().endswith("crash\n")


def test_too_many_lines_are_left_out_and_counted(path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1e9]
    monkeypatch.setattr("torchrelay.wire.files.ownlog.time.monotonic", lambda: now[0])
    log("first")
    now[0] += 100
    for _ in range(int(BURST) + 500):
        log("bad request")
    now[0] += 10
    log("last")
    lines = path.read_text().splitlines()
    assert lines.count("bad request") == BURST
    assert lines[-2:] == ["500 lines are left out here", "last"]


def test_a_long_line_is_cut(path: Path, log: Log) -> None:
    log("x" * (LONGEST + 128_000))
    assert path.read_text() == "x" * LONGEST + " ... and 128,000 more characters\n"


def test_what_cannot_be_written_is_counted_and_harms_nobody(
    path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as there:
        there.setattr(logging.StreamHandler, "flush", full)
        log("one")
        log("two")
    log("three")
    assert path.read_text().splitlines()[-2:] == ["2 lines are left out here", "three"]
    assert capsys.readouterr().err == ""
