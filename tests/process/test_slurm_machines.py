"""A real Slurm on machines of the harness: what torchrelay counts on, and that nothing is left of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines.harness import Machines
from tests.support.machines.machine import Machine
from tests.support.machines.waiting import MachineError, wait_for
from tests.support.slurm.cluster import Slurm
from tests.support.slurm.conf import Site
from tests.support.slurm.inside import in_jobs
from tests.support.slurm.job import Job
from tests.support.slurm.needs import needs_slurm
from tests.support.slurm.users import USER

pytestmark = [needs_slurm, pytest.mark.slurm]

BOARD = "/board"  # a folder that all machines share: what runs on them leaves word there
SLEEPER = "sleep 1234"
# A task that reads what it is given, says so, and from then on notes each signal that it gets.
READER = """\
for name in HUP INT TERM USR1 USR2 PIPE; do trap "echo $name >> /board/signals-$SLURM_PROCID" $name; done
read words
echo "$words" > /board/read-$SLURM_PROCID.part
mv /board/read-$SLURM_PROCID.part /board/read-$SLURM_PROCID
while :; do sleep 0.1; done
"""
# Ends when it is asked to, and says that it was asked.
OBEDIENT = """\
trap 'touch /board/asked-$SLURM_PROCID; exit 0' TERM
touch /board/ready-$SLURM_PROCID
while :; do sleep 0.1; done
"""
# Prints 4 MB once it may.
PRINTER = """\
touch /board/ready-$SLURM_PROCID
until [ -e /board/go ]; do sleep 0.1; done
head -c 4000000 /dev/zero
touch /board/done-$SLURM_PROCID
"""


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """The shared folder, as the test sees it. Any user may write there."""
    folder = tmp_path / "board"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


@pytest.fixture
def machines(board: Path) -> Iterator[Machines]:
    with Machines(5, shared={BOARD: board}) as found:
        yield found


@pytest.fixture
def site() -> Site:
    return Site()


@pytest.fixture
def slurm(machines: Machines, tmp_path: Path, site: Site) -> Iterator[Slurm]:
    """m1 controls, m2 to m5 compute."""
    with Slurm(machines, tmp_path, site=site) as found:
        yield found


def names_in(folder: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def wait_files(folder: Path, pattern: str, count: int) -> None:
    wait_for(f"{count} of {pattern}", lambda: len(names_in(folder, pattern)) == count)


def sleeping_job(slurm: Slurm, nodes: int, *flags: str, srun: str = "") -> Job:
    """A job of the ordinary user, on nodes of its own, one task of its step on each of them, which runs by now."""
    script = f"srun --ntasks-per-node=1 {srun} {SLEEPER}; echo $? > {BOARD}/srun-ended; {SLEEPER}"
    job = slurm.submit(script, f"-N{nodes}", "--exclusive", *flags, user=USER)
    job.wait("RUNNING")
    wait_for("a task on each node", lambda: all(sleeps(slurm.nodes[name]) for name in job.nodes()))
    return job


def sleeps(machine: Machine) -> list[int]:
    """The tasks of a sleeping job there."""
    return [pid for pid, words in in_jobs(machine).items() if words.endswith(SLEEPER) and not words.startswith("srun")]


def sruns(machine: Machine) -> tuple[int, int]:
    """The srun there, and the child that looks after it: should srun die, it cancels the step."""
    found = [pid for pid, words in in_jobs(machine).items() if words.startswith("srun")]
    parents = {pid: int((machine.root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in found}
    (child,) = (pid for pid in found if parents[pid] in found)
    return parents[child], child


# ---------------------------------------------------------------- jobs


def test_a_batch_job_runs_on_all_nodes(slurm: Slurm, board: Path) -> None:
    assert slurm.states() == dict.fromkeys(("m2", "m3", "m4", "m5"), "idle")
    job = slurm.submit(f"srun -N4 hostname > {BOARD}/names; id -un > {BOARD}/user", "-N4", user=USER)
    job.wait("COMPLETED")
    assert sorted((board / "names").read_text().split()) == ["m2", "m3", "m4", "m5"]
    assert (board / "user").read_text() == f"{USER.name}\n"


def test_exclusive_jobs_share_no_node_and_others_do(slurm: Slurm) -> None:
    held = slurm.submit(SLEEPER, "-N3", "--exclusive")
    held.wait("RUNNING")
    free = next(name for name in slurm.nodes if name not in held.nodes())
    sharing = [slurm.submit(SLEEPER, "-n1") for _ in range(2)]
    for job in sharing:
        job.wait("RUNNING")
        assert job.nodes() == [free]
    waiting = slurm.submit(SLEEPER, "-N3", "--exclusive")
    wait_for("refusal for now", lambda: waiting.look("%T %r") == "PENDING Resources")
    held.cancel()
    waiting.wait("RUNNING")


@pytest.mark.parametrize("site", [Site(gpus=2, longest="02:00:00", usual="30:00")])
def test_a_site_has_its_own_gpus_and_time_limits(slurm: Slurm, board: Path) -> None:
    script = f"srun printenv CUDA_VISIBLE_DEVICES > {BOARD}/gpus"
    job = slurm.submit(script, "-N2", "--ntasks-per-node=1", "--gpus-per-node=2")
    job.wait("COMPLETED")
    assert (board / "gpus").read_text().split() == ["0,1", "0,1"]
    assert job.look("%l") == "30:00"
    assert "MaxTime=02:00:00" in slurm.run("scontrol", "show", "partition", "low").stdout


def test_the_users_comment_on_a_job_is_seen_by_all(slurm: Slurm) -> None:
    job = slurm.submit(SLEEPER, "-N1", "--comment=at first", user=USER)
    assert job.comment() == "at first"
    words = '{"roster": ["m2", "m3"], "generation": 7}'
    slurm.run("scontrol", "update", f"JobId={job.number}", f"Comment={words}", user=USER, at="m5")
    assert job.comment() == words


def test_a_job_of_a_higher_tier_takes_the_nodes_of_a_lower_one(slurm: Slurm, board: Path) -> None:
    (board / "task").write_text(OBEDIENT)
    low = slurm.submit(f"srun sh {BOARD}/task", "-N4", "--exclusive", "--ntasks-per-node=1", "-plow", user=USER)
    wait_files(board, "ready-*", 4)
    main = slurm.submit(SLEEPER, "-N4", "--exclusive", "-pmain", user=USER)
    main.wait("RUNNING")
    assert names_in(board, "asked-*") == [f"asked-{rank}" for rank in range(4)]
    assert low.look("%T %r") == "PENDING BeginTime"  # in the queue again, for about two minutes without a chance


@pytest.mark.parametrize("site", [Site(grace_s=600)])
def test_preemption_leaves_a_job_the_time_that_its_site_grants(slurm: Slurm, board: Path) -> None:
    (board / "task").write_text(OBEDIENT.replace("exit 0", ""))
    low = slurm.submit(f"srun sh {BOARD}/task", "-N4", "--exclusive", "--ntasks-per-node=1", "-plow", user=USER)
    wait_files(board, "ready-*", 4)
    main = slurm.submit(SLEEPER, "-N1", "--exclusive", "-pmain", user=USER)
    wait_files(board, "asked-*", 4)
    assert (low.state(), main.state()) == ("RUNNING", "PENDING")


def test_a_job_gets_a_satellite_from_within_itself(slurm: Slurm, board: Path) -> None:
    script = f"""
        salloc --no-shell -N1 -n1 --exclusive -J spare --comment="for $SLURM_JOB_ID"
        satellite=$(squeue -h -n spare -o %i)
        srun --jobid=$satellite --overlap -N1 -n1 hostname > {BOARD}/name
        srun --jobid=$satellite --overlap hostname 2> {BOARD}/refusal
        {SLEEPER}
    """
    main = slurm.submit(script, "-N3", "--exclusive", user=USER)
    wait_for("refusal", lambda: (board / "refusal").exists() and "\n" in (board / "refusal").read_text())
    (spare,) = set(slurm.nodes) - set(main.nodes())
    assert (board / "name").read_text() == f"{spare}\n"
    assert sorted(slurm.jobs()) == [f"{main.number} RUNNING m[2-4]", f"{main.number + 1} RUNNING {spare}"]
    assert Job(slurm, main.number + 1).comment() == f"for {main.number}"
    # The environment of the job speaks of its own nodes: srun has to be told how many the other has.
    assert "SLURM_JOB_NUM_NODES environment variable conflicts" in (board / "refusal").read_text()


# ---------------------------------------------------------------- nodes that leave


@pytest.mark.parametrize("site", [Site(lost_after_s=3)])
def test_a_job_lives_on_when_its_batch_node_and_another_lose_power(slurm: Slurm, board: Path) -> None:
    job = sleeping_job(slurm, 4, "--no-kill", srun="--no-kill -W0 -K0")
    tasks = {name: sleeps(slurm.nodes[name]) for name in ("m3", "m5")}
    assert job.batch_node() == "m2"
    slurm.cut_power("m4")
    slurm.cut_power("m2")
    for name in ("m4", "m2"):
        slurm.wait_state(name, "down*", deadline_s=60)
    wait_for("a smaller job", lambda: job.nodes() == ["m3", "m5"])
    assert job.state() == "RUNNING"
    assert {name: sleeps(slurm.nodes[name]) for name in tasks} == tasks  # its script and its srun went with m2
    slurm.power_on("m2")
    slurm.wait_state("m2", "idle")
    # What speaks for the job is gone, but it can have new steps, from anywhere.
    words = ["srun", f"--jobid={job.number}", "--overlap", "-N1", "-n1", "-wm5", "hostname"]
    assert slurm.run(*words, at="m2", user=USER).stdout == "m5\n"
    assert (job.state(), job.nodes()) == ("RUNNING", ["m3", "m5"])
    assert not (board / "srun-ended").exists()
    slurm.run("scancel", str(job.number), user=USER, at="m2")
    wait_for("end of its tasks", lambda: not any(sleeps(slurm.nodes[name]) for name in tasks))


def test_a_node_that_is_declared_down_leaves_its_job_at_once(slurm: Slurm) -> None:
    job = sleeping_job(slurm, 3, "--no-kill", srun="--no-kill -W0 -K0")
    slurm.cut_power("m3")
    slurm.update("m3", "DOWN")
    wait_for("a smaller job", lambda: job.nodes() == ["m2", "m4"], 5)
    assert job.state() == "RUNNING"
    assert sleeps(slurm.nodes["m4"])


def test_a_job_without_no_kill_ends_with_any_of_its_nodes(slurm: Slurm) -> None:
    job = sleeping_job(slurm, 3, "--no-requeue")
    slurm.cut_power("m3")
    slurm.update("m3", "DOWN")
    assert job.wait("NODE_FAIL", "CANCELLED", "FAILED", "COMPLETING")


def test_a_drained_node_keeps_its_job_and_comes_back(slurm: Slurm) -> None:
    job = sleeping_job(slurm, 2)
    for name in ("m3", "m5"):
        slurm.update(name, "DRAIN", "xid 79")
    slurm.wait_state("m3", "draining")
    slurm.wait_state("m5", "drained")
    assert (job.state(), job.nodes()) == ("RUNNING", ["m2", "m3"])
    with pytest.raises(MachineError, match="Invalid user id"):
        slurm.run("scontrol", "update", "NodeName=m5", "State=RESUME", user=USER)
    job.cancel()
    slurm.wait_state("m3", "drained")
    for name in ("m3", "m5"):
        slurm.update(name, "RESUME")
    slurm.wait_idle()


def test_an_ordinary_user_may_shrink_jobs_of_her_own(slurm: Slurm) -> None:
    others = slurm.submit(SLEEPER, "-N1", "--exclusive", "-wm5")
    others.wait("RUNNING")
    job = sleeping_job(slurm, 3, "--no-kill", srun="--no-kill -W0 -K0")
    tasks = {name: sleeps(slurm.nodes[name]) for name in ("m2", "m3")}
    slurm.run("scontrol", "update", f"JobId={job.number}", "NodeList=m2,m3", user=USER, at="m2")
    assert job.nodes() == ["m2", "m3"]
    wait_for("end of the task there", lambda: not in_jobs(slurm.nodes["m4"]))
    assert {name: sleeps(slurm.nodes[name]) for name in tasks} == tasks
    assert job.state() == "RUNNING"
    slurm.wait_state("m4", "idle")
    with pytest.raises(MachineError, match="Invalid user id"):
        slurm.run("scontrol", "update", f"JobId={others.number}", "Comment=mine", user=USER)


# ---------------------------------------------------------------- srun and its tasks


def reading_step(slurm: Slurm, board: Path) -> Job:
    """A job whose tasks have all read what srun passed them, and now note the signals that they get."""
    (board / "task").write_text(READER)
    (board / "secret").write_text("a secret\n")
    srun = f"srun --no-kill -W0 -K0 --input={BOARD}/secret sh {BOARD}/task"
    script = f"{srun}; echo $? > {BOARD}/srun-ended; {SLEEPER}"
    job = slurm.submit(script, "-N3", "--exclusive", "--ntasks-per-node=1", "--no-kill", user=USER)
    wait_files(board, "read-?", 3)
    return job


def readers(slurm: Slurm) -> list[str]:
    """Where such tasks run."""
    return [name for name, node in slurm.nodes.items() if f"sh {BOARD}/task" in " ".join(in_jobs(node).values())]


def test_srun_passes_its_input_to_all_tasks_and_its_death_ends_them(slurm: Slurm, board: Path) -> None:
    """Without a warning and in spite of --no-kill: srun's child sees it die, and cancels the step."""
    job = reading_step(slurm, board)
    assert [(board / name).read_text() for name in names_in(board, "read-?")] == ["a secret\n"] * 3
    srun, _ = sruns(slurm.nodes["m2"])
    slurm.run("kill", "-KILL", str(srun), at="m2")
    wait_for("end of all tasks", lambda: (board / "srun-ended").exists() and not readers(slurm), 10)
    assert (board / "srun-ended").read_text() == f"{128 + signal.SIGKILL}\n"
    assert names_in(board, "signals-*") == []
    assert (job.state(), len(job.nodes())) == ("RUNNING", 3)


