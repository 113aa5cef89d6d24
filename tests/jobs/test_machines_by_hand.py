"""A job over machines that share nothing, whose agents somebody starts by hand: they come and go, the bits stay."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.faults import faulty
from tests.support.jobs import differences, wait_until
from tests.support.machines.fleet import CLI, EVIDENCE, PORT, RUN_DIR, Fleet, at, words_of
from tests.support.machines.harness import Machines
from tests.support.machines.machine import Machine
from tests.support.machines.needs import needs_machines
from tests.support.twins import undisturbed
from torchrelay.wire.trust.authority import make_passes
from torchrelay.wire.trust.passes import Role

pytestmark = [pytest.mark.timeout(240), needs_machines]

SCRIPT = faulty("--steps", "100", "--pace", "0.1")
MARK = "a text that nobody else on this link would say"
ETH_P_ALL, SO_RCVBUFFORCE, SOL_PACKET, PACKET_STATISTICS = 3, 33, 263, 6  # of Linux, and not in Python's socket
FLAGS = ["--by-hand", "--nnodes", "2", "--nproc-per-node", "2", "--spare-nodes", "1"]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Four machines: the launcher's, two of ranks, and a spare one."""
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    with Machines(4, shared={EVIDENCE: evidence}) as machines:
        yield Fleet(machines, tmp_path, evidence)


def begun(fleet: Fleet) -> None:
    """It trains, with a warm spare."""
    fleet.start(SCRIPT, FLAGS)
    fleet.join("m2", "m3", "m4")
    fleet.until("two warm spares", lambda: ((fleet.ask("status") or {}).get("spares") or {}).get("warm") == 2)
    fleet.until_steps(4)


def test_a_machine_without_power_is_replaced_and_nothing_is_lost(fleet: Fleet) -> None:
    begun(fleet)
    lost = fleet.where(0)
    fleet.machines[lost].cut_power()
    done = fleet.end()
    assert done.code == 0, done.output
    assert differences(done, undisturbed(SCRIPT)) == []
    (incident,) = done.incidents()
    assert incident["resolution"] == "clean"
    assert incident["steps_lost"] == 0
    assert set(fleet.agents_end().values()) == {0}
    assert "[0] step 100" in done.output


def test_a_machine_that_was_cut_off_comes_back_and_its_old_workers_end(fleet: Fleet) -> None:
    begun(fleet)
    lost = fleet.where(2)
    fleet.machines[lost].cut_link()
    fleet.until(
        "the incident is over",
        lambda: [one for one in fleet.ask("incidents") or () if one["resolution"]],
        deadline_s=40,
    )
    fleet.machines[lost].mend_link()
    done = fleet.end()
    assert done.code == 0, done.output
    assert differences(done, undisturbed(SCRIPT)) == []
    assert [one["steps_lost"] for one in done.incidents()] == [0]
    assert set(fleet.agents_end().values()) == {0}


def test_a_rank_is_killed_and_its_agent_is_started_again(fleet: Fleet) -> None:
    begun(fleet)
    node = fleet.where(1)
    fleet.agents[node].kill()
    fleet.agents.pop(node).wait(10)
    fleet.join(node)
    fleet.until("its agent is back", lambda: "attached to" in fleet.said(node).rpartition("joins")[2])
    done = fleet.end()
    assert done.code == 0, done.output
    assert done.output.count("[0] step 50 ") == 1, "lines come once, although another agent reads the logs"
    assert differences(done, undisturbed(SCRIPT)) == []
    assert done.incidents() == []


