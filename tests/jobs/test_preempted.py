"""Signals to `torchrelay run` reach the ranks, which have a grace time to save and leave; then the end is tidy."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.cases.running import Case, Ran, run_case
from tests.support.processes import all_seen
from torchrelay.client.client import Client

pytestmark = pytest.mark.timeout(240)

FLAGS = ("--nproc-per-node", "2", "--spares", "1")


def send(*names: str, step: int = 20, then: Callable[[Case], None] = lambda _: None) -> Callable[[Case], None]:
    """A driver: signals to the launcher, each when the one before has come to both ranks."""

    def drive(case: Case) -> None:
        case.until_step(step)
        for name in names:
            case.process.send_signal(signal.Signals[name])
            case.until(f"{name} in both ranks", partial(came, case.out, name))
        then(case)

    return drive


def came(out: Path, name: str) -> bool:
    return all(got(out, name, rank) for rank in (0, 1))


def got(out: Path, name: str, rank: int) -> int:
    """How often a rank's handler has run."""
    path = out / f"got-{name}-{rank}"
    return len(path.read_text().splitlines()) if path.exists() else 0


def run(tmp_path: Path, drive: Callable[[Case], None], *flags: str, mode: str = "", **env: str) -> tuple[Ran, Path]:
    ran = run_case(tmp_path, "preempted", mode=mode, drive=drive, flags=[*FLAGS, *flags], env=env)
    left = [words for one in all_seen() if str(ran.run_dir) in " ".join(words := one.words())]
    assert left == []
    return ran, tmp_path / "out"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_the_handlers_run_once_the_ranks_save_and_their_code_is_the_runs(tmp_path: Path, name: str) -> None:
    ran, out = run(tmp_path, send(name))
    assert ran.code == 3, ran.output
    assert [got(out, name, rank) for rank in (0, 1)] == [1, 1]
    assert (out / "saved.pt").exists(), ran.output
    assert all((out / f"left-{rank}").exists() for rank in (0, 1)), "both have left by themselves"
    assert f"stopping ({name}): the ranks have 30 s to end by themselves" in ran.output
    assert "all ranks have left" in ran.output
    assert ran.resolutions == ()


def test_a_rank_that_is_lost_in_the_grace_is_replaced_and_the_save_is_made(tmp_path: Path) -> None:
    def kill(case: Case) -> None:
        rows = Client.of(case.run_dir).ranks()["ranks"]
        os.kill(next(row["pid"] for row in rows if row["rank"] == 1), signal.SIGKILL)

    ran, out = run(tmp_path, send("SIGTERM", then=kill), SAVE_S="4")
    assert ran.code == 3, ran.output
    assert (out / "saved.pt").exists(), ran.output
    assert len((out / "left-1").read_text().splitlines()) == 1
    assert ran.resolutions == ("clean",), ran.output


def test_who_is_not_done_when_the_grace_is_over_is_killed(tmp_path: Path) -> None:
    ran, out = run(tmp_path, send("SIGTERM"), "--grace", "1", SAVE_S="60")
    assert ran.code == 130, ran.output
    assert not (out / "saved.pt").exists()
    assert "ranks were still there after 1 s" in ran.output


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    began: list[float] = []

    def again(case: Case) -> None:
        began.append(time.monotonic())
        case.process.send_signal(signal.SIGTERM)

    ran, out = run(tmp_path, send("SIGTERM", then=again), "--grace", "100", SAVE_S="200")
    assert ran.code == 130, ran.output
    assert time.monotonic() - began[0] < 60, "much less than the grace"
    assert not (out / "saved.pt").exists()


def test_ranks_that_leave_from_their_handlers_with_0_end_the_run_with_0(tmp_path: Path) -> None:
    ran, _ = run(tmp_path, send("SIGTERM"), mode="raise")
    assert ran.code == 0, ran.output


def test_training_may_go_on_to_its_own_end(tmp_path: Path) -> None:
    ran, out = run(tmp_path, send("SIGTERM"), mode="deaf")
    assert ran.code == 0, ran.output
    assert [got(out, "SIGTERM", rank) for rank in (0, 1)] == [1, 1]
    assert {key[0] for key in ran.lines if key[1] == "end"} == {0, 1}


def test_sigusr1_is_told_to_who_listens_and_ends_nothing(tmp_path: Path) -> None:
    ran, out = run(tmp_path, send("SIGUSR1"), mode="count")
    assert ran.code == 0, ran.output
    assert [got(out, "SIGUSR1", rank) for rank in (0, 1)] == [1, 1]
    assert ran.resolutions == ()


def test_sigusr2_for_which_nobody_listens_ends_nobody(tmp_path: Path) -> None:
    def drive(case: Case) -> None:
        case.until_step(20)
        case.process.send_signal(signal.SIGUSR2)
        case.until("told", lambda: "SIGUSR2: passed on" in case.printed())

    ran, _ = run(tmp_path, drive)
    assert ran.code == 0, ran.output
    assert ran.resolutions == ()


def test_sigusr1_can_be_one_that_ends_the_ranks(tmp_path: Path) -> None:
    ran, out = run(tmp_path, send("SIGUSR1"), "--signals-to-handle", "SIGTERM,SIGUSR1")
    assert ran.code == 3, ran.output
    assert (out / "saved.pt").exists()


def test_sigterm_to_one_rank_alone_is_for_its_handler(tmp_path: Path) -> None:
    def drive(case: Case) -> None:
        case.until_step(20)
        rows = Client.of(case.run_dir).ranks()["ranks"]
        os.kill(next(row["pid"] for row in rows if row["rank"] == 1), signal.SIGTERM)
        case.until("the end", lambda: False)

    ran, out = run(tmp_path, drive)
    assert ran.code == 3, ran.output
    assert (out / "saved.pt").exists()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_scripts_without_handlers_are_ended_by_it_at_once(tmp_path: Path, name: str) -> None:
    def drive(case: Case) -> None:
        case.until_step(20)
        case.process.send_signal(signal.Signals[name])

    ran = run_case(tmp_path, "control", drive=drive, flags=[*FLAGS, "--grace", "100"])
    assert ran.code == 130, ran.output
    assert "all ranks have left" in ran.output or "cannot go on" in ran.output


def test_sigterm_to_one_rank_without_a_handler_is_its_loss(tmp_path: Path) -> None:
    def drive(case: Case) -> None:
        case.until_step(20)
        rows = Client.of(case.run_dir).ranks()["ranks"]
        os.kill(next(row["pid"] for row in rows if row["rank"] == 1), signal.SIGTERM)

    ran = run_case(tmp_path, "control", drive=drive, flags=FLAGS)
    assert (ran.code, ran.resolutions) == (0, ("clean",)), ran.output
