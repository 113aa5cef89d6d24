"""Findings: which of a node's paths are at fault, whose fault it is, when it is over, and what is told of it.

Pure: times are given. A finding becomes a taint that is asked for (`Register`), and news for people and figures.

A path is found at fault when it is lost for longer than `down_s`, was lost `flaps` times within `window_s`, or has
carried less than `slow_share` of what it usually does for `slow_s`. Where the fault is:

    the kernel says that the interface is down, or all of two or more peers are concerned    here
    some peers are concerned, others are not                                                there, or on the way
    there is only one peer                                                                   either end

Only what is here leads to a taint: what is at the other end is found there. Of two ends that cannot be told apart the
one with the higher address says it is here, and later (after twice `down_s` and `slow_s`, half as many flaps again), so
that the other end had time to know better. If that was the wrong one, the other sees its next peer lost, too.

It is over when nothing of that holds and the path has been whole for `heal_s`: somebody uses it, or, as there may be
nobody left on a node whose ranks have moved away, a probe gets through. How fast a path is cannot be probed: that it
was slow, or has flapped, is not taken back before `window_s` is over.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from enum import StrEnum
from ipaddress import ip_address

from msgspec import Struct, structs

from torchrelay.agent.network.paths import FORMER, IN_USE, LOCAL, Flap, Link, LinkId, LinkState, Paths
from torchrelay.protocol.messages.events import Event, TaintCleared, TaintSet
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.wire.files.launch import PathLimits
from torchrelay.wire.messages.pathnews import SOURCE, FindingNews, LinkNews, NetworkNews, PathNews


class Kind(StrEnum):
    """What is wrong with a path; the worst first."""

    DOWN = "down"
    FLAPPING = "flapping"
    SLOW = "slow"


class Where(StrEnum):
    """Whose fault it is."""

    HERE = "here"
    THERE = "there"
    EITHER = "either"


WORDS = {
    Where.HERE: "the interface of this node or its link",
    Where.THERE: "the far end or the way there",
    Where.EITHER: "there is no other peer to tell which end it is",
}


class Finding(Struct, frozen=True, kw_only=True):
    """A path at fault. `ours`: this node is to be left for it. `pids`: who uses the path; `everyone`: all do."""

    path: int
    interface: str
    local: str
    remotes: tuple[str, ...]  # the peers' addresses that are concerned
    kind: Kind
    where: Where
    ours: bool
    evidence: str
    since: float
    pids: tuple[int, ...] = ()
    everyone: bool = True
    whole: float | None = None  # since when nothing of it holds any more

    @property
    def name(self) -> str:
        """The path for people and for a taint's key: eth1, or its address."""
        return self.interface or self.local


class Memory(Struct, frozen=True, kw_only=True):
    """What an agent that is restarted must know: the findings, and the flaps by link (path, local, remote)."""

    findings: tuple[Finding, ...] = ()
    flaps: tuple[tuple[int, str, str, str, tuple[tuple[float, str], ...]], ...] = ()


