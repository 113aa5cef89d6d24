"""The pretended machines themselves, and how a time line is read."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.wires import Wires, WiresError, obstacle


@pytest.fixture
def machines() -> Iterator[Wires]:
    if obstacle():
        pytest.skip(f"no pretended machines: {obstacle()}")
    with Wires(("a", "b", "c")) as wires:
        yield wires


def carrier(wires: Wires, machine: str, path: int) -> bool:
    return wires.run(machine, f"cat /sys/class/net/eth{path}/carrier 2>&1 || true").strip() == "1"


def reaches(wires: Wires, path: int) -> bool:
    """Whether machine b takes a connection of a over this path."""
    port = 4000 + path
    listens = f"import socket; s = socket.create_server(('{wires.address('b', path)}', {port})); print(flush=True)"
    server = wires.start("b", ["python3", "-c", f"{listens}; s.accept()"], stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()
    connects = f"import socket; socket.create_connection(('{wires.address('b', path)}', {port}), 0.3)"
    client = wires.start("a", ["python3", "-c", connects], stderr=subprocess.DEVNULL)
    reached = client.wait() == 0
    server.kill()
    server.stdout.close()
    server.wait()
    return reached


# ---------------------------------------------------------------- the world


def test_faults_are_where_they_should_be_and_go_away(machines: Wires) -> None:
    assert reaches(machines, 1)
    machines.blackhole(1)
    assert not reaches(machines, 1)
    assert reaches(machines, 2)
    machines.heal()
    machines.refuse(2)
    assert not reaches(machines, 2)
    machines.heal(2)
    machines.address_taken("a", 2)
    assert not reaches(machines, 2)
    machines.address_given("a", 2)
    assert reaches(machines, 1)
    assert reaches(machines, 2)


def test_behind_a_switch_only_one_machine_sees_a_link_go(machines: Wires) -> None:
    machines.link("a", 1, up=False)
    assert not carrier(machines, "a", 1)
    assert carrier(machines, "b", 1)
    machines.unplug("b", 2)
    assert not carrier(machines, "b", 2)
    assert carrier(machines, "c", 2)


def test_nothing_outlives_the_world() -> None:
    if obstacle():
        pytest.skip(f"no pretended machines: {obstacle()}")
    with Wires(paths=1) as wires:
        process = wires.start("a", ["sleep", "1000"])
    assert process.returncode is not None
    assert not Path("/run/netns/a").exists()


def test_a_command_that_fails_says_so(machines: Wires) -> None:
    with pytest.raises(WiresError, match=r"no-such-thing.*cannot access|No such file"):
        machines.run("a", "ls /no-such-thing")
    assert machines.run("a", "echo still here") == "still here\n"
