"""Machines of the harness: each for itself, cut off in silence, without power, stopped, and gone without a trace."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines.harness import Machines
from tests.support.machines.machine import Machine
from tests.support.machines.needs import needs_machines, needs_sshd
from tests.support.machines.process import Process
from tests.support.machines.waiting import MachineError, wait_for
from tests.support.processes import Seen

pytestmark = needs_machines

PORT = 5000
KINDS = ("net", "mnt", "pid", "uts", "ipc")
ESTABLISHED = 1  # of TCP
# Connects, says so, and then sends each line that it is given.
SENDER = f"""
import socket, sys
there = socket.create_connection((sys.argv[1], {PORT}))
print("connected", flush=True)
for line in sys.stdin:
    there.sendall(line.encode())
"""
# Whatever it starts ends at once, or starts the next one: there is always one that has just come.
FORKING = """
import os
print("forking", flush=True)
while True:
    pid = os.fork()
    if pid:
        os._exit(0)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: exit(7))
print("ready", flush=True)
signal.pause()
"""
# A harness of two machines in a process of its own: says the ids of all its processes, and waits.
HARNESS = """
import signal
from tests.support.machines.harness import Machines
with Machines(2) as machines:
    sleeper = machines["m1"].popen(["sleep", "1000"])
    print(machines.keeper.pid, *(machine.pid for machine in machines), sleeper.pid, flush=True)
    signal.pause()
"""


@pytest.fixture(scope="module")
def kept() -> Iterator[Machines]:
    with Machines(4) as found:
        yield found


@pytest.fixture
def machines(kept: Machines) -> Machines:
    """All have just been switched on, whatever the last test has done to them."""
    kept.heal()
    for machine in kept:
        machine.mend_link()
        if machine.is_on:
            machine.cut_power()
        machine.power_on()
    return kept


def listener_on(machine: Machine) -> socket.socket:
    server = machine.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("", PORT))
    server.listen()
    server.settimeout(20)
    return server


def accepted(listener: socket.socket) -> socket.socket:
    connection, _ = listener.accept()
    connection.settimeout(20)
    return connection


def connected(here: Machine, there: Machine, listener: socket.socket) -> tuple[socket.socket, socket.socket]:
    """A TCP connection between two machines, both ends in the hand of the test."""
    client = here.socket()
    client.settimeout(20)
    client.connect((there.address, PORT))
    return client, accepted(listener)


def sender_on(machine: Machine, there: Machine, listener: socket.socket) -> tuple[Process, socket.socket]:
    """A process that has connected from that machine, and the test's end of the connection."""
    command = [sys.executable, "-c", SENDER, there.name]
    process = machine.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    connection = accepted(listener)
    assert process.stdout is not None
    assert process.stdout.readline() == "connected\n"
    return process, connection


def is_silent(connection: socket.socket) -> bool:
    """Neither data nor an end has come: for TCP it still stands."""
    state: int = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state == ESTABLISHED and not select.select([connection], [], [], 0)[0]


def sends_in_vain(connection: socket.socket) -> bool:
    """Whether TCP has sent the same again, as it has heard nothing."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[2] >= 1


def namespaces_of(pid: int) -> list[str]:
    return [os.readlink(f"/proc/{pid}/ns/{kind}") for kind in KINDS]


def in_namespaces(names: list[str]) -> list[int]:
    """All processes that are in one of these."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            held = namespaces_of(int(path.name))
        except OSError:
            continue  # it has ended
        if set(held) & set(names):
            found.append(int(path.name))
    return found


def gone(seen: list[Seen]) -> bool:
    return not any(process.is_alive() for process in seen)


