"""Paths: what the processes of a node say of its network paths, put together. Pure but for `reaches`.

A path is one of the node's addresses; a link is a path and an address of a peer. Of a link each process that uses it
has a word: by its reports, which come at once and may get lost, and by its page, which is read now and then. The newer
one counts. A link is lost when none of those who use it has it, and in use as long as anybody says anything of it.

That a peer's process has ended, or stands, is no fault of a path: all its links are lost at once then. Who hears of it
says so (`peer_unreachable`), and such losses count neither as lost links nor as flaps, unless the kernel itself says
that the interface is down (`LOCAL`).

All times are seconds of one clock that never goes back.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import ip_address

from torchrelay.agent.network.rates import Rates
from torchrelay.wire.messages.netreport import MOST_COUNTED, NetPage, Report, Row, RowState

# The kernel says it of this node's own interface.
LOCAL = frozenset({"carrier", "address"})
# Processes notice the same flap one after the other.
SAME_FLAP_S = 1.0
# A loss this long before its peer was called unreachable came of the same.
SAME_LOSS_S = 5.0
# A process whose page stands still for so long is stopped: it says nothing any more.
STALE_S = 5.0
# A page that is so much younger than a report would tell of the link, if it were still used.
SETTLED_US = 1_000_000
# Beyond this something invents addresses: further links are counted, not kept.
MOST_LINKS = 4096
MOST_FLAPS = 1000

# Stands for the processes that had told an agent before this one of a flap.
FORMER = 0

LinkId = tuple[str, str]  # local, remote


class LinkState(StrEnum):
    """How it stands with a link."""

    UP = "up"
    SUSPECT = "suspect"  # silent for a moment
    DOWN = "down"
    UNREACHABLE = "unreachable"  # no path to this peer is heard of
    UNUSED = "unused"


IN_USE = (LinkState.UP, LinkState.SUSPECT)


@dataclass
class Word:
    """What one process says of a link. `excused`: it is lost with its peer. `told_us`: the last report, since 1970."""

    state: LinkState
    since: float
    reason: str = ""
    excused: bool = False
    told_us: int = 0
    live: int = 0
    round_trip_us: int = 0


@dataclass
class Flap:
    """A link was lost, and who said so."""

    at: float
    reason: str
    pids: set[int]


@dataclass
class Totals:
    """Counters of a link over all processes that this agent has known."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent_again: int = 0
    duplicates: int = 0
    corrupt: int = 0


COUNTED = ("sent_bytes", "received_bytes", "sent_again", "duplicates", "corrupt")


@dataclass
class Link:
    """One path to one address of a peer.

    reached   since when a probe gets through, while nobody uses it
    left      nobody uses it any more, it was lost then, and nothing has come over its path since
    """

    path: int
    interface: str
    local: str
    remote: str
    since: float
    state: LinkState = LinkState.UNUSED
    reason: str = ""
    words: dict[int, Word] = field(default_factory=dict)
    flaps: list[Flap] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    reached: float | None = None
    left: bool = False

    @property
    def id(self) -> LinkId:
        return self.local, self.remote


@dataclass
class Process:
    """One process that uses the network. `cut`: addresses of peers of which it hears over no path."""

    heard: float
    rank: int | None = None
    paged: bool = False  # it has a page
    updated_us: int = 0
    cut: set[str] = field(default_factory=set)
    counts: dict[LinkId, tuple[int, ...]] = field(default_factory=dict)


