"""Own loops: what a script calls in a loop that is not tracked, such as `while run.global_step < n`.

Such a loop may have no end, and the record must. It is found by its places: the first place to which the script comes
a second time is the head of a loop. Where the head asks for `run.global_step`, and a condition hangs on it, the script
finds its way by that. Then only the last turn is kept: a `Skip` stands for those before it, and a replacement that asks
at the same place is told the point of the last turn.
"""

from __future__ import annotations

import dis
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType

import torchrelay

_OURS = str(Path(torchrelay.__file__).parent)
_HOPS = 8
_EVERY = 100_000  # places that are known by then are forgotten: code that is made anew each time has no end, either


@dataclass(frozen=True, slots=True)
class Place:
    """Where the script is, its callers included. There is one for each line and way to it."""

    key: str  # the same in every process
    line: str  # for people
    decides: bool = False  # what is asked for here is the condition of a loop of the script's own, no `for`


class Places:
    """The places of a script."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Place] = {}
        self._by_key: dict[str, Place] = {}
        self._codes: list[CodeType] = []  # held, so that no other one gets its id

    def here(self, depth: int) -> Place:
        """The place of whoever called so many functions further up."""
        frame: FrameType | None = sys._getframe(depth + 1)
        chain: list[int] = []
        first = frame
        while frame is not None:
            chain += (id(frame.f_code), frame.f_lasti)
            frame = frame.f_back
        key = tuple(chain)
        found = self._known.get(key)
        if found is None:
            if len(self._known) > _EVERY:
                self._known.clear()
                self._codes.clear()
            found = self._known[key] = self._look(first)
        return found

    def _look(self, frame: FrameType | None) -> Place:
        frames = list(_outwards(frame))
        self._codes += [frame.f_code for frame in frames]
        own = [frame for frame in frames if not frame.f_code.co_filename.startswith((_OURS, "<frozen"))]
        lines = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in own]
        key = hashlib.blake2b("\n".join(lines).encode("utf-8", "replace"), digest_size=12).hexdigest()
        line = Path(own[0].f_code.co_filename).name + f":{own[0].f_lineno}" if own else "no line of the script"
        place = self._by_key.get(key)
        if place is None:
            decides = any(_decides(frame.f_code, frame.f_lineno) for frame in own)
            place = self._by_key[key] = Place(key, line, decides)
        return place


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _decides(code: CodeType, line: int) -> bool:
    """Whether this line has a condition that ends the innermost loop around it, which is no `for`."""
    instructions = list(dis.get_instructions(code))
    at = {one.offset: number for number, one in enumerate(instructions)}
    loops = [(int(one.argval), one.offset) for one in instructions if "JUMP_BACKWARD" in one.opname]
    stretches = [(start, end) for start, end, number in code.co_lines() if number == line]
    for number, one in enumerate(instructions):
        if "JUMP" not in one.opname or "IF" not in one.opname:
            continue
        if not any(start <= one.offset < end for start, end in stretches):
            continue
        around = [(begin, end) for begin, end in loops if begin <= one.offset <= end]
        if not around:
            continue
        begin, end = min(around, key=lambda loop: loop[1] - loop[0])
        ways = (at[int(one.argval)], number + 1)
        if instructions[at[begin]].opname != "FOR_ITER" and any(_leaves(instructions, at, way, end) for way in ways):
            return True
    return False


def _leaves(instructions: list[dis.Instruction], at: dict[int, int], number: int, end: int) -> bool:
    """Whether what begins with this instruction is beyond the loop that ends there, or goes there at once."""
    for _ in range(_HOPS):
        if number >= len(instructions) or instructions[number].offset > end:
            return True
        one = instructions[number]
        if "RETURN" in one.opname:
            return True
        if "JUMP_FORWARD" in one.opname:
            number = at[int(one.argval)]
        elif one.opname in ("NOP", "EXTENDED_ARG", "POP_TOP", "LOAD_CONST", "CACHE", "NOT_TAKEN"):
            number += 1
        else:
            return False
    return False


@dataclass(slots=True)
class _Seen:
    first: int  # how long the trace was when the script came here first, and last
    last: int
    place: Place
    steps: int = 0
    asked: bool = False


@dataclass(slots=True)
class Rhythm:
    """What a script has done within one item of a tracked loop, or outside of all, by its places."""

    seen: dict[str, _Seen] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)  # where in the trace the `Skip` of a loop stands

    def come(self, place: Place, length: int, *, step: bool = False, asks: bool = False) -> _Seen:
        """The script is at this place, when so much is in the trace."""
        found = self.seen.get(place.key)
        if found is None:
            found = self.seen[place.key] = _Seen(length, length, place)
        found.last = length
        found.steps += step
        found.asked = asks
        return found

    def leads(self, found: _Seen) -> bool:
        """Whether this is the head of a loop, by what it asks for: whatever came before it came no more since."""
        before = (seen for seen in self.seen.values() if _earlier(seen, found))
        return found.place.decides and all(seen.last <= found.first for seen in before)

    def asked_before(self, found: _Seen) -> bool:
        """Whether the script had asked for the point at a place of a condition before it came here first."""
        return any(seen.asked and seen.place.decides and seen.first <= found.first for seen in self.seen.values())

    def cut(self, length: int) -> None:
        """The trace is so long now: what was seen behind that is forgotten."""
        self.seen = {key: seen for key, seen in self.seen.items() if seen.first < length}
        for seen in self.seen.values():
            seen.last = min(seen.last, length)
        self.heads = {key: at for key, at in self.heads.items() if at < length}


def _earlier(seen: _Seen, found: _Seen) -> bool:
    return seen is not found and seen.first < found.first
