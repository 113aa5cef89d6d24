"""`torchrelay run --hosts`: one line on one machine starts a job on all of them, and ends it there, too."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import faulty
from tests.support.jobs import differences
from tests.support.machines.fleet import EVIDENCE, Fleet
from tests.support.machines.machines import Machines, obstacle, until
from tests.support.machines.sshd import no_ssh, open_doors
from tests.support.twins import undisturbed

WHY = obstacle() or no_ssh()
pytestmark = [pytest.mark.timeout(240), pytest.mark.skipif(bool(WHY), reason=WHY)]

SCRIPT = faulty("--steps", "80", "--pace", "0.1")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[Fleet, list[str]]]:
    """Three machines that reach one another by ssh, and the flag that says how."""
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    with Machines(3, shared={EVIDENCE: evidence}) as machines:
        ssh = open_doors(machines, tmp_path)
        yield Fleet(machines, tmp_path, evidence), ["--ssh", shlex.join(ssh), "--export", "TORCHRELAY_DIGESTS"]


def nothing_is_left(fleet: Fleet) -> bool:
    """Of the job, on any machine."""
    for machine in fleet.machines:
        for pid in machine.processes():
            words = Path(f"/proc/{pid}/cmdline")
            if words.exists() and b"torchrelay" in words.read_bytes():
                return False
    return True


def until_nothing_is_left(fleet: Fleet) -> None:
    for _ in until("all processes of the job end"):
        if nothing_is_left(fleet):
            return


def test_a_machine_is_cut_and_the_spare_one_takes_its_ranks(fleet: tuple[Fleet, list[str]]) -> None:
    job, ssh = fleet
    job.start(SCRIPT, ["--hosts", "m1,m2,m3", "--spare-nodes", "1", "--nproc-per-node", "2", *ssh])
    job.until("two warm spares", lambda: ((job.ask("status") or {}).get("spares") or {}).get("warm") == 2)
    job.until_steps(4)
    lost = next(name for name in (job.where(rank) for rank in range(4)) if name != "m1")
    job.machines[lost].cut_power()
    done = job.end()
    assert done.code == 0, done.output
    assert differences(done, undisturbed(SCRIPT)) == []
    (incident,) = done.incidents()
    assert (incident["resolution"], incident["steps_lost"]) == ("clean", 0)
    assert "[3] " in done.output or "[0] step 80" in done.output
    until_nothing_is_left(job)


def test_secrets_are_in_no_command_line_and_no_environment(fleet: tuple[Fleet, list[str]]) -> None:
    job, ssh = fleet
    job.start(SCRIPT, ["--hosts", "m2,m3", "--nproc-per-node", "1", *ssh])
    job.until_steps(2)
    secrets = [line for role in ("agent", "operator") for line in job.pass_text(role).splitlines() if len(line) > 40]
    for machine in job.machines:
        for pid in machine.processes():
            for what in ("cmdline", "environ"):
                told = Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace")
                assert not [secret for secret in secrets if secret in told], (machine.name, pid, what)
        logs = [path.read_text(errors="replace") for path in machine.path("/tmp").glob("**/*.log")]
        assert not [secret for secret in secrets if any(secret in log for log in logs)]
    job.head.signal(job.process, signal.SIGINT)
    assert job.end().code == 130
    until_nothing_is_left(job)


def test_ssh_ends_and_the_agent_goes_on_with_another_one_behind_it(fleet: tuple[Fleet, list[str]]) -> None:
    job, ssh = fleet
    job.start(SCRIPT, ["--hosts", "m2,m3", "--nproc-per-node", "2", *ssh])
    job.until_steps(4)
    for pid in agents_of(job, "ssh", "m2"):
        os.kill(pid, signal.SIGKILL)
    job.until("another one stands by", lambda: len(agents_of(job, "--join", "m2")) == 2)
    (first,) = [pid for pid in agents_of(job, "--join", "m2") if Path(f"/proc/{pid}/task/{pid}/children").read_text()]
    os.kill(first, signal.SIGKILL)
    log = job.head.path("/tmp/run/logs/agent-m2.log")
    job.until("it takes over", lambda: log.read_text().count("attached to") == 2)
    done = job.end()
    assert done.code == 0, done.output
    assert differences(done, undisturbed(SCRIPT)) == []
    assert done.incidents() == []
    until_nothing_is_left(job)


def agents_of(job: Fleet, word: str, node: str) -> list[int]:
    """Processes of ssh on the launcher's machine, or of agents on their own."""
    machine = job.head if word == "ssh" else job.machines[node]
    found = []
    for pid in machine.processes():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        mine = words[0] == b"ssh" if word == "ssh" else b"--join" in words
        if mine and any(node.encode() in one for one in words):
            found.append(pid)
    return found


def test_a_host_that_does_not_answer_is_named_and_nothing_is_left(fleet: tuple[Fleet, list[str]]) -> None:
    job, ssh = fleet
    job.machines["m3"].cut_power()
    job.start(SCRIPT, ["--hosts", "m2,m3", "--nproc-per-node", "1", *ssh])
    assert job.process.wait(120) == 94
    assert "m3" in job.said()
    assert "No route to host" in job.said() or "timed out" in job.said()
    until_nothing_is_left(job)
