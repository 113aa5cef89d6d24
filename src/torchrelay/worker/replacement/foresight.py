"""Foresight: what a step will return, known before its update: a rank that dies in it leaves its own result.

Nothing that follows an update's gate is told any more when its worker dies. Yet most of what a step returns has been
computed by then, and lies in variables of functions under way:

    loss.backward()
    optimizer.step()                 the gate is here, and `loss` is known
    return loss.detach()

If a function ends with the one return that it has, and what that says can be computed of variables that nothing assigns
after the gate, it is computed there. Else it is learnt in the first calls which variables hold what is returned, to the
last bit. Either way each return is compared with what was foreseen. What is computed after the update by other means
nobody foresees: a replacement takes it from other ranks if several of them agree in it, and is refused else.
"""

from __future__ import annotations

import ast
import dis
import inspect
import struct
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import msgspec
import torch
from msgspec import Struct

from torchrelay.errors import RefusedError, UnprovedError
from torchrelay.worker.source.lines import is_library
from torchrelay.worker.tensors import values
from torchrelay.worker.tensors.entries import entries_of, items_of

MAX_RESULT = 256 << 10  # bytes
MOST_BYTES = 4096  # of a result that is computed before the update
CALLS = 3  # of a function in which variables are looked for
FEW = 16  # numbers in a tensor, and entries of a container, that may be a result
LEAVES = 64  # of a result
MOST = 8  # variables that are asked for one leaf
DEPTH = 3

Path = tuple[str | int, ...]
Source = tuple[CodeType, str, Path]  # a variable of a function, and the way within it
_CONSTANT = (str, bool, type(None))  # what is no result of computing, as long as it stays what it is
_NOWHERE = object()
_PLAIN = (int, float, bool, str, type(None))
TOO_EARLY = (
    "a rank was lost in the update of one of its first steps, when it was not known yet what of its result is computed "
    "before the update. Start the job again: next to nothing is lost"
)
UNKNOWN = (
    "a rank was lost in its update, and {} of what its step returns is computed after optimizer.step(), so that it can "
    "be had from nobody. Return what is known before the update, such as the loss as backward() has got it"
)


class Foreseen(Struct, array_like=True):
    """What is known at the gate of a call's result."""

    result: bytes  # the value, encoded; None where it is not known
    unknown: list[list[str | int]]  # paths of what is not


NOTHING_KNOWN = Foreseen(values.NOTHING, [[]])
_encode = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder(Foreseen)


def whole(result: bytes) -> bytes:
    """For the record: a result that is known already."""
    return _encode(Foreseen(result, []))


class Foresight:
    """Of one function that is called as a step."""

    def __init__(self) -> None:
        self._calls = 0
        self._shape: Any = None  # of what was returned: containers, with a number for each leaf
        self._paths: list[Path] = []
        self._kinds: list[Any] = []
        self._sources: list[list[Source]] = []  # for each leaf, the variables that have held it in all calls
        self._asked = False  # at the gate of the call under way
        self._said: _Said | None = None
        self._constants: list[Any] = []  # for each leaf, what it has been in all calls, if it is none of computing
        self._hopeless = False
        self._seen: dict[Source, Any] = {}
        self._told: Foreseen | None = None

    def at_gate(self, until: CodeType) -> bytes:
        """What is known now, for the record. `until`: what has called the function."""
        self._told = None
        self._seen = {}
        self._asked = True
        if self._hopeless:
            return _encode(NOTHING_KNOWN)
        frames = list(_frames(until))
        if self._said is None and not self._calls and frames:
            self._said = said_by(frames[-1].f_code)
        if self._said is not None:
            self._told = self._said.now(frames[-1])
            if self._told is not None:
                return _encode(self._told)
        if self._calls < CALLS:
            self._seen = dict(_candidates(frames))
        if not self._calls:
            return b""
        local = {frame.f_code: frame.f_locals for frame in frames}
        found = [self._look(at, local) for at in range(len(self._paths))]
        unknown = [list(path) for path, value in zip(self._paths, found, strict=True) if value is _NOWHERE]
        if unknown and self._calls < CALLS:
            return b""
        value = _filled(self._shape, [None if each is _NOWHERE else each for each in found])
        try:
            self._told = Foreseen(values.encode(value, "result"), unknown)
        except TypeError:
            return b""
        return _encode(self._told)

    def _look(self, at: int, local: Mapping[CodeType, Mapping[str, Any]]) -> Any:
        """The value that all variables have by which it may be known: chance has no part in that."""
        found: Any = self._constants[at]
        for code, name, path in self._sources[at]:
            value = _as(self._kinds[at], _within(local.get(code, {}).get(name, _NOWHERE), path))
            if value is _NOWHERE or (found is not _NOWHERE and not _equal(found, value)):
                return _NOWHERE
            found = value
        return found

    def returned(self, value: Any, result: bytes) -> None:
        """The call has returned: learn from it. `result`: the value, encoded."""
        asked, self._asked = self._asked, False
        if self._hopeless or not asked:  # without an update there is nothing to foresee
            return
        told, self._told = self._told, None
        if self._said is not None and told is not None:
            if told.result != result:
                self._said, self._hopeless = None, True
            return
        if self._calls >= CALLS and told is not None and not told.unknown and told.result == result:
            return
        leaves: list[tuple[Path, Any]] = []
        shape = _shape_of(value, (), leaves)
        kinds = [_kind_of(leaf) for _, leaf in leaves]
        if len(leaves) > LEAVES or (self._calls and (shape != self._shape or kinds != self._kinds)):
            self._hopeless = True
            return
        if not self._calls:
            self._shape, self._paths, self._kinds = shape, [path for path, _ in leaves], kinds
            self._sources = [list(self._seen) for _ in leaves]
            self._constants = [leaf if type(leaf) in _CONSTANT else _NOWHERE for _, leaf in leaves]
        if self._calls < CALLS:
            for at, (_, leaf) in enumerate(leaves):
                self._sources[at] = [
                    source
                    for source in self._sources[at]
                    if _equal(leaf, _as(kinds[at], self._seen.get(source, _NOWHERE)))
                ][: MOST if self._calls == CALLS - 1 else None]
                if not _equal(leaf, self._constants[at]):
                    self._constants[at] = _NOWHERE
        elif told is not None:
            self._forget_wrong(told, leaves)
        self._calls += 1
        self._seen = {}
        nowhere = not any(self._sources) and all(each is _NOWHERE for each in self._constants)
        self._hopeless = self._calls >= CALLS and bool(leaves) and nowhere

    def _forget_wrong(self, told: Foreseen, leaves: Sequence[tuple[Path, Any]]) -> None:
        foreseen: list[tuple[Path, Any]] = []
        _shape_of(values.decode(told.result), (), foreseen)
        known = dict(foreseen)
        for at, (path, leaf) in enumerate(leaves):
            if list(path) not in told.unknown and not _equal(leaf, _as(self._kinds[at], known.get(path, _NOWHERE))):
                self._sources[at], self._constants[at] = [], _NOWHERE


