"""What workers print: no print fails because of our files, logs are bounded, and what is left out is said."""

from __future__ import annotations

import errno
import mmap
import os
import re
import signal
import socket
import time
from pathlib import Path
from threading import Event, Thread

import pytest

from tests.support.brain import wait_for
from tests.support.outputs import LINE
from torchrelay.agent.output import scribe
from torchrelay.agent.output.scribe import (
    LeftOut,
    Scribe,
    Source,
    beginning_of,
    read_left_out,
)
from torchrelay.agent.workers import forkserver
from torchrelay.agent.workers.forkserver import Outputs
from torchrelay.protocol.messages.ids import WorkerId
from torchrelay.wire.files import output
from torchrelay.wire.files.bounded import TAIL, BoundedLog, Bounds
from torchrelay.wire.files.tails import LogTail


class TestBounds:
    def test_a_log_has_two_files_of_half_the_size_at_most(self, tmp_path: Path) -> None:
        log = BoundedLog(tmp_path / "log", Bounds(size=2000, rate=0))
        for number in range(1000):
            log.write(b"%06d\n" % number)
        sizes = [path.stat().st_size for path in sorted(tmp_path.iterdir())]
        assert len(sizes) == 2
        assert max(sizes) < 1000 + len("000000\n")
        log.write(b"last\n")
        text = (tmp_path / "log.1").read_bytes() + (tmp_path / "log").read_bytes()
        assert text.endswith(b"000999\nlast\n")

    def test_what_comes_too_fast_is_left_out_and_said_and_the_last_lines_are_there(self, tmp_path: Path) -> None:
        log = BoundedLog(tmp_path / "log", Bounds(size=0, rate=1000))
        count = 20_000
        for _ in range(count):
            log.write(LINE)
        assert log.owes
        log.write(b"LAST LINE\n")
        log.settle()
        text = (tmp_path / "log").read_bytes()
        assert text.endswith(LINE + b"LAST LINE\n")
        said = re.search(rb"\ntorchrelay: ([\d,]+) bytes are left out here: more than 0.001 MB in a second", text)
        assert said is not None
        left_out = int(said[1].replace(b",", b""))
        notice = len(text) - len(text.replace(said[0], b"")) + len(", for long\n") - 1
        assert len(text) - notice + left_out == count * len(LINE) + len(b"LAST LINE\n")
        assert len(text) < 4000 + 2 * TAIL
        assert not log.unwritten

    def test_a_full_disk_is_waited_for_and_what_is_missing_is_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log = BoundedLog(tmp_path / "log", Bounds())
        log.write(LINE)

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("torchrelay.wire.files.bounded.WRITE_AGAIN_S", 0.0)
        with monkeypatch.context() as there:
            there.setattr("torchrelay.wire.files.bounded.os.write", full)
            for _ in range(10_000):
                log.write(LINE)
            assert log.waits
            assert (log.unwritten, log.why) == (10_000 * len(LINE), "No space left on device")
        log.write(b"room again\n")
        text = (tmp_path / "log").read_bytes()
        assert text.startswith(LINE + b"torchrelay: ")
        assert b" bytes are left out here: No space left on device\n" + LINE in text
        assert text.endswith(LINE + b"room again\n")
        assert not log.waits
        assert 10_000 * len(LINE) - TAIL <= log.unwritten < 10_000 * len(LINE)

    def test_a_link_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "log").symlink_to(tmp_path / "mine")
        log = BoundedLog(tmp_path / "log", Bounds())
        log.write(LINE)
        assert not (tmp_path / "mine").exists()
        assert log.unwritten == len(LINE)

    def test_a_file_that_is_taken_away_is_made_anew(self, tmp_path: Path) -> None:
        log = BoundedLog(tmp_path / "log", Bounds())
        log.write(LINE)
        (tmp_path / "log").unlink()
        log.write(LINE)
        assert (tmp_path / "log").read_bytes() == LINE

    def test_what_users_may_set(self) -> None:
        given = {"TORCHRELAY_LOG_MB": "3", "TORCHRELAY_LOG_RATE_MB": "0"}
        assert Bounds.of(given) == Bounds(3e6, 0)
        assert Bounds.of({"TORCHRELAY_LOG_MB": "much"}) == Bounds()


class TestReading:
    def test_a_reader_that_falls_behind_goes_on_with_the_last_lines_and_says_so(self, tmp_path: Path) -> None:
        path, tail = tmp_path / "rank-0.log", LogTail(tmp_path)
        path.write_bytes(b"first\n" + LINE * 1_000_000 + b"LAST LINE\n")
        lines = [line for _, line in tail.read(last=True)]
        assert lines[-1] == "LAST LINE"
        said = re.fullmatch(rf"torchrelay: ([\d,]+) bytes are left out here, see {path}", lines[0])
        assert said is not None
        shown = sum(len(line) + 1 for line in lines[1:])
        assert shown + int(said[1].replace(",", "")) == path.stat().st_size
        assert set(lines[1:-1]) == {LINE.decode().strip()}

    def test_a_log_that_turns_over_is_followed(self, tmp_path: Path) -> None:
        log, tail = BoundedLog(tmp_path / "rank-0.log", Bounds(size=2000, rate=0)), LogTail(tmp_path)
        found = []
        for number in range(500):
            log.write(b"%d\n" % number)
            if number % 50 == 0:
                found += tail.read()
        found += tail.read(last=True)
        assert [int(line) for _, line in found] == list(range(500))