class Paths:
    """All links of a node."""

    def __init__(self, *, slow_share: float, window_s: float) -> None:
        self.links: dict[LinkId, Link] = {}
        self.processes: dict[int, Process] = {}
        self.rates: Rates[str] = Rates(slow_share)  # by path, as its local address
        self.link_rates: Rates[LinkId] = Rates(slow_share)
        self.left_out = 0  # links beyond `MOST_LINKS`
        self._window_s = window_s

    # ------------------------------------------------------------ what comes in

    def heard(self, report: Report, now: float) -> None:
        """Take in a report, which came at `now`."""
        process = self._process(report.pid, now)
        process.rank = report.rank if report.rank is not None else process.rank
        match report.what:
            case "path_down":
                self._lost(report, now)
            case "path_up":
                self._back(report, now)
            case "peer_unreachable":
                process.cut.update(report.remotes)
                self._excuse(report.pid, report.remotes, now)
            case "peer_back":
                process.cut.difference_update(report.remotes)
                self._accuse(report.pid, report.remotes, now)
            case "corrupt" | "gave_up":
                pass  # the page counts them; the path is lost, or the job hears of it

    def _lost(self, report: Report, now: float) -> None:
        link = self._link(report.local, report.remote, report.path, report.interface, now)
        if link is not None:
            excused = report.remote in self.processes[report.pid].cut and report.reason not in LOCAL
            word = Word(LinkState.DOWN, now, report.reason, excused, us_of(report))
            self._say(link, report.pid, word, now, sudden=True)

    def _back(self, report: Report, now: float) -> None:
        """A link is back. If nobody has told of its loss, the report of that was dropped."""
        link = self._link(report.local, report.remote, report.path, report.interface, now)
        if link is None:
            return
        cut = self.processes[report.pid].cut
        since = now - report.outage_ms / 1000 - SAME_FLAP_S
        known = any(flap.at >= since and flap.pids & {report.pid, FORMER} for flap in link.flaps)
        before = link.words.get(report.pid)
        excused = report.remote in cut or (before is not None and before.state is LinkState.DOWN)
        if report.outage_ms and not known and not excused:
            self._flap(link, report.pid, "", now)
        cut.discard(report.remote)
        self._say(link, report.pid, Word(LinkState.UP, now, told_us=us_of(report)), now)

    def looked(self, page: NetPage, now: float) -> None:
        """Take in a page, as it was read just now."""
        process = self._process(page.pid, now, paged=True)
        if page.updated_us == process.updated_us:
            return
        if page.updated_us < process.updated_us:  # its clock was set back: what it dated before is no younger
            for known in self.links.values():
                if page.pid in known.words:
                    known.words[page.pid].told_us = 0
        before = process.heard
        process.heard, process.updated_us, process.rank = now, page.updated_us, page.rank
        there = set()
        for row in page.rows:
            link = self._link(row.local, row.remote, row.path, row.interface, now)
            if link is None:
                continue
            there.add(link.id)
            self._count(process, link, row)
            self._read(process, page, link, row, now, before)
        if page.full:
            return
        for link in list(self.links.values()):
            word = link.words.get(page.pid)
            if word is not None and link.id not in there and page.updated_us > word.told_us + SETTLED_US:
                self._unsay(link, page.pid, now)

    def ended(self, pid: int, now: float) -> None:
        """A process is gone: it says nothing any more."""
        if self.processes.pop(pid, None) is not None:
            for link in self.links.values():
                self._unsay(link, pid, now)

    def explain(self, link: Link, reason: str, now: float) -> None:
        """Why a link is lost, where whoever said so did not say why."""
        for word in link.words.values():
            if word.state is LinkState.DOWN and not word.reason:
                word.reason = reason
        self._settle(link, now)

    def probed(self, link: LinkId, reached: bool, now: float) -> None:
        """A try to reach a peer's address over a path that nobody uses."""
        found = self.links.get(link)
        if found is not None:
            found.reached = (found.reached if found.reached is not None else now) if reached else None
            if reached:
                self._works(found.local)

    def pass_time(self, now: float, kept: Iterable[LinkId] = ()) -> None:
        """Stopped processes fall silent, and what is long over is forgotten; `kept`: links that are not."""
        self.rates.pass_time(now)
        self.link_rates.pass_time(now)
        for link in self.links.values():
            self._settle(link, now)
            link.flaps = [flap for flap in link.flaps if now - flap.at < self._window_s]
            if link.state in IN_USE:
                self._works(link.local)
        stay = set(kept)
        old = [
            link.id
            for link in self.links.values()
            if link.state is LinkState.UNUSED and not link.flaps and not link.words and link.id not in stay
            if now - link.since >= self._window_s
        ]
        for gone in old:
            del self.links[gone]
        self.rates.keep({local for local, _ in self.links})
        self.link_rates.keep(self.links)

    # ------------------------------------------------------------ words

    def _process(self, pid: int, now: float, *, paged: bool = False) -> Process:
        process = self.processes.setdefault(pid, Process(now))
        process.paged = process.paged or paged
        if not paged:
            process.heard = now
        return process

    def _link(self, local: str, remote: str, path: int, interface: str, now: float) -> Link | None:
        link = self.links.get((local, remote))
        if link is None:
            if len(self.links) >= MOST_LINKS:
                self.left_out += 1
                return None
            link = self.links[local, remote] = Link(path, interface, local, remote, now)
        link.path, link.interface = path, interface or link.interface
        return link

    def _say(self, link: Link, pid: int, word: Word, now: float, *, sudden: bool = False) -> None:
        """A process has a new word on a link. That it is lost, as it was already, only adds the reason.

        `sudden`: it was there until now. Of one that is lost when it is seen for the first time nobody knows that.
        """
        before = link.words.get(pid)
        if before is not None:
            word.live, word.round_trip_us = before.live, before.round_trip_us
            if before.state is word.state is LinkState.DOWN:
                word.since, word.excused = before.since, before.excused
                word.reason = word.reason or before.reason
                self._reason_of_flap(link, pid, word)
        link.words[pid] = word
        link.reached = None
        fresh = word.state is LinkState.DOWN and (before is None or before.state is not LinkState.DOWN)
        if fresh and not word.excused and (sudden or before is not None):
            self._flap(link, pid, word.reason, now)
        self._settle(link, now)

    def _unsay(self, link: Link, pid: int, now: float) -> None:
        if link.words.pop(pid, None) is not None:
            self._settle(link, now)

    def _read(self, process: Process, page: NetPage, link: Link, row: Row, now: float, before: float) -> None:
        """What a row says, if no report is newer. `before`: when the process was heard before that."""
        word = link.words.get(page.pid)
        if word is not None and page.updated_us < word.told_us:
            return
        if row.state is not RowState.DOWN and row.live == 0:
            self._unsay(link, page.pid, now)
            return
        state = (LinkState.DOWN, LinkState.UP, LinkState.SUSPECT)[row.state]
        if word is None or word.state is not state:
            since = now
            if state is LinkState.DOWN and row.down_since_us:
                since = now - max(0.0, (page.updated_us - row.down_since_us) / 1e6)
                since = since if word is None else max(since, before)  # it was there; its clock may have been set
            excused = state is LinkState.DOWN and row.remote in process.cut
            told_us = word.told_us if word is not None else 0
            self._say(link, page.pid, Word(state, since, excused=excused, told_us=told_us), now)
        link.words[page.pid].live, link.words[page.pid].round_trip_us = row.live, row.round_trip_us

    def _count(self, process: Process, link: Link, row: Row) -> None:
        """Add what has come since the last look. Of a process seen for the first time all before counts as nothing."""
        counts = tuple(int(getattr(row, name)) for name in COUNTED)
        before = process.counts.get(link.id, counts)
        more = [max(0, now - then) for now, then in zip(counts, before, strict=True)]
        process.counts[link.id] = counts
        for name, each in zip(COUNTED, more, strict=True):
            setattr(link.totals, name, min(MOST_COUNTED, getattr(link.totals, name) + each))
        self.rates.add(link.local, more[0], more[1])
        self.link_rates.add(link.id, more[0], more[1])
        if row.live and row.round_trip_us:
            self.rates.time(link.local, row.round_trip_us)
        if more[1]:  # bytes came: it is heard
            process.cut.discard(link.remote)

    def _excuse(self, pid: int, remotes: Iterable[str], now: float) -> None:
        """The peer is not heard at all: what was lost of it just now was its own doing."""
        gone = set(remotes)
        for link in self.links.values():
            word = link.words.get(pid)
            if link.remote not in gone or word is None or word.reason in LOCAL:
                continue
            word.excused = word.state is LinkState.DOWN
            for flap in link.flaps:
                if now - flap.at < SAME_LOSS_S and flap.reason not in LOCAL:
                    flap.pids.discard(pid)
            link.flaps = [flap for flap in link.flaps if flap.pids]
            self._settle(link, now)

    def _accuse(self, pid: int, remotes: Iterable[str], now: float) -> None:
        """The peer is heard again: what is still lost of it is lost for itself, from now on."""
        back = set(remotes)
        for link in self.links.values():
            word = link.words.get(pid)
            if link.remote in back and word is not None and word.excused:
                word.excused, word.since = False, now
                self._settle(link, now)

    # ------------------------------------------------------------ flaps and states

    def _flap(self, link: Link, pid: int, reason: str, now: float) -> None:
        for flap in reversed(link.flaps):
            if now - flap.at > SAME_FLAP_S:
                break
            if pid not in flap.pids:
                flap.pids.add(pid)
                return
        link.flaps = [*link.flaps, Flap(now, reason, {pid})][-MOST_FLAPS:]

    def _reason_of_flap(self, link: Link, pid: int, word: Word) -> None:
        """A page tells of a loss before the report does, but not why."""
        if link.flaps and pid in link.flaps[-1].pids and not link.flaps[-1].reason:
            link.flaps[-1].reason = word.reason

    def _speaks(self, pid: int, now: float) -> bool:
        """Whether the words of a process count: it is there, and not stopped."""
        process = self.processes.get(pid)
        return process is not None and (not process.paged or now - process.heard < STALE_S)

    def _settle(self, link: Link, now: float) -> None:
        """The link's state, from all words."""
        words = [word for pid, word in link.words.items() if self._speaks(pid, now)]
        up = [word for word in words if word.state is not LinkState.DOWN]
        lost = [word for word in words if word.state is LinkState.DOWN and not word.excused]
        since = now
        if up:
            cut = all(link.remote in self.processes[pid].cut for pid in link.words if self._speaks(pid, now))
            suspect = all(word.state is LinkState.SUSPECT for word in up)
            state = LinkState.UNREACHABLE if cut else LinkState.SUSPECT if suspect else LinkState.UP
        elif lost:
            state = LinkState.DOWN
            since = max(word.since for word in lost)
            link.reason = next((word.reason for word in lost if word.reason in LOCAL), lost[0].reason)
        else:
            state = LinkState.UNREACHABLE if words else LinkState.UNUSED
        if state is not link.state:
            was_lost = link.state is LinkState.DOWN or link.left
            link.state, link.since = state, min(since, now)
            link.left = was_lost and state in (LinkState.UNUSED, LinkState.UNREACHABLE)
            if state in IN_USE:
                self._works(link.local)
        elif state is LinkState.DOWN:
            link.since = min(since, now)

    def _works(self, local: str) -> None:
        """Something comes over a path: what was lost before tells nothing of it any more."""
        for link in self.links.values():
            if link.local == local:
                link.left = False

    # ------------------------------------------------------------ looking

    def of_path(self, local: str) -> list[Link]:
        """The links of a path. Those to our own addresses only if there are no others: they never leave the node."""
        mine = {known for known, _ in self.links}
        found = [link for link in self.links.values() if link.local == local]
        return [link for link in found if link.remote not in mine] or found

    def users(self, local: str) -> set[int]:
        """The processes that use a path."""
        return {pid for link in self.links.values() if link.local == local for pid in link.words}

    def all_users(self) -> set[int]:
        """The processes that use any path."""
        return {pid for link in self.links.values() for pid in link.words}


