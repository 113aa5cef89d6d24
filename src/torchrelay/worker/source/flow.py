"""Flow: what becomes of the items of a loop in a function of the script, read from its bytecode."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

_ENTRIES = 4096
_ENDS = ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD")  # what follows in the code does not come next


class Found(NamedTuple):
    """What is known of a function that is given an item at some place."""

    code: CodeType  # held, so that no other one gets its id
    needed: frozenset[str]  # variables that are read before they are assigned once the item has come
    yields_each: bool  # it yields once before it comes to this place again, whichever way it goes


_known: dict[tuple[int, int], Found] = {}


def of(code: CodeType, at: int) -> Found:
    """Of the instruction at this offset, which fetches an item."""
    found = _known.get((id(code), at))
    if found is None:
        if len(_known) >= _ENTRIES:
            _known.clear()
        flow = _Flow(code, at)
        found = _known[id(code), at] = Found(code, frozenset(flow.needed()), flow.yields_each())
    return found


class _Flow:
    def __init__(self, code: CodeType, at: int) -> None:
        self._all = list(dis.get_instructions(code))
        self._number_of = {one.offset: number for number, one in enumerate(self._all)}
        self._fetch = self._number_of.get(at, len(self._all))

    def needed(self) -> Iterator[str]:
        """At the end of a loop a replacement is given the last item again: only what follows an item counts."""
        for name in {name for one in self._all for name, _ in _uses(one)}:
            todo, seen = [self._fetch + 1], set()
            while todo:
                number = todo.pop()
                if number in seen or number >= len(self._all):
                    continue
                seen.add(number)
                use = next((kind for used, kind in _uses(self._all[number]) if used == name), None)
                if use == "LOAD":
                    yield name
                    break
                if use is None:
                    todo += self._after(number)

    def yields_each(self) -> bool:
        todo, seen = [(self._fetch + 1, 0)], set()
        while todo:
            number, yielded = todo.pop()
            if number == self._fetch:
                if yielded != 1:
                    return False
                continue
            if (number, yielded) in seen or number >= len(self._all):
                continue
            seen.add((number, yielded))
            yielded += self._all[number].opname == "YIELD_VALUE"
            if yielded > 1:
                return False
            todo += [(following, yielded) for following in self._after(number)]
        return True

    def _after(self, number: int) -> Iterator[int]:
        one = self._all[number]
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            yield self._number_of.get(int(one.argval), len(self._all))
        if not one.opname.startswith(_ENDS):
            yield number + 1


def _uses(one: dis.Instruction) -> list[tuple[str, str]]:
    """Names of variables that an instruction loads and stores, in its order."""
    kinds = [word for word in one.opname.split("_") if word in ("LOAD", "STORE", "DELETE")]
    if not kinds or ("FAST" not in one.opname and "DEREF" not in one.opname):
        return []
    names = one.argval if isinstance(one.argval, tuple) else (one.argval,)
    kinds = [*kinds, *[kinds[-1]] * len(names)][: len(names)]
    return [(str(name), "LOAD" if kind == "LOAD" else "STORE") for name, kind in zip(names, kinds, strict=True)]