def test_tasks_outlive_an_srun_that_dies_with_its_child(slurm: Slurm, board: Path) -> None:
    """As it is when their machine loses power: nobody is left to cancel the step."""
    job = reading_step(slurm, board)
    srun, child = sruns(slurm.nodes["m2"])
    slurm.run("kill", "-KILL", str(child), str(srun), at="m2")
    wait_for("the script's word", lambda: (board / "srun-ended").exists())
    probe = ["srun", f"--jobid={job.number}", "--overlap", "-N3", "-n3", "hostname"]
    assert sorted(slurm.run(*probe, user=USER).stdout.split()) == ["m2", "m3", "m4"]  # Slurm has had time to act
    assert readers(slurm) == ["m2", "m3", "m4"]
    assert names_in(board, "signals-*") == []


def test_tasks_print_on_into_files_of_their_own_when_their_srun_is_gone(slurm: Slurm, board: Path) -> None:
    """What they print through srun would stop them: about 1 MB after its machine has gone, nobody takes more."""
    (board / "task").write_text(PRINTER)
    srun = f"srun --no-kill -W0 -K0 --output={BOARD}/printed-%t sh {BOARD}/task"
    slurm.submit(srun, "-N3", "--exclusive", "--ntasks-per-node=1", "--no-kill", user=USER)
    wait_files(board, "ready-*", 3)
    slurm.cut_power("m2")
    (board / "go").touch()
    wait_files(board, "done-*", 2)


