"""What Slurm has given to a run, from its environment, and how an agent comes to each node of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrelay.cli.launch.run import plan
from torchrelay.client.runs import NotPossible
from torchrelay.launcher.allocation import Allocation, allocation_in, step_command, step_environment
from torchrelay.launcher.machines import Floating
from torchrelay.launcher.plan import Plan

JOB = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-3]"}


@pytest.fixture(autouse=True)
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one on PATH."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "srun"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        (JOB, Allocation(4711, ("n1", "n2", "n3"))),
        ({**JOB, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, Allocation(4711, ("n1", "n2", "n3"))),
        ({**JOB, "SLURM_PROCID": "0"}, Allocation(4711, ("n1", "n2", "n3"))),
        ({}, None),
        ({**JOB, "SLURM_JOB_NODELIST": "n7", "SLURMD_NODENAME": "n7"}, None),
        ({**JOB, "SLURM_JOB_NODELIST": "n7"}, Allocation(4711, ("n7",))),  # a login node, after salloc -N1
        ({**JOB, "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "n[1-2]"}, Allocation(4711, ("n1", "n2"))),
        ({**JOB, "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "n1", "SLURMD_NODENAME": "n1"}, None),
        (
            {**JOB, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NODELIST": "n1", "SLURMD_NODENAME": "n1"},
            Allocation(4711, ("n1", "n2", "n3")),
        ),
        ({"SLURM_JOB_NODELIST": "n[1-3]"}, None),
        ({"SLURM_JOB_ID": "x", "SLURM_JOB_NODELIST": "n[1-3]"}, None),
    ],
)
def test_a_job_of_several_nodes_is_taken(environ: dict[str, str], found: Allocation | None) -> None:
    assert allocation_in(environ) == found


def test_the_other_tasks_of_a_step_leave_all_to_the_first() -> None:
    with pytest.raises(NotPossible, match="task 3 of this step leaves all nodes to task 0") as refused:
        allocation_in({**JOB, "SLURM_STEP_ID": "0", "SLURM_PROCID": "3"})
    assert refused.value.code == 0


def test_a_list_of_nodes_that_makes_no_sense_is_named() -> None:
    with pytest.raises(NotPossible, match="SLURM_JOB_NODELIST"):
        allocation_in({**JOB, "SLURM_JOB_NODELIST": "n[1-"})


def test_without_srun_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NotPossible, match="srun is not on PATH: give --no-slurm"):
        allocation_in(JOB)


def test_a_step_is_for_one_node_and_does_not_end_with_another() -> None:
    words = step_command(4711, "n2", ["agent"])
    assert words[0] == "srun"
    assert {"--jobid=4711", "--nodelist=n2", "--overlap", "--no-kill", "--nodes=1", "--ntasks=1"} <= set(words)
    assert words[-1] == "agent"
    assert not [word for word in words if word.startswith("--input")], "the pass comes over standard input"


def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> Plan:
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    return plan(["--run-dir", str(tmp_path / "run"), *flags, str(script)])


HERE = ["--host", "127.0.0.1"]


def test_the_run_uses_the_nodes_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(tmp_path, monkeypatch, *HERE, "--spare-nodes", "1", "--nproc-per-node", "2")
    assert found.machines is not None
    assert (found.machines.slurm_job, found.spec.nodes, found.spec.world_size) == (4711, 2, 4)


@pytest.mark.parametrize("flags", [["--hosts", "a,b", *HERE], ["--by-hand", *HERE], ["--no-slurm"], ["--no_slurm"]])
def test_it_does_not_if_another_way_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]
) -> None:
    found = planned(tmp_path, monkeypatch, *flags)
    assert found.machines is None or found.machines.slurm_job == 0
    assert (found.machines is None) == (len(flags) == 1)


def test_fewer_nodes_than_are_wanted_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotPossible, match="3 hosts are named: --nodes 4 and --spare-nodes 0 need 4"):
        planned(tmp_path, monkeypatch, *HERE, "--nodes", "4")


@pytest.mark.parametrize(
    ("text", "spares", "nodes", "floating"),
    [
        ("3", 3, 0, Floating()),
        ("dedicated:1", 0, 1, Floating()),
        ("dedicated:1,floating:2,partition=low", 0, 1, Floating(2, "low")),
        ("floating:2", 0, 0, Floating(2)),
    ],
)
def test_spares_are_workers_or_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, spares: int, nodes: int, floating: Floating
) -> None:
    found = planned(tmp_path, monkeypatch, *HERE, "--nodes", "2", "--spares", text)
    assert found.machines is not None
    assert (found.spec.spares, found.spare_nodes, found.machines.floating) == (spares + nodes, nodes, floating)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--spares", "many"], "give a number of workers, or dedicated:K"),
        (["--spares", "floating:1,floating:2"], "each once"),
        (["--spares", "floating:x"], "give a number"),
        (["--spares", "partition=low"], "say how many nodes, too"),
        (["--spares", "dedicated:1", "--spare-nodes", "1"], "give one of them"),
        (["--spares", "floating:1", "--no-slurm"], "only in a Slurm job"),
        (["--spares", "-1"], "cannot be negative"),
    ],
)
def test_what_is_no_word_on_spares_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], why: str
) -> None:
    host = [] if "--no-slurm" in words else HERE
    with pytest.raises(NotPossible, match=why):
        planned(tmp_path, monkeypatch, *host, "--nodes", "1", *words)


def test_srun_takes_nothing_from_the_users_settings_of_steps() -> None:
    theirs = {
        "SRUN_CPUS_PER_TASK": "2", "SLURM_GPUS_PER_TASK": "1", "SLURM_EXPORT_ENV": "NONE", "SLURM_STDINMODE": "none",
        "SLURM_JOB_ID": "4711", "SALLOC_PARTITION": "x", "SBATCH_EXCLUSIVE": "1",
    }  # fmt: skip
    kept = {"SLURM_CONF": "/etc/slurm.conf", "PATH": "/bin", "NCCL_DEBUG": "INFO"}
    assert step_environment({**theirs, **kept}) == kept