def complete(foreseen: bytes, others: Sequence[bytes]) -> bytes:
    """The result of a call of a lost rank. `others`: those of ranks that have made it, too. Raises `UnprovedError`."""
    known = _decoder.decode(foreseen) if foreseen else NOTHING_KNOWN
    if not known.unknown:
        return known.result
    if len(others) > 1 and all(other == others[0] for other in others) and known.unknown == [[]]:
        return others[0]
    theirs = [values.decode(other) for other in others]
    value = values.decode(known.result)
    for path in known.unknown:
        found = [_within(each, tuple(path)) for each in theirs]
        alike = len(found) > 1 and all(_equal(found[0], each) for each in found)
        if not alike or found[0] is _NOWHERE:
            what = f"entry {'.'.join(map(str, path))}" if path else "all"
            raise UnprovedError(UNKNOWN.format(what) if foreseen else TOO_EARLY)
        value = _put(value, tuple(path), found[0])
    return values.encode(value, "result")


# ---------------------------------------------------------------- variables


def _frames(until: CodeType) -> Iterator[FrameType]:
    """Functions of the script that are under way within the call, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not until:
        if not is_library(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _candidates(frames: Sequence[FrameType]) -> Iterator[tuple[Source, Any]]:
    for frame in frames:
        for name, value in list(frame.f_locals.items()):
            for path, leaf in _small(value, ()):
                yield (frame.f_code, name, path), leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _small(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """What may be a result, or a part of one."""
    if type(value) in _PLAIN:
        yield path, value
    elif type(value) is torch.Tensor:
        if value.numel() <= FEW and value.layout is torch.strided:
            yield path, value
    elif type(value) in (list, tuple, dict) and len(value) <= FEW and len(path) < DEPTH:
        for key, entry in items_of(value) if type(value) is dict else enumerate(entries_of(value)):
            if type(key) in (str, int):
                yield from _small(entry, (*path, key))


def _within(value: Any, path: Path) -> Any:
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return _NOWHERE
    return value


# ---------------------------------------------------------------- what a function says that it returns

_METHODS = frozenset({"item", "detach", "clone", "cpu", "float", "double", "mean", "sum", "tolist"})
_FUNCTIONS = frozenset({"float", "int", "len"})
_PARTS = (
    ast.Expression, ast.Name, ast.Constant, ast.Load, ast.BinOp, ast.UnaryOp, ast.USub, ast.Add, ast.Sub, ast.Mult,
    ast.Div, ast.Tuple, ast.List, ast.Dict, ast.Call, ast.Attribute,
)  # fmt: skip


class _Said:
    """The expression of a function's only return, at its end; it computes values, and changes nothing."""

    def __init__(self, expression: ast.Expression) -> None:
        self._code = compile(expression, "<what is returned>", "eval")
        named = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
        self._functions = named & _FUNCTIONS
        self._names = named - _FUNCTIONS
        self._stored: dict[int, frozenset[str]] = {}  # by the place of the gate, what is assigned after it

    def now(self, frame: FrameType) -> Foreseen | None:
        """What it comes to in this frame; None if a name has no value yet, or gets another one after this place."""
        local, place = frame.f_locals, frame.f_lasti
        stored = self._stored.get(place)
        if stored is None:
            assigned = (one for one in dis.get_instructions(frame.f_code) if one.opname.startswith("STORE_"))
            stored = self._stored[place] = frozenset(one.argval for one in assigned if one.offset > place)
        if not self._names <= local.keys() or self._names & stored:
            return None
        if self._functions and self._functions & (local.keys() | frame.f_globals.keys()):
            return None  # they are the script's own
        known = {name: local[name] for name in self._names}
        known = {name: one.detach() if isinstance(one, torch.Tensor) else one for name, one in known.items()}
        try:
            found = values.encode(eval(self._code, {}, known), "result")
        except (TypeError, ValueError, RuntimeError, ArithmeticError, AttributeError):
            return None
        return Foreseen(found, []) if len(found) <= MOST_BYTES else None


