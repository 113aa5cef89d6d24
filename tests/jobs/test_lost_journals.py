"""A journal that is lost, older than it was, or damaged: nobody begins anew in its place, and training goes on.

The recipe is the same throughout: a job trains, something happens to its journal, and later the orchestrator dies.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, Finished, ask_until, differences, end_job, start_job, wait_until
from tests.support.twins import undisturbed
from torchrelay.api.endpoint import read_endpoint
from torchrelay.client.client import Client

pytestmark = pytest.mark.timeout(300)

RANKS, STEPS, HOLD = 2, 40, 12
FLAGS = ("--nproc-per-node", str(RANKS), "--spares", "1")


def script(go: Path) -> list[str]:
    return [str(SCRIPTS / "lonely.py"), str(STEPS), str(HOLD), str(go)]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """What the script computes without any fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "go").touch()
    return undisturbed(script(folder / "go"), world=RANKS)


def bereaved(
    folder: Path, deed: Callable[[Path], None], *, and_then: Callable[[Path, int], None] | None = None
) -> Finished:
    """Train to a step; do something to the journal, kill the orchestrator, and let the job go on to its end.

    `and_then` gets the process of rank 1 as well.
    """
    run_dir, go = folder / "run", folder / "go"
    process = start_job(run_dir, script(go), FLAGS)
    try:
        out = folder / "run.out"

        def holds(client: Client) -> bool:
            job = client.job()
            return job.step == HOLD and job.spares.warm == 1

        ask_until(process, run_dir, "all ranks at the step, and a spare", holds, deadline_s=120)
        endpoint = read_endpoint(run_dir)
        assert endpoint is not None
        victim = next(row["pid"] for row in Client.of(run_dir).ranks()["ranks"] if row["rank"] == 1)
        deed(run_dir)
        os.kill(endpoint.pid, signal.SIGKILL)
        wait_until("word that nobody decides", lambda: "Training goes on without it" in out.read_text(), deadline_s=60)
        if and_then is not None:
            and_then(run_dir, victim)
        go.touch()
        return end_job(process, run_dir, timeout_s=120)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(30)


def remove(run_dir: Path) -> None:
    for path in run_dir.glob("journal.db*"):
        path.unlink()


def remove_wal(run_dir: Path) -> None:
    (run_dir / "journal.db-wal").unlink()


def remove_all_traces(run_dir: Path) -> None:
    remove(run_dir)
    (run_dir / "journal.mark").unlink()
    (run_dir / "endpoint.json").unlink()


def zero(run_dir: Path) -> None:
    for path in run_dir.glob("journal.db*"):
        path.write_bytes(bytes(path.stat().st_size))


def flip(run_dir: Path) -> None:
    chance = random.Random(7)
    for path in (run_dir / "journal.db", run_dir / "journal.db-wal"):
        data = bytearray(path.read_bytes())
        for _ in range(400):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)


@pytest.mark.parametrize("deed", [remove, remove_wal, remove_all_traces, zero, flip])
def test_the_job_trains_to_its_end_with_the_same_bits(
    tmp_path: Path, calm: Finished, deed: Callable[[Path], None]
) -> None:
    done = bereaved(tmp_path, deed)
    assert done.code == 0, done.output
    assert differences(done, calm) == []
    assert "without an orchestrator" in done.output
    assert "journal.db is" in done.output, "the reason"
    assert done.output.count("left in order") == RANKS
    agents = "".join(path.read_text() for path in (done.run_dir / "logs").glob("agent-*.log"))
    assert "(fenced)" not in agents
    if deed is not zero and deed is not flip:
        assert not (done.run_dir / "journal.db").exists() or deed is remove_wal, "none is begun in its place"


def test_a_rank_that_is_lost_meanwhile_is_said_and_replaced_when_the_journal_is_put_back(
    tmp_path: Path, calm: Finished
) -> None:
    away = tmp_path / "away"

    def move_away(run_dir: Path) -> None:
        away.mkdir()
        for path in run_dir.glob("journal.db*"):
            path.rename(away / path.name)

    def lose_a_rank_and_put_it_back(run_dir: Path, victim: int) -> None:
        os.kill(victim, signal.SIGKILL)
        said = "No orchestrator is there to replace it: if none comes back, the run ends with 92 in 600 s"
        wait_until("word of the loss", lambda: said in (tmp_path / "run.out").read_text(), deadline_s=60)
        for path in away.iterdir():
            path.replace(run_dir / path.name)
        wait_until("the orchestrator", lambda: "is there again" in (tmp_path / "run.out").read_text(), deadline_s=60)

    done = bereaved(tmp_path, move_away, and_then=lose_a_rank_and_put_it_back)
    assert done.code == 0, done.output
    assert differences(done, calm) == []
    assert "1 incident, resolved clean" in done.output
