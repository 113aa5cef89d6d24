"""`torchrelay run --hosts`: one line on one machine starts a job on all of them, and ends it there, too."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults import faulty
from tests.support.jobs import differences, wait_until
from tests.support.machines.fleet import EVIDENCE, Fleet, at, words_of
from tests.support.machines.harness import Machines
from tests.support.machines.machine import Machine
from tests.support.machines.needs import needs_sshd
from tests.support.twins import undisturbed

pytestmark = [pytest.mark.timeout(240), needs_sshd]

SCRIPT = faulty("--steps", "80", "--pace", "0.1")


EXPORT = ["--export", "TORCHRELAY_DIGESTS"]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Fleet]:
    """Three machines that reach one another by ssh."""
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    with Machines(3, shared={EVIDENCE: evidence}) as machines:
        for machine in machines:
            machine.start_sshd()
        yield Fleet(machines, tmp_path, evidence)


def nothing_is_left(job: Fleet) -> bool:
    """Of the job, on any machine."""
    running = (words_of(machine, pid) for machine in job.machines if machine.is_on for pid in machine.pids())
    return not any("torchrelay" in word for words in running for word in words)


def until_nothing_is_left(job: Fleet) -> None:
    try:
        wait_until("all processes of the job end", lambda: nothing_is_left(job), deadline_s=30)
    except AssertionError as error:
        left = [(machine.name, pid, words_of(machine, pid)) for machine in job.machines for pid in machine.pids()]
        logs = at(job.head, "/tmp/run/logs").glob("agent-*.log")
        raise AssertionError(f"{error}\n{left}\n{[log.read_text()[-2000:] for log in logs]}") from error


def test_a_machine_is_cut_and_the_spare_one_takes_its_ranks(job: Fleet) -> None:
    job.start(SCRIPT, ["--hosts", "m1,m2,m3", "--spare-nodes", "1", "--nproc-per-node", "2", *EXPORT])
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


def test_secrets_are_in_no_command_line_and_no_environment(job: Fleet) -> None:
    job.start(SCRIPT, ["--hosts", "m2,m3", "--nproc-per-node", "1", *EXPORT])
    job.until_steps(2)
    secrets = [line for role in ("agent", "operator") for line in job.pass_text(role).splitlines() if len(line) > 40]
    for machine in job.machines:
        for pid in machine.pids():
            for what in ("cmdline", "environ"):
                told = at(machine, f"/proc/{pid}/{what}").read_bytes().decode(errors="replace")
                assert not [secret for secret in secrets if secret in told], (machine.name, pid, what)
        logs = [path.read_text(errors="replace") for path in at(machine, "/tmp").glob("**/*.log")]
        assert not [secret for secret in secrets if any(secret in log for log in logs)]
    job.process.send_signal(signal.SIGINT)
    assert job.end().code == 130
    until_nothing_is_left(job)


def test_ssh_ends_and_the_agent_goes_on_with_another_one_behind_it(job: Fleet) -> None:
    job.start(SCRIPT, ["--hosts", "m2,m3", "--nproc-per-node", "2", *EXPORT])
    job.until_steps(4)
    kill(job.head, [pid for pid in job.head.pids() if {"ssh", "m2"} <= set(words_of(job.head, pid))])
    m2 = job.machines["m2"]
    job.until("another one stands by", lambda: len(agents_on(m2)) == 2)
    kill(m2, [pid for pid in agents_on(m2) if at(m2, f"/proc/{pid}/task/{pid}/children").read_text()])
    log = at(job.head, "/tmp/run/logs/agent-m2.log")
    job.until("it takes over", lambda: log.read_text().count("attached to") == 2)
    done = job.end()
    assert done.code == 0, done.output
    assert differences(done, undisturbed(SCRIPT)) == []
    assert done.incidents() == []
    assert repeated(done.output) == [], "lines come once, although another agent reads the logs"
    until_nothing_is_left(job)


STUBBORN = """import signal, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("trouble", ["none", "orchestrator", "ssh"])
def test_a_second_ctrl_c_ends_ranks_that_ignore_the_first_on_all_machines(job: Fleet, trouble: str) -> None:
    """Also when the orchestrator hears nothing, and when the ssh that started an agent is there no more."""
    for machine in job.machines:
        at(machine, "/root/stubborn.py").write_text(STUBBORN)
    job.start(["/root/stubborn.py"], ["--hosts", "m2,m3", "--nproc-per-node", "1"])
    job.until("both ranks run", lambda: job.said().count("] deaf") == 2)
    if trouble == "orchestrator":
        kill(job.head, [pid for pid in job.head.pids() if "torchrelay.orchestrator" in words_of(job.head, pid)], "STOP")
    if trouble == "ssh":
        kill(job.head, [pid for pid in job.head.pids() if {"ssh", "m2"} <= set(words_of(job.head, pid))])
        job.until("another one stands by", lambda: len(agents_on(job.machines["m2"])) == 2)
    job.process.send_signal(signal.SIGINT)
    wait_until("the first one is heard", lambda: "stopping (SIGINT)" in job.said(), deadline_s=10)
    job.process.send_signal(signal.SIGINT)
    assert job.end().code == 130
    until_nothing_is_left(job)


def repeated(output: str) -> list[str]:
    """What ranks have printed more than once."""
    lines = Counter(line for line in output.splitlines() if re.match(r"\[\d+\] step \d+ ", line))
    assert lines
    return [line for line, times in lines.items() if times > 1]


def agents_on(machine: Machine) -> list[int]:
    return [pid for pid in machine.pids() if "--join" in words_of(machine, pid)]


def kill(machine: Machine, pids: list[int], number: str = "KILL") -> None:
    assert len(pids) == 1
    machine.run(["kill", f"-{number}", str(pids[0])])


def test_a_host_that_does_not_answer_is_named_and_nothing_is_left(job: Fleet) -> None:
    job.machines["m3"].cut_power()
    job.start(SCRIPT, ["--hosts", "m2,m3", "--nproc-per-node", "1", *EXPORT])
    assert job.process.wait(120) == 94
    assert "m3" in job.said()
    assert "No route to host" in job.said() or "timed out" in job.said()
    until_nothing_is_left(job)
