"""The pretended machines themselves, and how a time line is read."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import wires as module
from tests.streams import BIN_S, Timeline
from tests.wires import Wires, WiresError, obstacle


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_behind_a_switch_only_one_machine_sees_a_link_go(machines: Wires) -> None:
    machines.link("a", 1, up=False)
    assert not carrier(machines, "a", 1)
    assert carrier(machines, "b", 1)
    machines.unplug("b", 2)
    assert not carrier(machines, "b", 2)
    assert carrier(machines, "c", 2)


@pytest.mark.slow
def test_nothing_outlives_the_world() -> None:
    if obstacle():
        pytest.skip(f"no pretended machines: {obstacle()}")
    with Wires(paths=1) as wires:
        process = wires.start("a", ["sleep", "1000"])
    assert process.returncode is not None
    assert not Path("/run/netns/a").exists()


@pytest.mark.slow
def test_a_command_that_fails_says_so(machines: Wires) -> None:
    with pytest.raises(WiresError, match=r"no-such-thing.*cannot access|No such file"):
        machines.run("a", "ls /no-such-thing")
    assert machines.run("a", "echo still here") == "still here\n"


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for tool in ("unshare", "nsenter", "ip", "tc", "ss"):
        (tmp_path / tool).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    module.obstacle.cache_clear()
    try:
        assert obstacle() == "`nft` is not here: install nftables"
    finally:
        module.obstacle.cache_clear()


# ---------------------------------------------------------------- the time line


def timeline(path: Path, *lines: dict[str, Any]) -> Timeline:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Timeline(path).refresh()


def steady(begin: float, bins: int, each: int) -> list[dict[str, Any]]:
    return [{"what": "rate", "t": begin + one * BIN_S, "bytes": each} for one in range(bins)]


def test_a_rate_counts_the_bins_without_a_line(tmp_path: Path) -> None:
    line = timeline(tmp_path / "line", *steady(10.0, 20, 6_250_000), *steady(12.0, 20, 6_250_000))
    assert line.gbps(10.0, 11.0) == pytest.approx(1.0)
    assert line.gbps(11.0, 12.0) == 0.0
    assert line.gbps(10.0, 13.0) == pytest.approx(2 / 3)
    assert line.seconds() == pytest.approx(3.0)


def test_a_stall_is_the_longest_gap_that_touches_the_time(tmp_path: Path) -> None:
    gaps = [{"what": "gap", "from": 1.0, "to": 1.5}, {"what": "gap", "from": 3.0, "to": 3.2}]
    line = timeline(tmp_path / "line", *steady(0.0, 100, 1), *gaps)
    assert line.stall_ms(1.4, 4.0) == 500.0
    assert line.stall_ms(2.0, 4.0) == 200.0
    assert line.stall_ms(4.0, 5.0) == 10.0
    assert line.resumed(3.1) == pytest.approx(0.1)
    assert line.resumed(2.0) == 0.0


def test_full_again_waits_for_a_rate_that_holds(tmp_path: Path) -> None:
    path = tmp_path / "line"
    line = timeline(path, *steady(0.0, 4, 100), *steady(0.3, 1, 6_250_000), *steady(0.6, 5, 6_250_000))
    assert line.full_again(0.2, 0.99) is None
    with path.open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in steady(0.85, 10, 6_250_000)))
    assert line.refresh().full_again(0.2, 0.99) == pytest.approx(0.4)


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = tmp_path / "line"
    path.write_text('{"what": "error", "te')
    line = Timeline(path).refresh()
    assert line.errors == []
    with path.open("a") as file:
        file.write('xt": "broken"}\n')
    assert line.refresh().errors == ["broken"]