def test_the_orchestrator_is_killed_and_restarted_and_nobody_notices(fleet: Fleet) -> None:
    begun(fleet)
    before = fleet.ask("status", "--job", "faulty")["lease"]
    words = [*CLI, "restart-services", "--run-dir", RUN_DIR, "--yes"]
    refused = fleet.head.run(words, check=False)
    assert refused.returncode == 2
    assert "--orchestrator restarts what is here" in refused.stderr
    done = fleet.head.run([*words, "--orchestrator"], check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    (pid,) = [pid for pid in fleet.head.pids() if "torchrelay.orchestrator" in words_of(fleet.head, pid)]
    fleet.head.run(["kill", "-9", str(pid)])
    fleet.until("it is back twice", lambda: (fleet.ask("status") or {}).get("lease", 0) >= before + 2)
    lost = fleet.where(3)
    fleet.machines[lost].cut_power()
    ended = fleet.end()
    assert ended.code == 0, ended.output
    assert differences(ended, undisturbed(SCRIPT)) == []
    assert [one["steps_lost"] for one in ended.incidents()] == [0]


class TestStrangers:
    """Whoever has no pass of this job, or one for less than it wants, is refused and harms nothing."""

    def test_none_of_them_is_let_in_and_the_job_is_undisturbed(self, fleet: Fleet, tmp_path: Path) -> None:
        begun(fleet)
        head, m4 = fleet.head, fleet.machines["m4"]
        url = f"https://{head.address}:{PORT}"
        others = make_passes(tmp_path / "other", "faulty")
        viewer = fleet.hand_pass(m4, fleet.pass_text("viewer"), "viewer.pem")
        agent = fleet.hand_pass(m4, fleet.pass_text("agent"), "as-agent.pem")
        wrong = fleet.hand_pass(m4, others[Role.AGENT].read_text(), "wrong.pem")

        def tried(*words: str) -> subprocess.CompletedProcess[str]:
            return m4.run([*CLI, *words], check=False)

        looked = tried("status", "--url", url, "--ca", viewer)
        assert "running" in looked.stdout, looked.stderr
        changed = tried("drain", "m2", "--url", url, "--ca", viewer, "--yes")
        assert changed.returncode != 0
        assert "needs the operator's pass" in changed.stderr
        looked = tried("status", "--url", url, "--ca", agent)
        assert looked.returncode != 0
        assert "needs the viewer's pass" in looked.stderr

        for _ in range(3):
            joined = tried("agent", "--join", url, "--token-file", wrong, "--node", "stranger", "--patience", "1")
            assert joined.returncode == 94
            assert "not this job's orchestrator" in joined.stderr
        posing = tried("agent", "--join", url, "--token-file", viewer, "--node", "posing", "--patience", "1")
        assert posing.returncode == 94
        assert "use the run's passes/agent.pem" in posing.stderr
        for scheme in ("https", "http"):
            words = ["curl", "-sk", "--max-time", "5", f"{scheme}://{head.address}:{PORT}/v1/status"]
            assert m4.run(words, check=False).returncode != 0

        log = at(head, "/tmp/run/logs/orchestrator.log")
        wait_until("it is logged", lambda: "no certificate of this job" in log.read_text(), deadline_s=10)
        assert log.read_text().count("no certificate of this job") == 1, "once for a host"
        assert log.read_text().count("needs the operator's pass") == 1
        done = fleet.end()
        assert done.code == 0, done.output
        assert done.incidents() == []
        assert differences(done, undisturbed(SCRIPT)) == []


class Listener:
    """Hears every frame on a machine's link, as whoever owns the switch could."""

    def __init__(self, machine: Machine) -> None:
        with machine.network():
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
        self._socket.bind(("eth0", 0))
        self._socket.settimeout(0.2)
        self._over = threading.Event()
        self.frames: list[bytes] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        while not self._over.is_set():
            try:
                self.frames.append(self._socket.recv(1 << 17))
            except TimeoutError:
                continue
            except OSError:
                return  # the machine is gone, and its link with it

    def heard(self, text: bytes) -> int:
        """In how many frames it stands."""
        return sum(text in frame for frame in list(self.frames))

    def lost(self) -> int:
        """Frames for which there was no room."""
        told = self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
        return int(struct.unpack("II", told)[1])

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)
        self._socket.close()