def us_of(report: Report) -> int:
    """When a report was made, in us since 1970."""
    return int(report.ts * 1e6)


# ---------------------------------------------------------------- whether an address can be reached

# A TCP connection is tried, from the path's own address and through its interface. Whatever comes back shows that the
# way is there in both directions: also that nobody listens. Nothing back, or no such address here, shows that it is
# not.

PROBE_S = 1.0  # how long an answer may take


async def reaches(local: str, remote: str, port: int, interface: str = "", within_s: float = PROBE_S) -> bool:
    """Whether anything at `remote` answers what comes from `local`. Never raises for what an address may be."""
    try:
        family = socket.AF_INET6 if ip_address(local).version == 6 else socket.AF_INET
        ip_address(remote)  # a name would be looked up
    except ValueError:
        return False
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            through(probe, interface)
            probe.bind((local, 0))
            async with asyncio.timeout(within_s):
                await asyncio.get_running_loop().sock_connect(probe, (remote, port))
        except (ConnectionRefusedError, ConnectionResetError):
            return True
        except (OSError, TimeoutError):
            return False
        return True


def through(probe: socket.socket, interface: str) -> None:
    """Leave by this interface only, not by whichever has a route, where the kernel lets us (Linux 5.7 lets anybody)."""
    if interface:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode() + b"\0")
        except PermissionError:
            pass  # the own address has to do