def test_where_the_mark_could_begin() -> None:
    assert beginning_of(b"\0key", b"text") == 0
    assert beginning_of(b"\0key", b"text\0") == 1
    assert beginning_of(b"\0key", b"text\0ke") == 3
    assert beginning_of(b"\0key", b"") == 0
    assert output.mark(b"\0key", 12) == b"\0key12\n"


def test_where_there_is_no_room_for_another_scribe_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = Outputs(tmp_path, lambda: None)
    try:
        os.kill(outputs.pid, signal.SIGKILL)
        os.waitpid(outputs.pid, 0)

        def none() -> int:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

        with monkeypatch.context() as there:
            there.setattr(os, "fork", none)
            assert outputs.hear(), "no error: the forkserver would end, and with it all workers"
            writing, _ = outputs.open(WorkerId("w1"), str(tmp_path / "w1.log"))
            os.write(writing, b"meanwhile\n")
            assert outputs.hear()
            assert outputs.pid == 0
        assert outputs.hear()
        assert outputs.pid > 0
        os.close(writing)
        outputs.settle(WorkerId("w1"))
        assert (tmp_path / "w1.log").read_text() == "meanwhile\n"
    finally:
        outputs.close()


class TestNoteOfWhatIsMissing:
    def written(self, folder: Path, *, size: int, later: bool) -> tuple[LeftOut, ...]:
        """The note in the folder as soon as a worker's end may be reported; its log cannot be made."""
        (ours, theirs), busy = socket.socketpair(), mmap.mmap(-1, mmap.PAGESIZE)
        folder.mkdir(exist_ok=True)
        notes = folder / "notes"
        if not later:
            notes.mkdir()
        scribe = Scribe(theirs, busy, notes, Bounds())
        reading, writing = os.pipe()
        scribe.add(reading, Source("w1", b"key", str(folder / "nowhere" / "w1.log")))
        busy[0] = 1
        thread = Thread(target=scribe.run)
        thread.start()
        try:
            for _ in range(size // 1000):
                os.write(writing, b"." * 1000)
            if later:
                (log,) = scribe._logs.values()
                wait_for("all to be missing", lambda: log.unwritten == size, 60)
                missing_s = time.monotonic()
                wait_for("a note that had no room", lambda: scribe._told_s > missing_s, 60)
                notes.mkdir()
                wait_for("the note", lambda: read_left_out(notes), 60)
            os.close(writing)
            wait_for("the end of the pipe", lambda: not scribe._streams and not busy[0], 60)
            return read_left_out(notes)
        finally:
            ours.close()
            thread.join(60)
            theirs.close()

    def test_it_is_there_when_the_end_of_a_worker_is_reported(self, tmp_path: Path) -> None:
        for size in (100_000, 300_000):
            (found,) = self.written(tmp_path / str(size), size=size, later=False)
            assert found == LeftOut("w1.log", size, "No such file or directory")

    def test_where_there_was_no_room_for_it_it_is_written_later(self, tmp_path: Path) -> None:
        (found,) = self.written(tmp_path, size=200_000, later=True)
        assert found == LeftOut("w1.log", 200_000, "No such file or directory")


class TestEnd:
    """The forkserver has ended, or is about to."""

    def paced(self, writing: int, lines: int) -> None:
        """Writes for longer than the scribe may be silent."""
        for number in range(lines):
            os.write(writing, b"%d\n" % number)
            Event().wait(0.05)  # the pace of a worker
        os.write(writing, b"LAST LINE\n")
        os.close(writing)

    def written(self, folder: Path, lines: int) -> str:
        """By a scribe whose forkserver has ended."""
        (ours, theirs), busy = socket.socketpair(), mmap.mmap(-1, mmap.PAGESIZE)
        one = Scribe(theirs, busy, folder, Bounds())
        reading, writing = os.pipe()
        one.add(reading, Source("w1", b"key", str(folder / "w1.log")))
        ours.close()
        writer = Thread(target=self.paced, args=(writing, lines))
        writer.start()
        one.run()
        writer.join(60)
        theirs.close()
        return (folder / "w1.log").read_text()

    def test_a_scribe_reads_on_as_long_as_something_comes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(scribe, "END_S", 0.5)
        assert self.written(tmp_path, 30).endswith("29\nLAST LINE\n")

    def test_but_not_for_ever(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scribe, "MOST_END_S", 0.5)
        found = self.written(tmp_path, 60)
        assert found.startswith("0\n")
        assert "LAST LINE" not in found

    def test_a_forkserver_waits_for_its_scribe_as_long_as_that_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(forkserver, "END_S", 0.5)
        outputs = Outputs(tmp_path, lambda: None)
        writing, _ = outputs.open(WorkerId("w1"), str(tmp_path / "w1.log"))
        os.write(writing, b"first\n")
        wait_for("the first line", lambda: (tmp_path / "w1.log").exists(), 60)
        writer = Thread(target=self.paced, args=(writing, 30))
        writer.start()
        outputs.close()
        writer.join(60)
        assert (tmp_path / "w1.log").read_text().endswith("29\nLAST LINE\n")