@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["encrypted", "plain"])
def test_who_listens_on_the_link_reads_states_only_with_plain_transfer(fleet: Fleet, plain: bool) -> None:
    script = [*SCRIPT, "--mark", MARK]
    fleet.start(script, [*FLAGS, *(["--plain-transfer"] if plain else [])])
    fleet.join("m2", "m3", "m4")
    fleet.until("two warm spares", lambda: ((fleet.ask("status") or {}).get("spares") or {}).get("warm") == 2)
    fleet.until_steps(4)
    lost = fleet.where(0)
    with ExitStack() as stack:
        listeners = [Listener(fleet.machines[name]) for name in sorted({"m2", "m3", "m4"} - {lost})]
        for one in listeners:
            stack.callback(one.close)
        fleet.machines[lost].cut_power()
        done = fleet.end()
        heard = [one.heard(MARK.encode()) for one in listeners]
        assert all(one.lost() == 0 for one in listeners)
        assert all(len(one.frames) > 100 for one in listeners)
    assert done.code == 0, done.output
    assert differences(done, undisturbed(script)) == []
    (incident,) = done.incidents()
    assert incident["steps_lost"] == 0
    assert all(heard) if plain else not any(heard), f"frames with it, on who took and who gave: {heard}"
    assert ("states and records go between machines unencrypted" in done.output) is plain


def test_what_is_not_as_on_the_other_machines_is_said_before_anything_is_trained(fleet: Fleet) -> None:
    fleet.start(["/root/train.py"], FLAGS)
    assert fleet.process.wait(20) == 2
    assert "script not found" in fleet.said()
    at(fleet.head, "/root/train.py").write_text("print('never run')\n")
    fleet.start(["/root/train.py"], FLAGS)
    fleet.join("m2")
    assert fleet.agents["m2"].wait(20) == 94
    assert "/root/train.py is not on this machine: copy it to the same path" in fleet.said("m2")
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.end().code == 130


@pytest.mark.soak
def test_agents_without_orchestrator_end_when_nothing_is_trained_any_more(fleet: Fleet) -> None:
    fleet.start(SCRIPT, FLAGS)
    fleet.join("m2", "m3", flags=["--forsaken", "3"])
    fleet.until_steps(4)
    fleet.head.cut_power()
    assert set(fleet.agents_end().values()) == {0}
    assert "no orchestrator was heard, and no step was made, for 3 s" in fleet.said("m2")
    for name in ("m2", "m3"):
        assert fleet.machines[name].pids() == []
    steps = (fleet.evidence / "rank-0.jsonl").read_text().count("\n")
    assert steps > 100, "the ranks trained to their end without it"


def test_another_torch_is_refused_and_another_script_is_said(fleet: Fleet) -> None:
    at(fleet.head, "/root/train.py").write_text("import time\ntime.sleep(600)\n")
    fleet.start(["/root/train.py"], FLAGS)
    for name, text in (("m2", "import time\ntime.sleep(600)\n"), ("m3", "import time\ntime.sleep(601)\n"), ("m4", "")):
        at(fleet.machines[name], "/root/train.py").write_text(text)
    other = at(fleet.machines["m4"], "/root/site/torch-1.0.dist-info")
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    fleet.join("m2")
    fleet.until("m2 is attached", lambda: "attached to" in fleet.said("m2"))
    fleet.join("m3")
    fleet.until("the difference is said", lambda: "on m3 and" in fleet.said())
    assert "script is" in fleet.said()
    fleet.join("m4", env={"PYTHONPATH": "/root/site"})
    assert fleet.agents["m4"].wait(30) == 94
    assert "torch is 1.0 on m4 and 2.13" in fleet.said("m4")
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.end().code == 130


def test_an_agent_says_what_it_waits_for_and_gives_up(fleet: Fleet, tmp_path: Path) -> None:
    held = make_passes(tmp_path / "other", "faulty")[Role.AGENT].read_text()
    fleet.join("m2", held=held, flags=["--patience", "2"])
    assert fleet.agents["m2"].wait(20) == 94
    said = fleet.said("m2")
    assert f"waiting for the orchestrator at {fleet.head.address}:{PORT}" in said
    assert "has not answered for 2 s" in said
