"""Path faults: what is done to path 1 of two while a stream goes over both, and how it is taken back.

Each is one step of the bench `netpath` and one test of `test_netpath_faults`. Machine a sends, machine b receives.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tests.support.streams import Stream
from tests.support.wires import Wires

Deed = Callable[[Wires, Stream], object]
CHECKED = {"TORCHRELAY_NET_CRC": "1"}
DETECTOR_MS = 250


def nothing(_wires: Wires, _stream: Stream) -> None:
    """Nothing is to be taken back."""


def healed(wires: Wires, _stream: Stream) -> None:
    wires.heal()


@dataclass(frozen=True)
class PathFault:
    """`stall_ms`: what the longest time without a message shall be at most; None: nothing is promised.
    `rate`: the share of what the paths that are left can carry that goes on meanwhile; `carries`: these, in Gb/s of 1.
    """

    says: str
    strike: Deed
    heal: Deed = healed
    stall_ms: float | None = 300.0
    carries: float = 1.0
    rate: float | None = 0.95
    switched: bool = False  # each machine sees only its own link
    env: Mapping[str, str] = field(default_factory=dict)


def link(machine: str, up: bool) -> Deed:
    return lambda wires, _: wires.link(machine, 1, up)


def signalled(role: str, number: signal.Signals) -> Deed:
    return lambda _, stream: (stream.receiver if role == "b" else stream.sender).send_signal(number)


LINKS = {
    "link_down_local": PathFault("the sender's link is down", link("a", False), link("a", True), 100.0),
    "link_down_remote": PathFault("the receiver's link is down", link("b", False), link("b", True), 100.0),
    "link_down_local_switched": PathFault(
        "the sender's link is down, the receiver's is not", link("a", False), link("a", True), 100.0, switched=True
    ),
    "link_down_remote_switched": PathFault(
        "the receiver's link is down, the sender's is not", link("b", False), link("b", True), 100.0, switched=True
    ),
}  # fmt: skip

SILENCE = {
    "blackhole_both": PathFault("packets are lost both ways", lambda wires, _: wires.blackhole(1)),
    "blackhole_to_receiver": PathFault("packets to the receiver are lost", lambda wires, _: wires.deaf("b", 1)),
    "blackhole_to_sender": PathFault("packets to the sender are lost", lambda wires, _: wires.deaf("a", 1)),
    "mtu": PathFault("packets over 1000 bytes are lost", lambda wires, _: wires.swallow_large(1)),
}

CONNECTIONS = {
    "refused": PathFault("every packet is answered with RST", lambda wires, _: wires.refuse(1)),
    "cut_sender": PathFault(
        "the sender's kernel ends its connections", lambda wires, _: wires.cut_connections("a", 1), nothing, 100.0,
        2.0,
    ),
    "cut_receiver": PathFault(
        "the receiver's kernel ends its connections", lambda wires, _: wires.cut_connections("b", 1), nothing, 100.0,
        2.0,
    ),
    "half_open_sender": PathFault(
        "the sender's connections end and the receiver is not told", lambda wires, _: wires.half_open("a", 1),
        carries=2.0,
    ),
    "half_open_receiver": PathFault(
        "the receiver's connections end and the sender is not told", lambda wires, _: wires.half_open("b", 1),
        carries=2.0,
    ),
    "address_sender": PathFault(
        "the sender's address is taken away", lambda wires, _: wires.address_taken("a", 1),
        lambda wires, _: wires.address_given("a", 1),
    ),
    "address_receiver": PathFault(
        "the receiver's address is taken away", lambda wires, _: wires.address_taken("b", 1),
        lambda wires, _: wires.address_given("b", 1),
    ),
}  # fmt: skip

QUALITY = {
    "slow": PathFault(
        "the path is held at 100 Mb/s", lambda wires, _: wires.speed(1, "100mbit"),
        lambda wires, _: wires.speed(1, wires.rate), carries=1.1,
    ),
    "lossy": PathFault("one packet of 100 is lost", lambda wires, _: wires.lossy(1, 100), rate=None),
    "corrupt": PathFault(
        "bytes of chunks are changed", lambda wires, _: wires.corrupt(1), stall_ms=None, rate=None, env=CHECKED
    ),
    "corrupt_headers": PathFault(
        "bytes of frames' headers are changed", lambda wires, _: wires.corrupt_headers(1), stall_ms=None, rate=None,
        env=CHECKED,
    ),
}  # fmt: skip

STOPS = {
    "stopped_receiver": PathFault(
        "the receiver is stopped", signalled("b", signal.SIGSTOP), signalled("b", signal.SIGCONT), None, rate=None
    ),
    "stopped_sender": PathFault(
        "the sender is stopped", signalled("a", signal.SIGSTOP), signalled("a", signal.SIGCONT), None, rate=None
    ),
}

FAULTS = {**LINKS, **SILENCE, **CONNECTIONS, **QUALITY, **STOPS}
