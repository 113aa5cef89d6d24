"""Pretended machines are what they say they are, else every test on them would prove nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines.machines import Machine, Machines, obstacle, until
from tests.support.machines.switch import NAMESPACES, PREFIX

pytestmark = pytest.mark.skipif(bool(obstacle()), reason=obstacle())

LISTEN = """
import socket, sys
server = socket.create_server(("0.0.0.0", 4000)); print("listening", flush=True)
end, _ = server.accept()
while data := end.recv(100): print(data.decode(), flush=True)
print("closed", flush=True)
"""
TALK = """
import socket, sys
end = socket.create_connection((sys.argv[1], 4000), 10)
print("connected", flush=True)
for line in sys.stdin: end.sendall(line.strip().encode())
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with Machines(4) as found:
        yield found


@pytest.fixture
def whole(machines: Machines) -> Machines:
    """All of them on, and connected."""
    for machine in machines:
        if not machine.pid:
            machine.power_on()
    machines.heal()
    return machines


def reaches(one: Machine, other: Machine) -> bool:
    code = f"import socket; socket.create_connection(({other.address!r}, 9), 0.5)"
    return "refused" in one.run([sys.executable, "-c", code]).stderr


def test_each_has_a_name_an_address_processes_and_files_of_its_own(whole: Machines) -> None:
    m1, m2 = whole["m1"], whole["m2"]
    assert (m1.run(["hostname"]).stdout, m2.run(["hostname"]).stdout) == ("m1\n", "m2\n")
    for place in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/root"):
        m1.path(f"{place}/mine").write_text("m1")
        assert m1.run(["cat", f"{place}/mine"]).stdout == "m1"
        assert not m2.path(f"{place}/mine").exists()
        assert not Path(f"{place}/mine").exists()
    assert m1.run(["sh", "-c", "ls -d /proc/[0-9]* | wc -l"]).stdout.strip() in ("3", "4", "5")
    assert m1.run(["sh", "-c", "ip -o -4 addr show eth0"]).stdout.split()[3] == f"{m1.address}/16"
    assert m1.run(["getent", "hosts", "m2"]).stdout.split()[0] == m2.address


def test_what_is_installed_is_there_and_cannot_be_changed(whole: Machines) -> None:
    found = whole["m1"].run([sys.executable, "-c", "import torchrelay; print(torchrelay.__file__)"])
    assert found.stdout.strip().endswith("__init__.py"), found.stderr
    for place in (Path(__file__).parent, Path("/etc"), Path("/usr")):
        assert "Read-only" in whole["m1"].run(["touch", str(place / "new")]).stderr


def test_a_folder_is_shared_if_a_test_asks_for_it(tmp_path: Path) -> None:
    with Machines(2, shared={"/shared": tmp_path} if os.path.isdir("/shared") else {"/mnt/shared": tmp_path}) as two:
        place = "/shared" if os.path.isdir("/shared") else "/mnt/shared"
        assert two["m1"].run(["sh", "-c", f"echo here > {place}/file"]).returncode == 0
        assert two["m2"].run(["cat", f"{place}/file"]).stdout == "here\n"
    assert (tmp_path / "file").read_text() == "here\n"


def test_they_reach_one_another_unless_the_switch_is_split(whole: Machines) -> None:
    m1, m2, m3, m4 = whole
    assert reaches(m1, m2)
    assert reaches(m1, m4)
    whole.partition(("m1", "m2"), ("m3", "m4"))
    assert reaches(m1, m2)
    assert reaches(m3, m4)
    assert not reaches(m1, m3)
    whole.heal()
    assert reaches(m1, m3)


