"""Held: what is held against this node, or slots of it, for its network paths: which taints were asked for.

A taint is asked for with the finding that it follows from, and lifted when there is none any more. One that somebody
else has set on the same place under the same key is left alone, by the protocol (`yields`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable

from msgspec import Struct, structs

from torchrelay.agent.network.findings import Finding
from torchrelay.protocol.messages.events import Event, TaintCleared, TaintSet
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.wire.messages.pathnews import SOURCE

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
                node=self._node, slot=held.slot, key=held.key, value=held.value, reason=held.reason, source=SOURCE,
                yields=True,
            )
        )  # fmt: skip
