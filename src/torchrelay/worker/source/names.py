"""Names: what a function does with its names: which it assigns in loops, and which may still be read as they are.

A loss that is assigned before it is read in each turn is dead at the loop's head: whatever is in it there is no matter
to a replacement. Found by going backwards through the instructions, exceptions included. What inner functions use
lives always, as they may be called at any time.
"""

from __future__ import annotations

import bisect
import dis
import functools
import re
from collections.abc import Iterable, Iterator
from inspect import CO_GENERATOR
from types import CodeType, FrameType, FunctionType
from typing import Any

_PART = re.compile(r"(LOAD|STORE|DELETE)_(?:FAST|NAME|DEREF|CLASSDEREF|GLOBAL|CLOSURE)")
_ENDS = ("RETURN", "RAISE", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
MOST = 50_000  # instructions of a function in which it is found out what lives


_ADDING = ("append", "appendleft", "extend", "add")
_ANY_NAME = frozenset({"locals", "vars", "eval", "exec"})  # what these read the code does not say
_STORES = ("STORE_FAST", "STORE_DEREF", "STORE_NAME")


class Names:
    """Of a function: what it assigns in loops, or what functions do that it makes; which of it are flags of its own."""

    def __init__(self, code: CodeType) -> None:
        instructions = list(dis.get_instructions(code))
        assigned = set(_assigned_in_loops(instructions))
        within = {name for each in inner(code) for name in stored(each, "STORE_DEREF")}
        self.assigned = frozenset(assigned | (within & set(code.co_cellvars)))
        self.flags = frozenset(name for name in assigned if _is_set_up(name, instructions))
        self.filled = frozenset(_only_filled(instructions))
        self._code = code
        self._living: Living | None = None

    def living(self, lasti: int) -> frozenset[str]:
        """What may still be read, from this instruction on."""
        if self._living is None:
            self._living = Living(self._code)
        return self._living.at(lasti)


def _in_loops(instructions: list[dis.Instruction]) -> list[bool]:
    loops = [(int(one.argval), one.offset) for one in instructions if "JUMP_BACKWARD" in one.opname]
    return [any(begin <= one.offset <= end for begin, end in loops) for one in instructions]


def _assigned_in_loops(instructions: list[dis.Instruction]) -> Iterator[str]:
    for one, inside in zip(instructions, _in_loops(instructions), strict=True):
        if inside and one.opname in _STORES:
            yield from one.argval if isinstance(one.argval, tuple) else (one.argval,)


def _only_filled(instructions: list[dis.Instruction]) -> set[str]:
    """What loops only add to, by `append()` and the like: it decides nothing as long as they go on."""
    inside = _in_loops(instructions)
    found, read = set[str](), set[str]()
    for at, one in enumerate(instructions[:-1]):
        if inside[at] and one.opname.startswith("LOAD_") and isinstance(one.argval, str):
            follows = instructions[at + 1]
            adds = follows.opname in ("LOAD_METHOD", "LOAD_ATTR") and follows.argval in _ADDING
            (found if adds else read).add(one.argval)
    return found - read


def inner(code: CodeType) -> Iterator[CodeType]:
    """Functions that a function makes, and those that they make."""
    for each in code.co_consts:
        if type(each) is CodeType:
            yield each
            yield from inner(each)


def stored(code: CodeType, how: str) -> Iterator[str]:
    return (one.argval for one in dis.get_instructions(code) if one.opname == how)


def _is_set_up(name: str, instructions: list[dis.Instruction]) -> bool:
    """Whether loops set this only to True or False, and only in what an `if` on the same name begins."""
    guards: list[tuple[int, int]] = []
    for at, one in enumerate(instructions[:-2]):
        if one.argval == name and one.opname.startswith("LOAD"):
            jump = (
                instructions[at + 2]
                if instructions[at + 1].opname in ("UNARY_NOT", "TO_BOOL")
                else instructions[at + 1]
            )
            if "JUMP" in jump.opname and "IF" in jump.opname:
                guards.append((jump.offset, jump.argval))
    inside = _in_loops(instructions)  # what it is at the beginning may come from anywhere
    stores = [at for at, one in enumerate(instructions) if inside[at] and one.argval == name and one.opname in _STORES]
    guarded = [at for at in stores if any(begin < instructions[at].offset < end for begin, end in guards)]
    return stores == guarded != [] and all(_is_yes_or_no(instructions, at) for at in stores)


def _is_yes_or_no(instructions: list[dis.Instruction], at: int) -> bool:
    """Whether what is stored here is True or False, by itself or among others: `count, ready = 0, False`."""
    before = at - 1
    while before > 0 and instructions[before].opname in _STORES:
        before -= 1
    if instructions[before].opname == "UNPACK_SEQUENCE":
        found = instructions[before - 1].argval
        return isinstance(found, tuple) and type(found[at - before - 1]) is bool
    return before == at - 1 and type(instructions[before].argval) is bool


def functions_in(value: Any) -> Iterator[FunctionType]:
    """A function, or the methods of a class."""
    if type(value) is FunctionType:
        yield value
    elif isinstance(value, type):
        for each in list(vars(value).values()):
            inner = each.__func__ if isinstance(each, (classmethod, staticmethod)) else each
            if type(inner) is FunctionType:
                yield inner


class Living:
    """Of one function."""

    def __init__(self, code: CodeType) -> None:
        self._always = frozenset(code.co_cellvars) | frozenset(code.co_freevars)
        self._all = self._always | frozenset(code.co_varnames) | frozenset(code.co_names)
        self._offsets: list[int] = []
        self._after: list[int] = []  # what lives after each instruction, as bits of `_names`
        self._names: list[str] = []
        instructions = list(dis.get_instructions(code))
        # By their names as functions: model.eval() reads no variable.
        any_name = any(one.argval in _ANY_NAME for one in instructions if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
        if len(instructions) <= MOST and not any_name:
            self._find(code, instructions)

    def at(self, lasti: int) -> frozenset[str]:
        """What lives when the instruction at this place has done its work: of a loop, when it has given an item."""
        if not self._offsets or lasti < 0:
            return self._all
        bits = self._after[bisect.bisect_right(self._offsets, lasti) - 1]
        return frozenset(name for at, name in enumerate(self._names) if bits >> at & 1) | self._always

    def _find(self, code: CodeType, instructions: list[dis.Instruction]) -> None:
        index = {one.offset: at for at, one in enumerate(instructions)}
        follows = [_successors(one, at, index) for at, one in enumerate(instructions)]
        for entry in getattr(dis.Bytecode(code), "exception_entries", ()):
            handler = index.get(entry.target)
            for at, one in enumerate(instructions):
                if handler is not None and entry.start <= one.offset < entry.end:
                    follows[at].append(handler)
        names = sorted(self._all)
        bits = {name: 1 << at for at, name in enumerate(names)}  # sets as numbers: functions may be long
        uses = [tuple(_bits(each, bits) for each in _uses(one)) for one in instructions]
        before = [0] * (len(instructions) + 1)
        changed = True
        while changed:
            changed = False
            for at in reversed(range(len(instructions))):
                found = (_any_of(before, follows[at]) & ~uses[at][1]) | uses[at][0]
                if found != before[at]:
                    before[at], changed = found, True
        self._offsets = [one.offset for one in instructions]
        for at, one in enumerate(instructions):
            after = _any_of(before, [at + 1] if one.opname == "FOR_ITER" else follows[at])
            self._after.append(after)
        self._names = names


def _bits(names: Iterable[str], bits: dict[str, int]) -> int:
    return sum({bits[name] for name in names if name in bits})


def _any_of(before: list[int], places: list[int]) -> int:
    found = 0
    for at in places:
        found |= before[at]
    return found


def _successors(one: dis.Instruction, at: int, index: dict[int, int]) -> list[int]:
    jumps = "JUMP" in one.opname or one.opname in ("FOR_ITER", "SEND")
    found = [index[one.argval]] if jumps and one.argval in index else []
    conditional = "IF" in one.opname or one.opname in ("FOR_ITER", "SEND")
    if conditional or not one.opname.startswith(_ENDS):
        found.append(at + 1)
    return found


def _uses(one: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """What an instruction reads, and what it writes; some do two at once."""
    parts = _PART.findall(one.opname) or re.findall(r"(LOAD|STORE)_FAST", one.opname)
    names: Iterable[str] = one.argval if isinstance(one.argval, tuple) else [one.argval]
    pairs = list(zip(parts, names, strict=False))
    read = frozenset(name for how, name in pairs if how == "LOAD")
    return read, frozenset(name for how, name in pairs if how != "LOAD")


def collects_items(frame: FrameType | None) -> bool:
    """Whether what goes through a loop here collects it out of sight: a comprehension, or sum() or its like.

    What that has collected so far lies on Python's stack, where nobody can look, or put anything. It is in the middle
    of a loop only if it calls the script for each item: by an expression, or by map().
    """
    expression = False
    while frame is not None and _gives_items(frame):
        expression = frame.f_code.co_name == "<genexpr>" or (expression and _is_ours(frame))
        frame = frame.f_back
    if frame is None:
        return False
    instructions = list(dis.get_instructions(frame.f_code))
    here = bisect.bisect_right([one.offset for one in instructions], frame.f_lasti) - 1
    if here >= 0 and instructions[here].opname == "FOR_ITER":
        return _appends(instructions, instructions[here])
    return expression or not _is_next(instructions, here)


def _gives_items(frame: FrameType) -> bool:
    """Whether it hands on items of a loop: also what stands in for enumerate() and the like."""
    code = frame.f_code
    return bool(code.co_flags & CO_GENERATOR) or code.co_name == "__next__" or _is_ours(frame)


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("torchrelay.")


def _is_next(instructions: list[dis.Instruction], here: int) -> bool:
    """Whether the call at this place is one of next(): its name stands where the call begins."""
    named = [one.positions for one in instructions[: here + 1] if one.argval in ("next", "__next__")]
    call = instructions[here].positions
    if call is None or call.lineno is None:
        return bool(named)  # Python was told to keep no columns
    begins = [(each.lineno, each.col_offset) for each in named if each is not None]
    return (call.lineno, call.col_offset) in begins


def _appends(instructions: list[dis.Instruction], loop: dis.Instruction) -> bool:
    """Whether this loop is one of those of a comprehension: each entry is appended so deep below the stack's top."""
    loops = [one for one in instructions if one.opname == "FOR_ITER"]
    for one in instructions:
        if one.opname in ("LIST_APPEND", "SET_ADD", "MAP_ADD") and loop.offset < one.offset < loop.argval:
            around = [each for each in loops if each.offset < one.offset < each.argval]
            deep = one.arg or 0
            if loop in around[::-1][: deep - 1]:
                return True
    return False


_OF_GLOBALS = ("_GLOBAL", "LOAD_NAME", "STORE_NAME", "DELETE_NAME")


@functools.cache
def names_used(code: CodeType) -> tuple[str, ...]:
    """Names of globals that a function looks up or assigns, each once; also in functions that it makes."""
    own = (one.argval for one in dis.get_instructions(code) if any(part in one.opname for part in _OF_GLOBALS))
    made = (const for const in code.co_consts if type(const) is CodeType)
    return tuple(dict.fromkeys([*own, *(name for each in made for name in names_used(each))]))


@functools.cache
def attributes_set(code: CodeType) -> frozenset[str]:
    """Names of attributes that a function sets, of whatever; also functions that it makes."""
    found = set[str]()
    for each in (code, *inner(code)):
        found.update(stored(each, "STORE_ATTR"))
        if "setattr" in each.co_names:
            found.update(one for one in each.co_consts if type(one) is str and one.isidentifier())
    return frozenset(name for name in found if not name.startswith("__"))


@functools.cache
def asked_for(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Names that a function looks up, attributes included, and modules that it imports; functions in it, too."""
    codes = (code, *inner(code))
    imported = frozenset(name for each in codes for name in stored(each, "IMPORT_NAME"))
    return frozenset(name for each in codes for name in each.co_names), imported


@functools.cache
def assigned_outside(code: CodeType) -> frozenset[str]:
    """Variables of others that a function assigns."""
    stores = ("STORE_GLOBAL", "STORE_DEREF")
    return frozenset(one.argval for one in dis.get_instructions(code) if one.opname in stores)


# ---------------------------------------------------------------- of a module

_declared_in: dict[int, tuple[int, frozenset[str]]] = {}  # by the id of a module's globals, with their number
_used_in: dict[int, tuple[int, frozenset[str]]] = {}  # the same


def declared_globals(around: dict[str, Any]) -> frozenset[str]:
    """Globals that functions of this module declare and assign."""
    known = _declared_in.get(id(around))
    if known is None or known[0] != len(around):
        functions = [each for value in list(around.values()) for each in functions_in(value)]
        own = [each.__code__ for each in functions if each.__globals__ is around]
        found = (name for code in own for each in (code, *inner(code)) for name in stored(each, "STORE_GLOBAL"))
        known = _declared_in[id(around)] = len(around), frozenset(found)
    return known[1]


def used_by_functions(around: dict[str, Any]) -> frozenset[str]:
    """Names that functions of this module look up: what stands at its top level may be read by them."""
    known = _used_in.get(id(around))
    if known is None or known[0] != len(around):
        functions = [each for value in list(around.values()) for each in functions_in(value)]
        own = [each.__code__ for each in functions if each.__globals__ is around]
        known = _used_in[id(around)] = len(around), frozenset(name for code in own for name in names_used(code))
    return known[1]