def first_line(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_each_machine_has_name_address_and_processes_of_its_own(machines: Machines) -> None:
    assert len({machine.address for machine in machines}) == 4
    for machine in machines:
        assert machine.run(["hostname"]).stdout == f"{machine.name}\n"
        assert machine.run(["cat", "/etc/hostname"]).stdout == f"{machine.name}\n"
        assert f"inet {machine.address}/24" in machine.run(["ip", "-4", "addr", "show", "eth0"]).stdout
        assert machine.run(["ls", "/sys/class/net"]).stdout.split() == ["eth0", "lo"]
        assert machine.pids() == []
        looked_up = machine.run(["getent", "ahostsv4", "m3"]).stdout
        assert looked_up.split()[0] == machines["m3"].address
    every = [name for machine in machines for name in namespaces_of(machine.pid)]
    assert len({*every, *namespaces_of(os.getpid())}) == len(every) + len(KINDS)


def test_two_harnesses_live_side_by_side(machines: Machines) -> None:
    with Machines(1) as others:
        assert others[0].address not in {machine.address for machine in machines}
        assert others[0].run(["hostname"]).stdout == machines[0].run(["hostname"]).stdout
        assert machines[1].run(["getent", "hosts", "m1"]).stdout.split()[0] == machines[0].address


def test_a_machine_reads_the_host_and_writes_only_what_is_its_own(machines: Machines) -> None:
    m1, m2 = machines["m1"], machines["m2"]
    for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run", "/root"):
        m1.run(["sh", "-c", f"echo here > {folder}/trace"])
        assert (m1.root / folder.lstrip("/") / "trace").read_text() == "here\n"
        assert not (m2.root / folder.lstrip("/") / "trace").exists()
        assert not Path(folder, "trace").exists()
    repository = Path(__file__).parents[2]
    for folder in ("/", "/usr", "/etc", str(repository), sys.prefix):
        done = m1.run(["touch", f"{folder}/trace"], check=False)
        assert "Read-only file system" in done.stderr
    done = m1.run([sys.executable, "-c", "import torchrelay; print(torchrelay.__file__)"])
    assert Path(done.stdout.strip()).is_file()


def test_a_process_has_the_environment_of_its_machine(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setenv("PYTHONPATH", "/kept")
    said = machines[0].run(["env"], env={"MORE": "1"}).stdout.splitlines()
    assert {"HOME=/root", "PYTHONDONTWRITEBYTECODE=1", "PYTHONPATH=/kept", "MORE=1"} <= set(said)
    assert not any(line.startswith("TMPDIR") for line in said)


def test_what_is_shared_is_shared_and_each_link_has_its_net(tmp_path: Path) -> None:
    with Machines(2, links=2, shared={"/shared": tmp_path, "/root/deep/er": tmp_path}) as (m1, m2):
        m1.run(["sh", "-c", "echo words > /shared/file"])
        assert m2.run(["cat", "/root/deep/er/file"]).stdout == (tmp_path / "file").read_text() == "words\n"
        with listener_on(m2) as listener:
            client = m1.socket()
            client.settimeout(20)
            client.connect((m2.addresses[1], PORT))
            there = accepted(listener)
            assert there.getpeername()[0] == m1.addresses[1]
            m1.cut_link(0)
            client.sendall(b"over the other")
            assert there.recv(100) == b"over the other"
            client.close()
            there.close()


def test_a_cut_link_is_silent_and_a_mended_one_delivers(machines: Machines) -> None:
    m1, m2, *_ = machines
    with listener_on(m2) as listener:
        client, server = connected(m1, m2, listener)
        with client, server:
            m1.cut_link()
            assert "LOWER_UP" in m1.run(["ip", "link", "show", "eth0"]).stdout
            client.sendall(b"lost as yet")
            wait_for("packets sent in vain", lambda: sends_in_vain(client))
            assert is_silent(client)
            assert is_silent(server)
            m1.mend_link()
            assert server.recv(100) == b"lost as yet"
            server.sendall(b"and back")
            assert client.recv(100) == b"and back"


def test_a_pulled_cable_is_seen_by_its_machine_only(machines: Machines) -> None:
    m1, m2, *_ = machines
    m1.cut_link(carrier=False)
    assert "NO-CARRIER" in m1.run(["ip", "link", "show", "eth0"]).stdout
    assert "NO-CARRIER" not in m2.run(["ip", "link", "show", "eth0"]).stdout
    m1.mend_link()
    assert "NO-CARRIER" not in m1.run(["ip", "link", "show", "eth0"]).stdout


def test_a_partition_parts_halves_in_silence_and_is_healed(machines: Machines) -> None:
    m1, m2, m3, _ = machines
    with listener_on(m2) as near, listener_on(m3) as far:
        here, beside = connected(m1, m2, near)
        over, away = connected(m1, m3, far)
        with here, beside, over, away:
            machines.partition(("m1", "m2"), ("m3", "m4"))
            here.sendall(b"near")
            over.sendall(b"far")
            assert beside.recv(100) == b"near"
            wait_for("packets sent in vain", lambda: sends_in_vain(over))
            assert is_silent(away)
            machines.heal()
            assert away.recv(100) == b"far"


def test_a_partition_names_each_machine_once(machines: Machines) -> None:
    with pytest.raises(ValueError, match="names each machine once"):
        machines.partition(("m1", "m2"), ("m3",))


def test_a_power_cut_ends_all_processes_and_the_others_hear_nothing(machines: Machines) -> None:
    m1, m2, m3, _ = machines
    with listener_on(m2) as listener:
        process, connection = sender_on(m1, m2, listener)
        killed, ended = sender_on(m3, m2, listener)
        with connection, ended, process, killed:
            seen = [Seen(process.pid), Seen(m1.pid)]
            m1.cut_power()
            assert gone(seen)
            assert process.wait(20) == -signal.SIGKILL
            killed.kill()
            assert ended.recv(100) == b""  # as it is when a process dies alone
            assert is_silent(connection)
            connection.sendall(b"are you there")
            wait_for("packets sent in vain", lambda: sends_in_vain(connection))
            assert is_silent(connection)
    with pytest.raises(MachineError, match="m1 has no power"):
        m1.run(["true"])


def test_power_on_gives_the_same_machine_without_what_it_had(machines: Machines) -> None:
    m1, m2, *_ = machines
    (m1.root / "tmp/trace").write_text("of before")
    with listener_on(m2) as listener:
        process, connection = sender_on(m1, m2, listener)
        with connection, process:
            address = m1.address
            m1.cut_power()
            m1.power_on()
            assert m1.address == address
            assert m1.run(["hostname"]).stdout == "m1\n"
            assert list((m1.root / "tmp").glob("trace")) == []
            assert m1.pids() == []
            connection.sendall(b"are you there")
            with pytest.raises(ConnectionResetError):  # that machine knows of no such connection
                connection.recv(100)


def test_links_that_were_cut_stay_cut_through_a_power_cut(machines: Machines) -> None:
    m1, m2, *_ = machines
    m1.cut_link(carrier=False)
    m1.cut_power()
    m1.power_on()
    assert "NO-CARRIER" in m1.run(["ip", "link", "show", "eth0"]).stdout
    m1.mend_link()
    with listener_on(m2) as listener:
        for end in connected(m1, m2, listener):
            end.close()


def test_a_frozen_machine_stands_still_and_goes_on(machines: Machines) -> None:
    m1, m2, *_ = machines
    with listener_on(m2) as listener:
        process, connection = sender_on(m1, m2, listener)
        with connection, process:
            m1.freeze()
            assert process.stdin is not None
            process.stdin.write("words\n")
            assert (m1.root / "proc/1/stat").read_text().rpartition(")")[2].split()[0] == "T"
            assert Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
            with pytest.raises(MachineError, match="m1 is frozen"):
                m1.run(["true"])
            assert is_silent(connection)
            m1.thaw()
            assert connection.recv(100) == b"words\n"
            assert m1.run(["hostname"]).stdout == "m1\n"


def test_no_process_escapes_a_freeze_by_being_new(machines: Machines) -> None:
    m1 = machines["m1"]
    with m1.popen([sys.executable, "-c", FORKING], stdout=subprocess.PIPE) as process:
        assert first_line(process) == "forking"
        m1.freeze()
        held = m1.pids()
        assert held
        assert [pid for pid in held if not is_still(m1, pid)] == []
        assert m1.pids() == held
        m1.thaw()
        wait_for("new processes", lambda: m1.pids() != held)
    m1.cut_power()  # it has no process group that the test could kill: its leader has ended


def is_still(machine: Machine, pid: int) -> bool:
    return (machine.root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZD"


def test_a_process_gets_signals_and_its_end_comes_back(machines: Machines) -> None:
    m1 = machines["m1"]
    with m1.popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        assert first_line(process) == "ready"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0)
        process.terminate()
        assert process.wait(20) == 7
    with m1.popen(["sleep", "1000"]) as process:
        process.kill()
        assert process.wait(20) == -signal.SIGKILL
    assert m1.run(["sh", "-c", "cat; echo wrong >&2; exit 3"], check=False, words="in").stdout == "in"
    with pytest.raises(MachineError, match="on m1 ended with 3: wrong"):
        m1.run(["sh", "-c", "echo wrong >&2; exit 3"])
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        m1.popen(["no-such-command"])


def test_init_is_the_parent_and_reaps_orphans(machines: Machines) -> None:
    m1 = machines["m1"]
    assert m1.run(["sh", "-c", "echo $PPID"]).stdout == "1\n"
    m1.run(["sh", "-c", "(sh -c 'echo $PPID; while [ ! -e /tmp/end ]; do read -t 0.1 _ </dev/zero; done' &)"])
    assert len(m1.pids()) >= 1
    (m1.root / "tmp/end").touch()
    wait_for("orphans reaped", lambda: m1.pids() == [])


def test_nothing_is_left_when_a_block_ends_in_whatever_way() -> None:
    own, seen = namespaces_of(os.getpid()), []
    with pytest.raises(KeyboardInterrupt), Machines(2) as machines:  # noqa: PT012  what there is, is looked at inside
        machines["m1"].popen(["sleep", "1000"])
        names = [name for machine in machines for name in namespaces_of(machine.pid)]
        names.append(os.readlink(f"/proc/{machines.keeper.pid}/ns/net"))
        seen += [Seen(pid) for pid in in_namespaces(names)]
        assert len(seen) == 4  # the keeper, two inits, and what runs on m1: a namespace without any of them is none
        machines["m2"].freeze()
        raise KeyboardInterrupt
    assert gone(seen)
    assert namespaces_of(os.getpid()) == own
    assert "\ntmpfs /proc " not in Path("/proc/self/mounts").read_text()


def test_a_machine_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"m1: .*Read-only file system"), Machines(1, shared={"/usr/x": tmp_path}):
        pass


@pytest.mark.parametrize("victim", ["test", "keeper"])
def test_nothing_is_left_of_a_harness_that_is_killed(victim: str) -> None:
    repository = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{repository / 'src'}:{repository}"}
    command = [sys.executable, "-c", HARNESS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 4
        seen = [Seen(pid) for pid in pids]
        if victim == "test":
            process.kill()
        else:
            seen[0].kill()
        wait_for("end of all processes", lambda: gone(seen))
        process.kill()


@needs_sshd
def test_machines_reach_one_another_by_ssh(machines: Machines) -> None:
    m1, m2, *_ = machines
    m1.start_sshd()
    m2.start_sshd()
    done = m1.run(
        ["ssh", "-F", machines.ssh_config, "m2", "hostname; echo $PYTHONDONTWRITEBYTECODE; exit 5"], check=False
    )
    assert (done.stdout, done.returncode) == ("m2\n1\n", 5)
    m2.cut_power()
    m2.power_on()
    m2.start_sshd()
    assert m1.run(["ssh", m2.address, "hostname"]).stdout == "m2\n"  # its host key is the one of before