class Judge:
    """Keeps the findings of a node."""

    def __init__(self, limits: PathLimits) -> None:
        self.limits = limits
        self.paths = Paths(slow_share=limits.slow_share, window_s=limits.window_s)
        self.findings: dict[str, Finding] = {}  # by path, as its local address
        self._slow: dict[str, float] = {}  # when it was last seen to be slow

    def judge(self, now: float) -> None:
        """Let time pass: `findings` is right afterwards."""
        kept = [(found.local, remote) for found in self.findings.values() for remote in found.remotes]
        self.paths.pass_time(now, kept)
        for local in {local for local, _ in self.paths.links} | set(self.findings):
            before = self.findings.get(local)
            after = self._next(local, before, now)
            if after is None:
                self.findings.pop(local, None)
            else:
                self.findings[local] = after

    def _next(self, local: str, before: Finding | None, now: float) -> Finding | None:
        """The finding of a path now, given the one there was."""
        holds = self._now(local, before, now)
        if before is None or not before.ours:
            return holds if before is None or holds is None else self._go_on(before, holds)
        if holds is not None and holds.ours:
            return self._go_on(before, holds)
        if not self._whole(before, now):
            return structs.replace(before, whole=None)
        whole = before.whole if before.whole is not None else now
        return holds if now - whole >= self.limits.heal_s else structs.replace(before, whole=whole)

    def _go_on(self, before: Finding, holds: Finding) -> Finding:
        """Its evidence and its place stay as they were told, unless it has become something else."""
        same = (before.kind, before.where, before.ours) == (holds.kind, holds.where, holds.ours)
        if not same:
            return structs.replace(holds, since=before.since)
        return structs.replace(before, remotes=holds.remotes, whole=None)

    # ------------------------------------------------------------ what holds now

    def _now(self, local: str, before: Finding | None, now: float) -> Finding | None:
        links = self.paths.of_path(local)
        found = [each(links, before, now) for each in (self._down, self._flapping, self._slowed)]
        ours = [one for one in found if one is not None and one.ours]
        return next(iter(ours), None) or next((one for one in found if one is not None), None)

    def _down(self, links: list[Link], _: Finding | None, now: float) -> Finding | None:
        lost = [link for link in links if link.state is LinkState.DOWN]
        if not lost:
            return None
        longest = max(now - link.since for link in lost)
        if longest < self.limits.down_s:
            return None
        lost += [link for link in links if link.left]  # its peer has gone, and the next one is lost, too
        where = locate(lost, [link for link in links if link.state in IN_USE])
        ours = decided(where, lost, later=longest >= 2 * self.limits.down_s)
        reasons = ", ".join(sorted({link.reason for link in lost if link.reason}))
        told = f"lost for {longest:.0f} s{f' ({reasons})' if reasons else ''}"
        return self._finding(Kind.DOWN, where, ours, lost, links, told, now)

    def _flapping(self, links: list[Link], _: Finding | None, now: float) -> Finding | None:
        most = max((len(link.flaps) for link in links), default=0)
        if most < self.limits.flaps:
            return None
        # Its peers are concerned to different degrees, as each was in use at other times.
        shaky = [link for link in links if 2 * len(link.flaps) >= self.limits.flaps]
        steady = [link for link in links if link not in shaky and link.state is not LinkState.UNUSED]
        flaps = [flap for link in shaky for flap in link.flaps]
        where = locate(shaky, steady, local=mostly_local(flaps))
        ours = decided(where, shaky, later=2 * most >= 3 * self.limits.flaps)
        told = f"lost {most} times within {span_in_words(self.limits.window_s)}"
        return self._finding(Kind.FLAPPING, where, ours, shaky, links, told, now)

    def _slowed(self, links: list[Link], before: Finding | None, now: float) -> Finding | None:
        local = links[0].local if links else ""
        if self.unused(links):  # how fast it is nobody knows
            was_slow = before is not None and before.kind is Kind.SLOW
            seen = self._slow.get(local, before.since if before is not None else now)
            return before if was_slow and now - seen < self.limits.window_s else None
        rates, since = self.paths.rates, self.paths.rates.low_s(local)
        if since < self.limits.slow_s:
            return None
        self._slow[local] = now
        used = [link for link in links if link.state in IN_USE]
        parts = {link.id: self.paths.link_rates.part(link.id) for link in used}
        low = [link for link in used if (part := parts[link.id]) is not None and part < self.limits.slow_share]
        low = low or used
        where = locate(low, [link for link in used if link not in low], local=False)
        ours = decided(where, low, later=since >= 2 * self.limits.slow_s)
        told = f"{rates.evidence(local)} for {since:.0f} s, while the other paths carry theirs"
        return self._finding(Kind.SLOW, where, ours, low, links, told, now) if low else None

    def _finding(
        self, kind: Kind, where: Where, ours: bool, concerned: list[Link], links: list[Link], told: str, now: float
    ) -> Finding:
        one = concerned[0]
        users = self.paths.users(one.local)
        name = f"{one.interface} ({one.local})" if one.interface else one.local
        known = [link for link in links if link in concerned or link.state is not LinkState.UNUSED]
        evidence = f"path {name} {told}, {to_whom(concerned, len(known))}: {WORDS[where]}"
        return Finding(
            path=one.path,
            interface=one.interface,
            local=one.local,
            kind=kind,
            where=where,
            ours=ours,
            remotes=tuple(sorted(link.remote for link in concerned)),
            evidence=evidence,
            since=now,
            pids=tuple(sorted(users)),
            everyone=users >= self.paths.all_users(),
        )

    # ------------------------------------------------------------ whether it is over

    def _whole(self, finding: Finding, now: float) -> bool:
        """Whether the path gets through now, as far as it is this node's."""
        links = self.paths.of_path(finding.local)
        used = [link for link in links if link.state in IN_USE]
        lost = [link for link in links if link.state is LinkState.DOWN]
        if lost:
            return bool(used) and locate(lost, used) is Where.THERE
        return bool(used) or any(link.reached is not None and link.reached <= now for link in links)

    def probes(self) -> Iterator[LinkId]:
        """The links to try: those of paths that are at fault, and that nobody uses any more."""
        for finding in self.findings.values():
            if finding.ours and self.unused(self.paths.of_path(finding.local)):
                for remote in finding.remotes:
                    if (finding.local, remote) in self.paths.links:
                        yield finding.local, remote

    @staticmethod
    def unused(links: list[Link]) -> bool:
        return not any(link.state in (*IN_USE, LinkState.DOWN) for link in links)

    # ------------------------------------------------------------ across a restart of the agent

    def memory(self) -> Memory:
        """What the next agent of this node must know."""
        flaps = tuple(
            (link.path, link.interface, *link.id, tuple((flap.at, flap.reason) for flap in link.flaps))
            for link in self.paths.links.values()
            if link.flaps
        )
        return Memory(findings=tuple(self.findings.values()), flaps=flaps)

    def remember(self, memory: Memory, now: float) -> None:
        """Go on where the agent before this one stopped. Its clock was the same."""
        for path, interface, local, remote, flaps in memory.flaps:
            known = [Flap(at, reason, {FORMER}) for at, reason in flaps if at <= now]
            self.paths.links[local, remote] = Link(path, interface, local, remote, now, flaps=known)
        for finding in memory.findings:
            self.findings[finding.local] = structs.replace(finding, whole=None)
            for remote in finding.remotes:
                left = finding.kind is Kind.DOWN
                link = Link(finding.path, finding.interface, finding.local, remote, now, left=left)
                self.paths.links.setdefault(link.id, link)


