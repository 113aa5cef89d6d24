"""What workers print: no print fails because of our files, logs are bounded, and what is left out is said."""

from __future__ import annotations

import errno
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from tests.agent_stage import offspring
from tests.brain import wait_for
from tests.jobs import SCRIPTS
from tests.mounts import kept_full, needs_mounts, seen_by, within
from tests.test_cli_local_run import TWO, LocalRun
from tests.test_forkserver import Server, serving
from torchrelay.agent.output.scribe import TAIL, BoundedLog, Bounds, beginning_of
from torchrelay.agent.workers.forks import Child, Ended
from torchrelay.agent.workers.forkserver import Outputs
from torchrelay.launcher.logs import LogTail
from torchrelay.protocol.messages.ids import WorkerId
from torchrelay.wire.files import output

LINE = b"a line of output\n"


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

        monkeypatch.setattr("torchrelay.agent.output.scribe.WRITE_AGAIN_S", 0.0)
        with monkeypatch.context() as there:
            there.setattr("torchrelay.agent.output.scribe.os.write", full)
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


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    yield from serving(Server(tmp_path, linger_s=30.0))


@pytest.mark.slow
class TestScribe:
    def test_from_its_mark_on_output_goes_to_the_ranks_log(self, server: Server) -> None:
        server.fork("w1", "become_a_rank", "7")
        server.hear(Child)
        server.hear(Ended)
        assert server.log("w1").read_text() == "nobody yet\n"
        assert server.log("rank-7").read_text() == "rank 7\na child of rank 7\n"

    def test_another_scribe_goes_on_where_one_was_killed(self, server: Server) -> None:
        scribe = next(iter(offspring(server.process.pid)))
        server.fork("w1", "print_on", "7")
        child = server.hear(Child)
        for seen in (1, 100):

            def lines(more: int) -> int:
                found = server.log("rank-7").read_text().splitlines() if server.log("rank-7").exists() else []
                return len(found) if len(found) >= more else 0

            def others(old: int = scribe) -> set[int]:
                return set(offspring(server.process.pid)) - {child.pid, old}

            before = wait_for("lines", partial(lines, seen), 60)
            os.kill(scribe, signal.SIGKILL)
            scribe = wait_for("another scribe", others, 60).pop()
            wait_for("further lines", partial(lines, before + 1), 60)
        os.kill(child.pid, signal.SIGTERM)
        server.hear(Ended)
        numbers = [int(line) for line in server.log("rank-7").read_text().splitlines()]
        assert numbers == sorted(set(numbers))
        assert len(numbers) >= numbers[-1] - 200  # what a scribe had taken and not written when it was killed is lost


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


class OnASmallDisk(LocalRun):
    """A run whose folder is on a disk of 3 MB."""

    def command(self) -> list[str]:
        (self.folder / "disk").mkdir()
        self.run_dir = self.folder / "disk" / "run"
        return within(self.folder / "disk", "3m", super().command(), mode="0700")

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        process = super().start(*words, **environment)
        self.disk = seen_by(process.pid, self.folder / "disk")
        self.run_dir = self.disk / "run"
        return process

    def steps_printed(self) -> int:
        """Of rank 0, whose orchestrator cannot tell it."""
        first: int = struct.unpack_from("<q", (self.run_dir / "logs" / "gates").read_bytes())[0]
        return first


def both_at(folder: Path, step: str) -> bool:
    return all((folder / f"at-{step}-{rank}").exists() for rank in (0, 1))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[OnASmallDisk]:
    run = OnASmallDisk(tmp_path)
    yield run
    run.tidy()


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.timeout(180)
@needs_mounts
class TestFullDisk:
    def test_ranks_that_print_train_on_and_what_is_missing_is_said(self, run: OnASmallDisk) -> None:
        run.start(*TWO, "300", "0.01", "loud")
        run.until_spare()
        run.until_step(3)
        with kept_full(run.disk):
            step = run.steps_printed()
            wait_for("steps on a full disk", lambda: run.steps_printed() >= step + 50, 60)
        code, _, err = run.end(120)
        assert code == 0, err
        assert "ended with 0 after 300 steps" in err
        assert "rank-0.log cannot be written (No space left on device): output is left out, training goes on" in err
        assert re.search(r"[\d,]+ bytes of output could not be written to \S+/rank-0.log: No space left on device", err)

    def test_a_real_job_ends_with_the_bits_of_an_undisturbed_one(self, tmp_path: Path) -> None:
        bits = []
        for disturbed in (True, False):
            work = tmp_path / str(disturbed)
            (work / "disk").mkdir(parents=True)
            (work / "out").mkdir()
            script = [str(SCRIPTS / "loud.py"), str(work / "out"), str(work / "out" / "go")]
            words = ["--nproc-per-node", "2", "--run-dir", str(work / "disk" / "run"), *script]
            command = [sys.executable, "-m", "torchrelay.cli.main", "run", *words]
            command = within(work / "disk", "3m", command, mode="0700")
            job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            try:
                wait_for("ten steps", partial(both_at, work / "out", "ten"), 120)
                with kept_full(seen_by(job.pid, work / "disk")) if disturbed else nullcontext():
                    (work / "out" / "go").touch()
                    wait_for("forty steps", partial(both_at, work / "out", "forty"), 120)
                (work / "out" / "end").touch()
                told, _ = job.communicate(timeout=120)
            finally:
                job.kill()
            assert job.returncode == 0, told
            assert ("rank-0.log: No space left on device" in told) == disturbed
            bits.append([(work / "out" / f"bits-{rank}").read_text() for rank in (0, 1)])
        assert bits[0] == bits[1]


@pytest.mark.slow
@pytest.mark.jobs
@pytest.mark.timeout(180)
def test_a_flood_is_bounded_and_its_last_lines_are_shown(tmp_path: Path) -> None:
    run = LocalRun(tmp_path)
    try:
        run.start(*TWO, "3", "0.01", "flood=40", TORCHRELAY_LOG_MB="8", TORCHRELAY_LOG_RATE_MB="2")
        code, out, err = run.end()
    finally:
        run.tidy()
    assert code == 0, err
    for rank in (0, 1):
        assert [line for line in out.splitlines() if line.startswith(f"[{rank}]")][-1] == f"[{rank}] LAST LINE"
        files = list((run.run_dir / "logs").glob(f"rank-{rank}.log*"))
        assert sum(path.stat().st_size for path in files) <= 10_000_000
    assert "bytes are left out here: more than 2 MB in a second, for long" in out
