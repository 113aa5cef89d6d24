"""Netpath over real sockets, on pretended machines: whatever happens to a path, every byte comes once and in order.

What is asked is that messages go on while a fault lasts. How fast they do is the bench's to judge (bench/netpath.py).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.path_faults import CHECKED, FAULTS, STOPS, PathFault
from tests.support.streams import Stream, StreamError, Timeline, build, compiler
from tests.support.wires import Wires, obstacle

BEFORE_S = 0.3
LASTS_S = 0.8
LIMIT_S = 15.0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stream, compiled; without it or without pretended machines there is nothing to test."""
    if obstacle():
        pytest.skip(f"no pretended machines: {obstacle()}")
    if compiler() is None:
        pytest.skip("no C compiler: install gcc or clang, or set CC")
    return build(tmp_path_factory.mktemp("netpath"))


@contextmanager
def streaming(program: Path, folder: Path, *, switched: bool = False, **more: Any) -> Iterator[tuple[Wires, Stream]]:
    """A stream that has begun."""
    with Wires(switched=switched) as wires, Stream(wires, program, folder, **more) as stream:
        stream.await_flow(BEFORE_S)
        yield wires, stream


def goes_on(stream: Stream, seconds: float = LASTS_S) -> Timeline:
    """Wait for messages that are done so long after now."""
    since = time.monotonic() + seconds
    return stream.await_that(lambda line: line.until > since, LIMIT_S, f"messages {seconds:g} s later")


def carries(wires: Wires, stream: Stream, more: int) -> None:
    """Wait for so many more bytes over path 1."""
    before = wires.traffic("b", 1)
    stream.await_that(lambda _: wires.traffic("b", 1) > before + more, LIMIT_S, "bytes over path 1")


def rests(stream: Stream, seconds: float = LASTS_S) -> Timeline:
    """Wait until nothing has come for so long."""
    return stream.await_that(lambda line: time.monotonic() - line.until > seconds, LIMIT_S, "silence")


def lost(stream: Stream) -> int:
    """Connections that the sender has lost."""
    return stream.sent.total("downs")


# ---------------------------------------------------------------- one path


@pytest.mark.parametrize("name", sorted(FAULTS.keys() - STOPS.keys()))
def test_messages_go_on_whatever_happens_to_a_path(name: str, program: Path, tmp_path: Path) -> None:
    fault: PathFault = FAULTS[name]
    with streaming(program, tmp_path, switched=fault.switched, env=fault.env) as (wires, stream):
        fault.strike(wires, stream)
        goes_on(stream)
        hits = wires.hits(1)
        fault.heal(wires, stream)
        line = goes_on(stream)
        stream.end()
    assert line.wrong_bytes() == 0
    if name not in ("slow", "lossy", "corrupt_headers"):  # what these do may be borne without losing a connection
        assert lost(stream) > 0
    if name.startswith("corrupt"):
        assert hits > 0
    if name == "corrupt":
        assert line.total("corrupt") > 0


def test_without_checksums_the_receiver_would_see_it(program: Path, tmp_path: Path) -> None:
    """The test of the tests: changed bytes do come through, and are found."""
    with streaming(program, tmp_path) as (wires, stream):
        wires.corrupt(1, one_in=5)
        stream.await_that(lambda _: wires.hits(1) > 3, LIMIT_S, "changed packets")
        wires.heal()
        goes_on(stream)
        line = stream.end()
    assert line.wrong_bytes() > 0


def test_a_path_that_is_back_carries_its_share_again(program: Path, tmp_path: Path) -> None:
    with streaming(program, tmp_path) as (wires, stream):
        wires.blackhole(1)
        goes_on(stream)
        wires.heal()
        carries(wires, stream, 50_000_000)
        assert stream.end().wrong_bytes() == 0
    assert stream.sent.total("ups") > 0


def forgets(wires: Wires, stream: Stream) -> float:
    """Seconds until the sender's machine, which has something to send, has forgotten the receiver's on path 1."""
    since = time.monotonic()
    stream.await_that(lambda _: not wires.knows("a", "b", 1), LIMIT_S, "the receiver's address is forgotten")
    return time.monotonic() - since


def test_the_peers_address_is_kept_while_a_path_is_silent(program: Path, tmp_path: Path) -> None:
    """What the kernel has forgotten it asks for once a second, and so long a path that is back has to wait."""
    with streaming(program, tmp_path, env={"TORCHRELAY_NET_NEIGHBOURS": "0"}) as (wires, stream):
        wires.forgetful(1)
        wires.blackhole(1)
        seconds = forgets(wires, stream)
    with streaming(program, tmp_path) as (wires, stream):
        wires.forgetful(1)
        wires.blackhole(1)
        goes_on(stream, 1.5 * seconds)
        assert wires.knows("a", "b", 1)
        wires.heal()
        carries(wires, stream, 10_000_000)
        assert stream.end().wrong_bytes() == 0


@pytest.mark.parametrize("machine", ["a", "b"])
def test_without_a_carrier_nobody_is_asked_for_in_vain(machine: str, program: Path, tmp_path: Path) -> None:
    """The kernel asks again a second later, and so long the link that is back would have no path.

    Once in a while the kernel itself sends what was in the socket before we hear of it: the more is under way, the more
    often. Hence short messages, one at a time, and not all losses.
    """
    flags = ("--size", "20000", "--outstanding", "1")
    asked = []
    with streaming(program, tmp_path, switched=True, flags=flags) as (wires, stream):
        for _ in range(5):
            wires.unplug(machine, 1)
            goes_on(stream, 0.4)
            asked.append(wires.asks(machine, 1))
            wires.unplug(machine, 1, plugged=True)
            carries(wires, stream, 200_000)
        assert stream.end().wrong_bytes() == 0
    assert sum(asked) <= 2