# ---------------------------------------------------------------- where it is


def locate(concerned: list[Link], fine: list[Link], *, local: bool | None = None) -> Where:
    """Whose fault it is, from the links that are concerned and those that are not."""
    if local if local is not None else any(link.reason in LOCAL for link in concerned):
        return Where.HERE
    if fine:
        return Where.THERE
    return Where.HERE if len(concerned) > 1 else Where.EITHER


def decided(where: Where, concerned: list[Link], *, later: bool) -> bool:
    """Whether this node is to be left."""
    if where is Where.EITHER:
        return later and higher(concerned[0].local, concerned[0].remote)
    return where is Where.HERE


def higher(local: str, remote: str) -> bool:
    """Whether ours is the higher of two addresses. Both ends come to opposite answers."""
    try:
        mine, other = ip_address(local), ip_address(remote)
    except ValueError:
        return local > remote
    return (mine.version, int(mine)) > (other.version, int(other))


def mostly_local(flaps: list[Flap]) -> bool:
    """Whether the kernel has told of most of them itself."""
    return 2 * sum(flap.reason in LOCAL for flap in flaps) > len(flaps)


# ---------------------------------------------------------------- words


def to_whom(concerned: list[Link], known: int) -> str:
    """In words: `to 10.0.1.2 only, 1 of 3 peers`, `to all 3 peers`, `to its only peer, 10.0.1.2`."""
    names = ", ".join(sorted(link.remote for link in concerned)[:3]) + (", ..." if len(concerned) > 3 else "")
    if known == 1:
        return f"to its only peer, {names}"
    if len(concerned) == known:
        return f"to all {known} peers ({names})"
    return f"to {names} only, {len(concerned)} of {known} peers"


def span_in_words(seconds: float) -> str:
    """In words: 90 s, 10 min, an hour."""
    if seconds == 3600:
        return "an hour"
    return f"{seconds / 60:.0f} min" if seconds >= 120 and seconds % 60 == 0 else f"{seconds:g} s"


# ---------------------------------------------------------------- what people are told of it


def tell_paths(judge: Judge, now: float, taint_of: Callable[[str], str]) -> NetworkNews:
    """All paths, links and findings. `taint_of`: the key of the taint that lies for a path, by its local address."""
    by_path: dict[str, list[Link]] = {}
    for link in judge.paths.links.values():
        by_path.setdefault(link.local, []).append(link)
    numbers = {local: min(link.path for link in links) for local, links in by_path.items()}  # processes may differ
    found = tuple(
        PathNews(
            path=numbers[local],
            interface=next((link.interface for link in links if link.interface), ""),
            local=local,
            links=tuple(tell_link(judge, link, now) for link in sorted(links, key=lambda one: one.remote)),
            finding=tell_finding(judge, local, now, taint_of(local)),
        )
        for local, links in sorted(by_path.items(), key=lambda one: (numbers[one[0]], one[0]))
    )
    return NetworkNews(paths=found, processes=len(judge.paths.processes), left_out=judge.paths.left_out)


def tell_link(judge: Judge, link: Link, now: float) -> LinkNews:
    sent, received = judge.paths.link_rates.last(link.id)
    words = link.words.values()
    return LinkNews(
        remote=link.remote,
        state=str(link.state),
        state_s=max(0.0, now - link.since),
        reason=link.reason,
        live=sum(word.live for word in words),
        round_trip_us=max((word.round_trip_us for word in words), default=0),
        flaps=len(link.flaps),
        sent_rate=sent,
        received_rate=received,
        **asdict(link.totals),
    )


