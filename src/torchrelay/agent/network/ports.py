"""Ports: InfiniBand and RoCE ports of this node, as the kernel shows them. Pure but for `read_ports`: times are given.

The library does not speak RDMA: NCCL itself takes another port when one is lost (`torchrelay run --ib-failover`). What
it does not do is to say so to anybody. So the agent looks at each port in sysfs, where no privilege is needed:

    state                   4: ACTIVE, or not
    rate                    400 Gb/sec (4X NDR); less than it was if lanes are lost
    counters/link_downed    counts losses that are over before anybody has looked

(Documentation/ABI/stable/sysfs-class-infiniband of Linux.) A port is found at fault as a path is (`findings`): lost for
`down_s`, lost `flaps` times within `window_s`, or slower than `slow_share` of what it was for `slow_s`. It is always
this node that is left: the kernel speaks of this end. A port that has never been up is not in use. One that is gone,
with its device, is down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from msgspec import Struct, structs

from torchrelay.agent.network.findings import Finding, Kind, Where, span_in_words
from torchrelay.wire.files.launch import PathLimits
from torchrelay.wire.messages.pathnews import FindingNews, LinkNews, PathNews

SYSFS = Path("/sys/class/infiniband")
ACTIVE = 4  # enum ib_port_state of Linux
FULL = (0xFF, 0xFFFFFFFF)  # a counter that has come to its end counts no more


class Reading(Struct, frozen=True):
    """What was read of a port. `gbps`: 0 if it does not say; `downed`: None if it does not count."""

    name: str  # device:port, as NCCL_IB_HCA has it
    state: str
    active: bool
    gbps: float = 0.0
    downed: int | None = None


class Port(Struct, frozen=True, kw_only=True):
    """What is known of a port that has been up. Times as of `look`; `flaps`: when it was lost."""

    active: bool
    state: str
    since: float  # in this state
    gbps: float
    best_gbps: float
    slow_since: float | None = None
    flaps: tuple[float, ...] = ()
    downed: int | None = None
    uncounted: int = 0  # losses that we saw, and that the counter will have, too


class PortMemory(Struct, frozen=True):
    """What the next agent of this node must know: the ports, and what is found at fault."""

    ports: dict[str, Port] = {}
    findings: dict[str, Finding] = {}


class Ports:
    """Keeps the ports of a node. `wanted`: which of them NCCL uses, as NCCL_IB_HCA says it; all if empty."""

    def __init__(self, limits: PathLimits, wanted: str = "") -> None:
        self.limits = limits
        self.ports: dict[str, Port] = {}
        self.findings: dict[str, Finding] = {}
        self._wanted = wanted

    def look(self, readings: Iterable[Reading], now: float) -> None:
        """Take in what was read of all ports: `findings` is right afterwards."""
        read = {reading.name: reading for reading in readings if uses(self._wanted, reading.name)}
        for name in sorted({*read, *self.ports}):
            reading = read.get(name) or Reading(name, "gone", active=False)
            known = self.ports.get(name)
            if known is None and not reading.active:
                continue  # never up: not in use
            self.ports[name] = port = self._now(known, reading, now)
            self._judge(name, port, now)

    def _now(self, known: Port | None, reading: Reading, now: float) -> Port:
        """A port after it was read once more."""
        if known is None:
            return Port(
                active=True,
                state=reading.state,
                since=now,
                gbps=reading.gbps,
                best_gbps=reading.gbps,
                downed=reading.downed,
            )
        gbps = reading.gbps or known.gbps
        best = max(known.best_gbps, gbps)
        slow = reading.active and gbps < self.limits.slow_share * best
        seen = known.active and not reading.active
        lost, uncounted = losses(known, reading.downed, seen=seen)
        flaps = tuple(at for at in known.flaps if now - at < self.limits.window_s) + (now,) * lost
        return Port(
            active=reading.active,
            state=reading.state,
            gbps=gbps,
            best_gbps=best,
            since=now if reading.active is not known.active or lost else known.since,
            slow_since=(known.slow_since if known.slow_since is not None else now) if slow else None,
            flaps=flaps[-1000:],
            uncounted=uncounted,
            downed=known.downed if reading.downed is None else reading.downed,
        )

    def _judge(self, name: str, port: Port, now: float) -> None:
        before, found = self.findings.get(name), self._fault(name, port, now)
        if found is not None:
            same = before is not None and before.kind is found.kind
            self.findings[name] = structs.replace(before, whole=None) if same and before is not None else found
        elif before is not None:
            well = port.active and port.slow_since is None
            whole = (before.whole if before.whole is not None else now) if well else None
            self.findings[name] = structs.replace(before, whole=whole)
            if whole is not None and now - whole >= self.limits.heal_s:
                del self.findings[name]

    def _fault(self, name: str, port: Port, now: float) -> Finding | None:
        if not port.active and now - port.since >= self.limits.down_s:
            return finding(name, Kind.DOWN, f"lost for {now - port.since:.0f} s ({port.state})", now)
        if len(port.flaps) >= self.limits.flaps:
            told = f"lost {len(port.flaps)} times within {span_in_words(self.limits.window_s)}"
            return finding(name, Kind.FLAPPING, told, now)
        if port.slow_since is not None and now - port.slow_since >= self.limits.slow_s:
            told = f"runs at {port.gbps:g} Gb/s instead of {port.best_gbps:g} for {now - port.slow_since:.0f} s"
            return finding(name, Kind.SLOW, told, now)
        return None

    # ------------------------------------------------------------ across a restart of the agent, and for people

    def memory(self) -> PortMemory:
        return PortMemory(dict(self.ports), dict(self.findings))

    def remember(self, memory: PortMemory) -> None:
        """Go on where the agent before this one stopped. Its clock was the same."""
        self.ports, self.findings = dict(memory.ports), dict(memory.findings)

    def news(self, now: float, first: int, taint_of: Callable[[str], str]) -> tuple[PathNews, ...]:
        """The ports as paths, for people; they are numbered from `first` on."""
        return tuple(
            PathNews(
                path=first + number,
                interface=name,
                local=name,
                links=(link_of(port, now),),
                finding=self._told(name, now, taint_of(name)),
            )
            for number, (name, port) in enumerate(sorted(self.ports.items()))
        )

    def _told(self, name: str, now: float, taint: str) -> FindingNews | None:
        found = self.findings.get(name)
        if found is None:
            return None
        return FindingNews(
            kind=str(found.kind), where=str(found.where), evidence=found.evidence, for_s=now - found.since, taint=taint
        )


def losses(known: Port, downed: int | None, *, seen: bool) -> tuple[int, int]:
    """How often a port was lost since the last look, and how many of these the counter has still to tell.

    The counter and the state are not read at one moment: a loss that was seen may be counted at the next look only.
    """
    counts = downed is not None and known.downed is not None and downed not in FULL
    more = max(0, downed - known.downed) if counts and downed is not None and known.downed is not None else 0
    told = max(0, more - known.uncounted)
    if seen and not told:
        return 1, known.uncounted - min(more, known.uncounted) + counts
    return told, known.uncounted - min(more, known.uncounted)


def finding(name: str, kind: Kind, told: str, now: float) -> Finding:
    """A port at fault: the whole node is to be left for it."""
    evidence = f"port {name} {told}: the port of this node or its cable"
    return Finding(
        path=0,
        interface=name,
        local=name,
        remotes=(),
        kind=kind,
        where=Where.HERE,
        ours=True,
        evidence=evidence,
        since=now,
    )


def link_of(port: Port, now: float) -> LinkNews:
    """A port as a link, to wherever its cable leads."""
    state = "down" if not port.active else "suspect" if port.slow_since is not None else "up"
    return LinkNews(
        remote=f"{port.gbps:g} Gb/s",
        state=state,
        state_s=now - port.since,
        reason="" if port.active else port.state,
        flaps=len(port.flaps),
    )


def uses(wanted: str, name: str) -> bool:
    """Whether NCCL uses a port by what NCCL_IB_HCA says: [^][=]NAME[:PORT],..., names are prefixes without `=`."""
    text = wanted.removeprefix("^")
    exact = text.startswith("=")
    device, _, number = name.partition(":")
    for each in filter(None, text.removeprefix("=").split(",")):
        known, _, port = each.partition(":")
        if (device == known if exact else device.startswith(known)) and port in ("", number):
            return not wanted.startswith("^")
    return not text or wanted.startswith("^")


# ---------------------------------------------------------------- what the kernel shows


def read_ports(root: Path = SYSFS) -> Iterator[Reading]:
    """All ports of this machine; none where there is no such hardware. What cannot be read does not count."""
    for folder in sorted(root.glob("*/ports/*")):
        text = word_in(folder / "state")
        if text is None:
            continue
        number, _, state = text.partition(":")
        rate = (word_in(folder / "rate") or "").split(" ", 1)[0]
        downed = word_in(folder / "counters" / "link_downed")
        yield Reading(
            f"{folder.parent.parent.name}:{folder.name}",
            (state or text).strip(),
            active=number.strip() == str(ACTIVE),
            gbps=float(rate) if is_number(rate) else 0.0,
            downed=int(downed) if downed is not None and downed.isascii() and downed.isdecimal() else None,
        )


def word_in(path: Path) -> str | None:
    """A file's text; None if it cannot be read, as while a device is being taken away."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def is_number(text: str) -> bool:
    """Whether it is a plain number, as rates are: 400, or 2.5."""
    return text.isascii() and text.replace(".", "", 1).isdecimal()