# ---------------------------------------------------------------- the harness itself


def test_nothing_is_left_of_a_slurm_when_its_block_ends(machines: Machines, tmp_path: Path) -> None:
    with Slurm(machines, tmp_path) as slurm:
        sleeping_job(slurm, 3, "--no-kill")
        slurm.submit("setsid sh -c 'trap \"\" TERM; sleep 1234; true' & sleep 1234", "-N1")
        wait_for("a job on the last node", lambda: len(sleeps(machines["m5"])) >= 2)
        slurm.cut_power("m3")
        machines["m4"].freeze()
    assert {machine.name: machine.pids() for machine in machines if machine.is_on} == {
        "m1": [],
        "m2": [],
        "m4": [],
        "m5": [],
    }


def test_the_ordinary_user_has_the_interpreter_and_the_repository(slurm: Slurm) -> None:
    code = "import os, torchrelay; print(os.getuid(), os.path.expanduser('~'))"
    said = slurm.run(sys.executable, "-c", code, at="m3", user=USER).stdout
    assert said == f"{USER.uid} {USER.home}\n"


def test_a_slurm_that_cannot_come_up_says_what_its_daemon_said(machines: Machines, tmp_path: Path) -> None:
    with (
        pytest.raises(MachineError, match=r"slurmctld on m1 ended with 1: .*Nonsense"),
        Slurm(machines, tmp_path, site=Site(more=("Nonsense=1",))),
    ):
        pass
    assert all(machine.pids() == [] for machine in machines)


def test_the_controller_is_no_node(machines: Machines, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="m2 controls"):
        Slurm(machines, tmp_path, controller="m2", nodes=("m2", "m3"))