def said_by(code: CodeType) -> _Said | None:
    """What a function says that it returns; None if that is not to be seen, or does more than to compute a value."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return None
    made = tree.body[0]
    if not isinstance(made, ast.FunctionDef):
        return None
    returns = [node for statement in made.body for node in _own(statement) if isinstance(node, ast.Return)]
    if len(returns) != 1 or made.body[-1] is not returns[0] or returns[0].value is None:
        return None
    expression = ast.Expression(returns[0].value)
    return _Said(expression) if _is_pure(expression) else None


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and what is in it, without functions within."""
    yield node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
        for inner in ast.iter_child_nodes(node):
            yield from _own(inner)


def _is_pure(expression: ast.Expression) -> bool:
    """Arithmetic, containers, and methods of tensors that change nothing."""
    called = {id(node.func) for node in ast.walk(expression) if isinstance(node, ast.Call) and _is_harmless(node)}
    return all(
        isinstance(node, _PARTS)
        and (not isinstance(node, ast.Call) or id(node.func) in called)
        and (not isinstance(node, ast.Attribute) or id(node) in called)
        for node in ast.walk(expression)
    )


def _is_harmless(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr in _METHODS and not call.args and not call.keywords
    return isinstance(call.func, ast.Name) and call.func.id in _FUNCTIONS and len(call.args) == 1 and not call.keywords


# ---------------------------------------------------------------- results


def encoded(kind: str, value: Any) -> bytes:
    """What a call of this kind has returned. Raises `RefusedError` for what cannot be kept."""
    try:
        result = values.encode(value, f"the result of a {kind}")
    except TypeError as error:
        raise RefusedError(str(error), "return numbers, tensors, and lists or dicts of them, or nothing") from error
    if len(result) > MAX_RESULT:
        raise RefusedError(
            f"the result of a {kind} has {len(result):,} bytes; at most {MAX_RESULT:,} are kept for a replacement",
            "return a summary, such as the loss",
        )
    return result


def _shape_of(value: Any, path: Path, leaves: list[tuple[Path, Any]]) -> Any:
    """The containers of a result; its leaves are added to `leaves`."""
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return {key: _shape_of(entry, (*path, key), leaves) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_shape_of(entry, (*path, at), leaves) for at, entry in enumerate(value))
    leaves.append((path, value))
    return len(leaves) - 1


def _filled(shape: Any, leaves: Sequence[Any]) -> Any:
    if type(shape) is dict:
        return {key: _filled(entry, leaves) for key, entry in shape.items()}
    if type(shape) in (list, tuple):
        return type(shape)(_filled(entry, leaves) for entry in shape)
    return leaves[shape]


def _put(value: Any, path: Path, leaf: Any) -> Any:
    """The value with another leaf; tuples are made anew."""
    if not path:
        return leaf
    if type(value) is tuple:
        entries = list(value)
        entries[int(path[0])] = _put(value[int(path[0])], path[1:], leaf)
        return tuple(entries)
    value[path[0]] = _put(value[path[0]], path[1:], leaf)
    return value


def _kind_of(leaf: Any) -> Any:
    return (leaf.dtype, leaf.shape, leaf.device) if isinstance(leaf, torch.Tensor) else type(leaf)


def _as(kind: Any, value: Any) -> Any:
    """A variable's value as a result of this kind; `_NOWHERE` if it is none."""
    if value is _NOWHERE or type(value) is kind:
        return value
    if not isinstance(value, torch.Tensor):
        return _NOWHERE
    if isinstance(kind, tuple):
        fits = (value.dtype, value.shape) == kind[:2]
        return value.detach().to(kind[2]) if fits else _NOWHERE
    number = value.item() if kind in (int, float, bool) and value.numel() == 1 else _NOWHERE
    return number if type(number) is kind else _NOWHERE


def _equal(one: Any, other: Any) -> bool:
    """To the last bit."""
    if type(one) is float and type(other) is float:
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return values.encode(one.detach(), "") == values.encode(other.detach(), "")
    return type(one) is type(other) and type(one) in (int, bool, str, type(None)) and bool(one == other)