@pytest.mark.parametrize("machine", ["a", "b"])
def test_an_interface_may_be_made_anew(machine: str, program: Path, tmp_path: Path) -> None:
    with streaming(program, tmp_path, switched=True) as (wires, stream):
        wires.unplug(machine, 1)
        goes_on(stream)
        wires.interface_gone(machine, 1)
        goes_on(stream)
        wires.interface_made(machine, 1)
        carries(wires, stream, 10_000_000)
        assert stream.end().wrong_bytes() == 0


@pytest.mark.parametrize("how", ["no carrier", "silent"])
def test_a_path_that_is_dead_at_first_is_taken_when_it_comes(how: str, program: Path, tmp_path: Path) -> None:
    with Wires(switched=True) as wires:
        wires.unplug("b", 1) if how == "no carrier" else wires.blackhole(1)
        with Stream(wires, program, tmp_path) as stream:
            stream.await_flow(BEFORE_S)
            wires.unplug("b", 1, plugged=True) if how == "no carrier" else wires.heal(1)
            stream.await_that(lambda _: wires.traffic("b", 1) > 10_000_000, LIMIT_S, "bytes over path 1")
            assert stream.end().wrong_bytes() == 0


# ---------------------------------------------------------------- more than one


@pytest.mark.parametrize("how", ["links", "silence"])
def test_both_paths_may_be_away_for_a_while(how: str, program: Path, tmp_path: Path) -> None:
    with streaming(program, tmp_path) as (wires, stream):
        for path in wires.paths:
            wires.link("a", path, up=False) if how == "links" else wires.blackhole(path)
        rests(stream)
        wires.link("a", 2, up=True) if how == "links" else wires.heal(2)
        goes_on(stream)
        assert stream.end().wrong_bytes() == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_a_storm_of_flaps_is_ridden_out(seed: int, program: Path, tmp_path: Path) -> None:
    with streaming(program, tmp_path) as (wires, stream):
        wires.storm(seed, flaps=8, shortest_s=0.05, longest_s=0.25)
        goes_on(stream)
        assert stream.end().wrong_bytes() == 0
    assert lost(stream) > 3


def test_one_path_resumes_when_it_is_back(program: Path, tmp_path: Path) -> None:
    with streaming(program, tmp_path, paths=[1]) as (wires, stream):
        wires.link("a", 1, up=False)
        rests(stream)
        wires.link("a", 1, up=True)
        goes_on(stream)
        assert stream.end().wrong_bytes() == 0


def test_checksums_and_both_paths_bad_at_times(program: Path, tmp_path: Path) -> None:
    with streaming(program, tmp_path, env=CHECKED) as (wires, stream):
        for path in wires.paths:
            wires.corrupt(path, one_in=400)
        stream.await_that(lambda _: wires.hits(1) + wires.hits(2) > 4, LIMIT_S, "changed packets")
        wires.heal()
        goes_on(stream)
        line = stream.end()
    assert line.wrong_bytes() == 0
    assert line.total("corrupt") > 0


# ---------------------------------------------------------------- processes


@pytest.mark.parametrize("name", sorted(STOPS))
def test_a_process_that_is_stopped_is_no_fault_of_paths(name: str, program: Path, tmp_path: Path) -> None:
    with streaming(program, tmp_path) as (wires, stream):
        STOPS[name].strike(wires, stream)
        rests(stream)
        STOPS[name].heal(wires, stream)
        goes_on(stream)
        assert stream.end().wrong_bytes() == 0
    assert lost(stream) == 0


def test_a_peer_that_was_killed_is_given_up(program: Path, tmp_path: Path) -> None:
    with streaming(program, tmp_path, env={"TORCHRELAY_NET_GIVEUP_S": "1"}) as (_, stream):
        stream.receiver.send_signal(signal.SIGKILL)
        stream.receiver.wait()
        assert stream.sender.wait(LIMIT_S) == 1
        assert "the message did not get through" in stream.sent.refresh().errors[0]


@pytest.mark.parametrize(("size", "outstanding"), [(1, 8), (7, 32), (4097, 16), (300_001, 3), (5_000_000, 2)])
def test_all_sizes_come_through_a_cut(size: int, outstanding: int, program: Path, tmp_path: Path) -> None:
    flags = ("--size", str(size), "--outstanding", str(outstanding))
    with streaming(program, tmp_path, flags=flags) as (wires, stream):
        wires.cut_connections("a", 1)
        goes_on(stream, 0.2)
        wires.cut_connections("b", 2)
        goes_on(stream, 0.2)
        assert stream.end().wrong_bytes() == 0


def test_an_interface_that_is_not_there_is_named(program: Path, tmp_path: Path) -> None:
    env = {"TORCHRELAY_NET_PATHS": "eth7"}
    with (
        Wires() as wires,
        Stream(wires, program, tmp_path, env=env) as stream,
        pytest.raises(StreamError, match="eth7"),
    ):
        stream.await_flow(BEFORE_S)