class Talk:
    """A connection from one machine to another."""

    def __init__(self, speaks: Machine, listens: Machine) -> None:
        self.listener = listens.popen([sys.executable, "-uc", LISTEN], stdout=subprocess.PIPE)
        assert self.listener.stdout is not None
        self.heard = self.listener.stdout
        os.set_blocking(self.heard.fileno(), True)
        assert self.heard.readline() == "listening\n"
        self.speaker = subprocess.Popen(
            speaks.command([sys.executable, "-uc", TALK, listens.address]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.speaker.stdout is not None
        assert self.speaker.stdout.readline() == "connected\n"

    def say(self, word: str) -> None:
        assert self.speaker.stdin is not None
        self.speaker.stdin.write(word + "\n")
        self.speaker.stdin.flush()

    def hears(self, within_s: float) -> str:
        """The next line; empty if none comes."""
        os.set_blocking(self.heard.fileno(), False)
        try:
            for _ in until("nothing", deadline_s=within_s):
                if line := self.heard.readline():
                    return line.strip()
        except TimeoutError:
            pass
        return ""

    def end(self) -> None:
        for process in (self.speaker, self.listener):
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def test_a_cut_link_is_silent_and_what_was_said_arrives_when_it_is_mended(whole: Machines) -> None:
    talk = Talk(whole["m1"], whole["m2"])
    talk.say("before")
    assert talk.hears(5) == "before"
    whole["m1"].cut_link()
    talk.say("meanwhile")
    assert talk.hears(0.5) == ""
    whole["m1"].mend_link()
    assert talk.hears(10) == "meanwhile"
    talk.end()


def test_a_power_cut_is_silent_and_leaves_nothing(whole: Machines) -> None:
    m1 = whole["m1"]
    m1.path("/tmp/mine").write_text("gone soon")
    talk = Talk(m1, whole["m2"])
    talk.say("before")
    assert talk.hears(5) == "before"
    m1.cut_power()
    assert m1.processes() == []
    assert talk.hears(0.5) == "", "the other end was told"
    talk.end()
    m1.power_on()
    assert not m1.path("/tmp/mine").exists()
    assert reaches(m1, whole["m2"])


def test_frozen_it_does_nothing_and_then_goes_on(whole: Machines) -> None:
    m3 = whole["m3"]
    counting = m3.popen(
        ["sh", "-c", "n=0; while true; do n=$((n+1)); echo $n > /tmp/n.new; mv /tmp/n.new /tmp/n; sleep 0.01; done"]
    )
    count = m3.path("/tmp/n")
    for _ in until("it counts"):
        if count.exists():
            break
    m3.freeze()
    before = count.read_text()
    assert all(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZ" for pid in m3.processes())
    assert count.read_text() == before
    m3.thaw()
    for _ in until("it counts again"):
        if count.read_text() not in (before, ""):
            break
    m3.signal(counting, signal.SIGKILL)
    counting.wait(10)


def test_signals_go_in_and_exit_codes_come_out(whole: Machines) -> None:
    m2 = whole["m2"]
    assert m2.run(["sh", "-c", "exit 7"]).returncode == 7
    waiting = m2.popen(
        [
            sys.executable,
            "-c",
            "import signal, sys; signal.signal(15, lambda *_: sys.exit(9)); open('/tmp/up', 'w'); signal.pause()",
        ]
    )
    for _ in until("it is up"):
        if m2.path("/tmp/up").exists():
            break
    m2.signal(waiting, signal.SIGTERM)
    assert waiting.wait(10) == 9


LEFT = """
import os, sys
from tests.support.machines.machines import Machines
with Machines(2) as machines:
    print(*[machine.pid for machine in machines], flush=True)
    if sys.argv[1] == "end":
        sys.exit(0)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("how", ["end", "killed"])
def test_nothing_is_left_however_the_test_ends(how: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LEFT, how], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as other:
        told, _ = other.communicate(timeout=30)
    for pid in told.split():
        for _ in until(f"{pid} is there still"):
            if not Path(f"/proc/{pid}").exists():
                break
    with Machines(1):  # removes what a killed one has left
        names = [path.name for path in NAMESPACES.glob(f"{PREFIX}{other.pid}-*")]
    assert names == []
