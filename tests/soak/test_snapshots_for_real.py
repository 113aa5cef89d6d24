"""Shards without a replica: real faults, all go back to their snapshots, and the bits of the undisturbed run."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, Finished, differences, end_job, start_job, torchrelay, wait_until
from tests.support.snapshots_for_real import EVERY
from tests.support.twins import undisturbed
from torchrelay.client.client import Client

pytestmark = pytest.mark.timeout(600)


def test_the_interval_is_found_out_and_what_is_lost_since_is_made_again(tmp_path: Path) -> None:
    script = [str(SCRIPTS / "faulty.py"), "--layout", "fsdp", "--steps", "60"]
    calm = undisturbed(script)
    run_dir = tmp_path / "run"
    words = [*script, "--pace", "0.05", "--snapshots", "auto"]
    process = start_job(run_dir, words, ["--nproc-per-node", "4", "--spares", "1"])
    told = tmp_path / "run.out"
    wait_until(
        "step 42, or the end", lambda: "step 42 " in told.read_text() or process.poll() is not None, deadline_s=120
    )
    assert process.poll() is None, told.read_text()[-3000:]
    ranks = Client.of(run_dir).view_ranks()
    assert ranks.snapshot_every > 100  # steps are short, and four ranks seldom fail
    pid = next(row.pid for row in ranks.ranks if row.rank == 2)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    done = end_job(process, run_dir, timeout_s=240)
    assert done.code == 0, done.output[-3000:]
    assert f"snapshots are taken every {ranks.snapshot_every} steps from now on" in done.output
    assert differences(done, calm) == []
    (row,) = done.incidents()
    assert row["resolution"] == "rolled back"
    assert 10 < row["steps_lost"] < 60


STEPS = [str(SCRIPTS / "faulty.py"), "--layout", "fsdp", "--steps", "80"]


def lose_nodes(run_dir: Path, flags: list[str], words: list[str], *ranks: int) -> Finished:
    """Run to the end; after step 5 the nodes of these ranks lose their power, all at once."""
    process = start_job(run_dir, [*STEPS, "--pace", "0.1", *words], [*flags, "--isolate"])
    told = run_dir.with_name("run.out")
    wait_until("step 5", lambda: "step 5 " in told.read_text(), deadline_s=120)
    # Nodes are taken in the order in which they join, which is not that of their names.
    nodes = [row.node for row in Client.of(run_dir).view_ranks().ranks if row.rank in ranks]
    with ThreadPoolExecutor() as hands:
        blows = [
            ["node", "--node", str(node), "--how", "power", "--no-wait", "--yes", "--run-dir", str(run_dir)]
            for node in nodes
        ]
        struck = list(hands.map(lambda blow: torchrelay("chaos", *blow), blows))
    assert [each.returncode for each in struck] == [0] * len(ranks), [each.stderr for each in struck]
    return end_job(process, run_dir, timeout_s=240)


def test_a_node_is_lost_with_its_memory(tmp_path: Path) -> None:
    """Two of four shards are gone, and the copies of the other two: who is left goes back by its own copies."""
    calm = undisturbed(STEPS)
    flags = ["--nodes", "2", "--nproc-per-node", "2", "--spare-nodes", "1"]
    done = lose_nodes(tmp_path / "run", flags, [], 2)
    assert done.code == 0, done.output[-3000:]
    assert differences(done, calm) == []
    (row,) = done.incidents()
    assert row["resolution"] == "rolled back"
    assert 0 <= row["steps_lost"] <= EVERY  # 0: right after a snapshot


def test_two_nodes_are_lost_at_once_and_a_second_buddy_has_the_copies(tmp_path: Path) -> None:
    """Of rank 1's shard there is a copy on the node of rank 2 and on that of rank 3; only the last is left."""
    calm = undisturbed(STEPS)
    flags = ["--nodes", "4", "--nproc-per-node", "1", "--spare-nodes", "2"]
    done = lose_nodes(tmp_path / "run", flags, ["--buddies", "2"], 1, 2)
    assert done.code == 0, done.output[-3000:]
    assert differences(done, calm) == []
    assert {row["resolution"] for row in done.incidents()} == {"rolled back"}
