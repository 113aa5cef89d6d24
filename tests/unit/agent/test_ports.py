"""InfiniBand and RoCE ports: what is read of them, when one is at fault, and when that is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.agent.network.findings import Kind
from torchrelay.agent.network.network import Network
from torchrelay.agent.network.ports import Ports, Reading, read_ports, uses
from torchrelay.cli.launch import net_flags
from torchrelay.cli.launch.run import parser
from torchrelay.client.runs import NotPossible
from torchrelay.protocol.messages.events import Event, TaintCleared, TaintSet
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.wire.files.launch import PathLimits
from torchrelay.wire.messages.pathnews import NetworkNews

LIMITS = PathLimits(down_s=30, flaps=3, window_s=600, slow_share=0.6, slow_s=60, heal_s=60, ports=True)
NAME = "mlx5_0:1"


class Hardware:
    """A port as sysfs shows it, under a folder."""

    def __init__(self, root: Path, device: str = "mlx5_0", port: int = 1) -> None:
        self.folder = root / device / "ports" / str(port)
        (self.folder / "counters").mkdir(parents=True)
        self.show()

    def show(self, state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)", downed: int = 0) -> None:
        (self.folder / "state").write_text(f"{state}\n")
        (self.folder / "rate").write_text(f"{rate}\n")
        (self.folder / "counters" / "link_downed").write_text(f"{downed}\n")


def up(gbps: float = 400, downed: int | None = 0) -> Reading:
    return Reading(NAME, "ACTIVE", True, gbps, downed)


def down(downed: int | None = 0) -> Reading:
    return Reading(NAME, "DOWN", False, 0.0, downed)


def kinds(ports: Ports) -> dict[str, Kind]:
    return {name: found.kind for name, found in ports.findings.items()}


# ---------------------------------------------------------------- what is read


def test_ports_are_read_as_the_kernel_shows_them(tmp_path: Path) -> None:
    Hardware(tmp_path)
    Hardware(tmp_path, port=2).show("1: DOWN", "2.5 Gb/sec (1X SDR)", 7)
    assert list(read_ports(tmp_path)) == [
        Reading("mlx5_0:1", "ACTIVE", True, 400.0, 0),
        Reading("mlx5_0:2", "DOWN", False, 2.5, 7),
    ]


def test_what_is_not_there_or_makes_no_sense_is_no_number(tmp_path: Path) -> None:
    odd = Hardware(tmp_path, "bnxt_re0")
    odd.show(rate="fast", downed=0)
    (odd.folder / "counters" / "link_downed").write_bytes(b"\xff\xfe")
    (Hardware(tmp_path, "gone").folder / "state").unlink()
    assert list(read_ports(tmp_path)) == [Reading("bnxt_re0:1", "ACTIVE", True, 0.0, None)]
    assert list(read_ports(tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("wanted", "used"),
    [
        ("", {"mlx5_0:1", "mlx5_0:2", "mlx5_10:1", "bnxt:1"}), ("mlx5", {"mlx5_0:1", "mlx5_0:2", "mlx5_10:1"}),
        ("=mlx5_1", set()), ("mlx5_0:2,bnxt", {"mlx5_0:2", "bnxt:1"}), ("^mlx5_0", {"mlx5_10:1", "bnxt:1"}),
        ("^=mlx5_0:1", {"mlx5_0:2", "mlx5_10:1", "bnxt:1"}), ("=mlx5_0", {"mlx5_0:1", "mlx5_0:2"}),
    ],
)  # fmt: skip
def test_only_ports_that_nccl_uses_count(wanted: str, used: set[str]) -> None:
    assert {name for name in ("mlx5_0:1", "mlx5_0:2", "mlx5_10:1", "bnxt:1") if uses(wanted, name)} == used


# ---------------------------------------------------------------- when one is at fault


def test_a_port_that_stays_down_is_at_fault_until_it_has_been_up_for_a_while() -> None:
    ports = Ports(LIMITS)
    ports.look([up()], 0)
    ports.look([down()], 10)
    ports.look([down()], 39)
    assert not ports.findings
    ports.look([down()], 40)
    found = ports.findings[NAME]
    assert found.kind is Kind.DOWN
    assert found.ours
    assert "port mlx5_0:1 lost for 30 s (DOWN)" in found.evidence
    ports.look([up()], 50)
    ports.look([down()], 60)  # it was too early
    ports.look([up()], 70)
    ports.look([up()], 129)
    assert kinds(ports) == {NAME: Kind.DOWN}
    ports.look([up()], 130)
    assert not ports.findings


def test_a_port_that_was_never_up_is_not_in_use() -> None:
    ports = Ports(LIMITS)
    for now in (0, 100, 1000):
        ports.look([down()], now)
    assert not ports.findings
    assert not ports.ports


def test_a_device_that_is_gone_is_down() -> None:
    ports = Ports(LIMITS)
    ports.look([up()], 0)
    ports.look([], 10)
    ports.look([], 40)
    assert "(gone)" in ports.findings[NAME].evidence


def test_losses_that_are_over_before_anybody_looks_are_counted() -> None:
    ports = Ports(LIMITS)
    for now, downed in ((0, 5), (10, 6), (20, 7)):
        ports.look([up(downed=downed)], now)
    assert not ports.findings
    ports.look([up(downed=8)], 30)
    assert kinds(ports) == {NAME: Kind.FLAPPING}
    ports.look([up(downed=8)], 610)  # the first is out of the window
    assert kinds(ports) == {NAME: Kind.FLAPPING}
    ports.look([up(downed=8)], 670)
    assert not ports.findings


def test_a_loss_that_was_seen_and_is_counted_later_is_one() -> None:
    ports = Ports(LIMITS)
    ports.look([up(downed=0)], 0)
    ports.look([down(downed=0)], 1)
    ports.look([up(downed=1)], 2)
    assert len(ports.ports[NAME].flaps) == 1


@pytest.mark.parametrize("counter", [None, 0xFF, 0xFFFFFFFF])
def test_without_a_counter_that_counts_what_was_seen_counts(counter: int | None) -> None:
    ports = Ports(LIMITS)
    for now in range(0, 60, 10):
        ports.look([up(downed=counter) if now % 20 == 0 else down(counter)], now)
    assert kinds(ports) == {NAME: Kind.FLAPPING}


def test_a_port_that_has_lost_lanes_is_slow() -> None:
    ports = Ports(LIMITS)
    ports.look([up(400)], 0)
    ports.look([up(200)], 10)
    ports.look([up(200)], 70)
    assert "runs at 200 Gb/s instead of 400" in ports.findings[NAME].evidence
    ports.look([up(400)], 80)
    ports.look([up(400)], 139)
    assert kinds(ports) == {NAME: Kind.SLOW}
    ports.look([up(400)], 140)
    assert not ports.findings


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.floats(0.5, 40)), max_size=60))
def test_losses_are_neither_missed_nor_counted_twice(story: list[tuple[bool, int, float]]) -> None:
    """Each loss adds to the counter, whether anybody sees it or not; the last one may be counted one look later."""
    ports, now, counter, active = Ports(LIMITS), 0.0, 0, True
    ports.look([up(downed=0)], now)
    for comes_up, unseen, span in story:
        now += span / 1000  # all within the window
        counter += unseen if active or comes_up else 0
        late = active and not comes_up  # seen, and not counted yet
        ports.look([up(downed=counter) if comes_up else down(counter)], now)
        counter += late
        active = comes_up
    now += 0.001
    ports.look([up(downed=counter) if active else down(counter)], now)
    assert len(ports.ports[NAME].flaps) == counter


# ---------------------------------------------------------------- in an agent


def test_an_agent_asks_for_a_taint_and_lifts_it_across_a_restart(tmp_path: Path) -> None:
    told: list[Event] = []
    shown: list[NetworkNews] = []
    hardware = Hardware(tmp_path / "sysfs")
    other = Hardware(tmp_path / "sysfs", "storage")
    limits = PathLimits(down_s=0.0, heal_s=0.0, ports=True)

    async def with_agent(story: Callable[[Network], None], ports: bool = True) -> None:
        network = Network(
            tmp_path,
            NodeId("node-0"),
            limits if ports else PathLimits(),
            slot_of=lambda _: None,
            tell=told.append,
            show=shown.append,
            adapters="mlx5",
            sysfs=tmp_path / "sysfs",
        )
        network.open()
        try:
            story(network)
        finally:
            network.close()

    def loses(network: Network) -> None:
        network.look()
        assert not told
        hardware.show("1: DOWN")
        other.show("1: DOWN")
        network.look()

    def mends(network: Network) -> None:
        hardware.show()
        network.look()

    asyncio.run(with_agent(loses, ports=False))
    assert not told
    assert not shown[-1].paths
    hardware.show()
    asyncio.run(with_agent(loses))
    (event,) = told
    assert isinstance(event, TaintSet)
    assert (event.node, event.slot, event.key, event.value) == ("node-0", None, "network/mlx5_0-1", "down")
    (path,) = shown[-1].paths
    assert path.finding is not None
    assert path.finding.taint == "network/mlx5_0-1"
    assert path.links[0].state == "down"
    asyncio.run(with_agent(mends))
    assert isinstance(told[-1], TaintCleared)
    assert told[-1].key == "network/mlx5_0-1"


# ---------------------------------------------------------------- flags


def test_ib_failover_is_ncclls_own_and_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrelay.netpath.native.environment.nccl_version", lambda: (2, 30, 7))
    given = parser().parse_args(["--ib-failover", "--ib-merge", "mlx5_0,mlx5_1", "--net-down", "5s", "x.py"])
    assert net_flags.path_limits(given) == PathLimits(down_s=5.0, ports=True)
    found = net_flags.network_environment(given)
    assert found["NCCL_IB_RESILIENCY_PORT_FAILOVER"] == "1"
    assert found["NCCL_NET_FORCE_MERGE"] == "mlx5_0,mlx5_1"
    assert "NCCL_NET" not in found
    assert "TORCHRELAY_CPU_BACKEND" not in found


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--ib-failover", "--net-failover"], "either our plugin or its own"),
        (["--ib-merge", "a,b"], "--ib-merge means nothing without --ib-failover"),
        (["--ib-failover", "--net-giveup", "5s"], "--net-giveup means nothing with --ib-failover"),
    ],
)
def test_what_does_not_go_together_is_refused(flags: list[str], told: str) -> None:
    with pytest.raises(NotPossible, match=told):
        net_flags.path_limits(parser().parse_args([*flags, "x.py"]))


def test_devices_that_back_nobody_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrelay.netpath.native.environment.nccl_version", lambda: None)
    with pytest.raises(NotPossible, match="write them as mlx5_0,mlx5_1"):
        net_flags.network_environment(parser().parse_args(["--ib-failover", "--ib-merge", "mlx5_0", "x.py"]))