def tell_finding(judge: Judge, local: str, now: float, taint: str) -> FindingNews | None:
    finding = judge.findings.get(local)
    if finding is None:
        return None
    return FindingNews(
        kind=str(finding.kind),
        where=str(finding.where),
        evidence=finding.evidence,
        for_s=now - finding.since,
        taint=taint,
    )


# ---------------------------------------------------------------- which taints are asked for

# A taint is asked for with the finding that it follows from, and lifted when there is none any more. One that somebody
# else has set on the same place under the same key is left alone, by the protocol (`yields`).

logger = logging.getLogger(__name__)

KEY = "network/"  # the path's name follows
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")


class Held(Struct, frozen=True, kw_only=True):
    """A taint that we have asked for. `told`: the last word on it is in the journal; `over`: that word is its end."""

    local: str  # the path, as its local address
    slot: int | None  # None: the whole node
    key: str
    value: str
    reason: str
    told: bool = False
    over: bool = False


class Register:
    """All taints that a node's agent has asked for, and that are not over.

    `places_of`: the slots that a finding concerns, or None for the whole node. `tell` is called with each event.
    """

    def __init__(
        self, node: NodeId, *, places_of: Callable[[Finding], tuple[int | None, ...]], tell: Callable[[Event], None]
    ) -> None:
        self.held: tuple[Held, ...] = ()
        self._node = node
        self._places_of = places_of
        self._tell = tell

    def follow(self, findings: Iterable[Finding], names: dict[str, str]) -> None:
        """Ask for what follows from the findings, and lift what follows from none. `names`: of the paths."""
        ours = {finding.local: finding for finding in findings if finding.ours}
        for held in [held for held in self.held if not held.over]:
            finding = ours.get(held.local)
            if finding is None:
                self._put(structs.replace(held, told=False, over=True))
            elif finding.kind != held.value:
                self._put(structs.replace(held, value=str(finding.kind), reason=finding.evidence, told=False))
        known = {held.local for held in self.held if not held.over}
        for local in sorted(ours.keys() - known):
            finding = ours[local]
            key = KEY + _UNSAFE.sub("-", names[local])
            if any(held.key == key and not held.over for held in self.held):  # another path of that name
                key = KEY + _UNSAFE.sub("-", local)
            for slot in self._places_of(finding):
                reason = finding.evidence
                self._put(Held(local=local, slot=slot, key=key, value=str(finding.kind), reason=reason))

    def go_on(self, held: Iterable[Held]) -> None:
        """Those that an agent before this one has asked for; what may not have been heard is said again."""
        self.held = tuple(held)
        for each in self.held:
            if not each.told:
                self._say(each)

    def compare(self, lying: Iterable[tuple[int | None, str]]) -> None:
        """Lift those of the taints that lie on our node, by slot and key, of which nothing is known here.

        The agent that asked for them has left no memory: its machine was started anew, or its folder is gone. Whoever
        finds the path at fault again says so again.
        """
        known = {(held.slot, held.key) for held in self.held}
        for slot, key in lying:
            if (slot, key) not in known:
                logger.warning("%s was set by an agent before this one, and nothing is known of it any more", key)
                self._put(Held(local="", slot=slot, key=key, value="", reason="", over=True))

    def acked(self, event: Event) -> None:
        """An event of ours is in the journal. What is over, and told, is forgotten."""
        if isinstance(event, TaintSet | TaintCleared):
            over = isinstance(event, TaintCleared)
            meant = [held for held in self.held if (held.slot, held.key, held.over) == (event.slot, event.key, over)]
            rest = tuple(held for held in self.held if held not in meant)
            self.held = rest if over else rest + tuple(structs.replace(held, told=True) for held in meant)

    def key_of(self, local: str) -> str:
        """The key of the taint that lies for a path; empty if none does."""
        return next((held.key for held in self.held if held.local == local and not held.over), "")

    def _put(self, after: Held) -> None:
        """In place of what was said of the same taint before."""
        rest = tuple(held for held in self.held if (held.slot, held.key) != (after.slot, after.key))
        self.held = (*rest, after)
        self._say(after)

    def _say(self, held: Held) -> None:
        if held.over:
            logger.warning("%s is lifted", held.key)
            self._tell(TaintCleared(node=self._node, slot=held.slot, key=held.key, source=SOURCE, yields=True))
            return
        logger.warning("%s is %s: %s", held.key, held.value, held.reason)
        self._tell(
            TaintSet(
                node=self._node,
                slot=held.slot,
                key=held.key,
                value=held.value,
                reason=held.reason,
                source=SOURCE,
                yields=True,
            )
        )
