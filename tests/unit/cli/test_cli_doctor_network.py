"""`torchrelay doctor --net`: what the network of this machine offers, read from files that look like the kernel's."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from torchrelay.cli.diagnose import consult
from torchrelay.cli.diagnose.consult import (
    State,
    check_ecmp,
    check_mptcp,
    check_paths,
    network_checks,
    usable_interfaces,
)

GOOD = {"mptcp/enabled": 1, "ipv4/tcp_rto_max_ms": 1000, "ipv4/tcp_retries2": 255}
ECMP = {"ipv4/fib_multipath_hash_policy": 1, "ipv4/conf/all/ignore_routes_with_linkdown": 1}


def kernel(folder: Path, settings: dict[str, int]) -> Path:
    for name, value in settings.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")
    return folder


def test_one_path_is_no_fault_and_is_said() -> None:
    assert check_paths(["eth0"]).found == "one only: eth0; there is nothing to fail over to"
    assert check_paths([]).found.startswith("none besides loopback")
    assert check_paths(["eth0", "eth1"]).found == "eth0, eth1"


@pytest.mark.parametrize(
    ("settings", "state", "found"),
    [
        (GOOD, State.WELL, "tcp_rto_max_ms 1000, tcp_retries2 255"),
        (GOOD | {"ipv4/tcp_rto_max_ms": 120_000}, State.REMARK, "tcp_rto_max_ms is 120000"),
        (GOOD | {"ipv4/tcp_retries2": 15}, State.REMARK, "tcp_retries2 is 15"),
        (GOOD | {"mptcp/enabled": 0}, State.REMARK, "not enabled"),
        ({"mptcp/enabled": 1, "ipv4/tcp_retries2": 255}, State.REMARK, "older than 6.15"),
        ({}, State.REMARK, "not enabled"),
    ],
)
def test_mptcp_needs_both_settings(tmp_path: Path, settings: dict[str, int], state: State, found: str) -> None:
    check = check_mptcp(kernel(tmp_path, settings))
    assert check.state is state
    assert found in check.found
    assert bool(check.remedy) == (state is not State.WELL)


def test_ecmp_needs_both_settings(tmp_path: Path) -> None:
    assert check_ecmp(kernel(tmp_path / "good", ECMP)).state is State.WELL
    check = check_ecmp(kernel(tmp_path / "half", {"ipv4/fib_multipath_hash_policy": 1}))
    assert check.state is State.REMARK
    assert "ignore_routes_with_linkdown is None, not 1" in check.found


def test_one_means_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consult, "usable_interfaces", lambda: ["eth0", "eth1"])
    names = [check.name for check in network_checks(kernel(tmp_path / "mptcp", GOOD))]
    assert names == ["network paths", "control traffic: MPTCP"]
    names = [check.name for check in network_checks(tmp_path / "none")]
    assert names == ["network paths", "control traffic: ECMP", "control traffic: MPTCP"]


def test_interfaces_that_lead_nowhere_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = {
        "lo": "unknown", "docker0": "up", "eth0": "up", "eth1": "down", "eth2": "up", "eth3": "up", "eth4": "unknown",
    }  # fmt: skip
    for name, state in states.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "flags").write_text("0x1002\n" if name == "eth3" else "0x1003\n")  # eth3 is switched off
        (tmp_path / name / "operstate").write_text(f"{state}\n")
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate([*states, "eth5"], 1)))  # eth5 was removed
    monkeypatch.setattr(consult, "with_addresses", lambda: {*states, "eth5"} - {"eth2"})
    assert usable_interfaces(tmp_path) == ["eth0", "eth4"]


def test_the_kernel_says_which_interfaces_have_an_address() -> None:
    found = consult.with_addresses()
    assert found <= {name for _, name in socket.if_nameindex()}
    assert "lo" in found, "these tests use 127.0.0.1"
