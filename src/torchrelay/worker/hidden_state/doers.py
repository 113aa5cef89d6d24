"""Doers: functions, methods, classes, modules and objects that a script puts in place of others while it trains.

    trainer.loss = mae              after a warm-up
    trainer.phase = trainer.main    a method as a state
    net.act = nn.ReLU()             another module, without parameters

Each is known by a name: another function, or an object of another class, has another one. What its place holds of
values is looked at by itself. A replacement finds functions and classes by their names, methods by the object that has
them, and makes objects and modules anew that hold nothing but values; no code of the script is run for that. Whatever
cannot be had in this way must stand there already, or the replacement is refused.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

import torch

from torchrelay.worker.hidden_state import made
from torchrelay.worker.hidden_state.made import MISSING, PLAIN, WIDTH, is_plain
from torchrelay.worker.source.lines import found_in_class, is_library
from torchrelay.worker.source.names import assigned_outside
from torchrelay.worker.tensors.entries import entries_of, items_of

_MARK = "torchrelay doer"
_LONGEST = 4096  # characters of a name
_CACHED = type(functools.lru_cache(lambda: None))
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, _CACHED, type)
_FIELDS = frozenset(vars(torch.nn.Module())) | {"training"}  # of every module
_HOLDS = ("_parameters", "_buffers", "_modules", *(name for name in sorted(_FIELDS) if name.endswith("_hooks")))


def is_function(value: Any) -> bool:
    """Whether it is a function, a method, or a class: what stands in its place decides what is done."""
    return issubclass(type(value), FUNCTIONS)


def is_row(value: Any) -> bool:
    """Whether it is a list of functions or modules: which they are counts, and how many."""
    entries = entries_of(value, WIDTH) if type(value) in (list, deque) else ()
    return bool(entries) and all(is_function(each) or isinstance(each, torch.nn.Module) for each in entries)


def name_of(value: Any) -> str:
    """By which a doer is told from another one that may stand in its place."""
    kind = type(value)
    if kind in (list, deque, tuple):
        return f"row of {'; '.join(map(name_of, value))}"
    if issubclass(kind, types.MethodType):
        return f"method {_named(type(value.__self__))}.{value.__func__.__name__}"
    if issubclass(kind, functools.partial):
        given = [*value.args, *items_of(value.keywords)]
        return f"partial of {name_of(value.func)} {_shown(each for each in given if is_plain(each))}"
    if issubclass(kind, types.FunctionType):
        return f"function {_named(value)} {_shown(_held_by(value))}"
    return f"function {_named(value)}" if is_function(value) else f"object of {_named(kind)}"


def _named(value: Any) -> str:
    return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', '')}"


def _shown(found: Iterable[Any]) -> str:
    told = [repr(each) for each in found]
    return ", ".join(told)[:_LONGEST] if told else ""


def _held_by(function: types.FunctionType) -> list[Any]:
    """What tells a function from another one that was made in the same place: its line, and values from around it."""
    if "<" not in function.__qualname__:
        return []
    code = function.__code__
    own = assigned_outside(code) if not is_library(code.co_filename) else frozenset[str]()
    found: list[Any] = [code.co_firstlineno]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            value = cell.cell_contents
        except ValueError:  # not bound yet
            continue
        if name not in own and type(value) in PLAIN:
            found.append((name, value))
    given = (*(function.__defaults__ or ()), *items_of(function.__kwdefaults__ or {}))
    return [*found, *(each for each in given if is_plain(each))]


# ---------------------------------------------------------------- to tell, and to find again


def tell(value: Any) -> list[Any]:
    """What it takes to have it again, as plain values: a mark, its name, how, and what for that."""
    return [_MARK, name_of(value), *_told(value)]


def _told(value: Any) -> tuple[str, Any]:
    kind = type(value)
    if kind in (list, deque):
        row = [tell(each) for each in entries_of(value)]
        return ("row", row) if len(row) <= WIDTH and all(each[2] for each in row) else ("", None)
    if issubclass(kind, types.MethodType):
        own = type(value.__self__)
        return "method", [own.__module__, own.__qualname__, value.__func__.__name__]
    if kind is functools.partial:
        func, keywords = tell(value.func), dict(value.keywords)
        plain = func[2] and is_plain(value.args) and is_plain(keywords)
        return ("partial", [func, list(value.args), keywords]) if plain else ("", None)
    if kind is tuple:
        return "", None  # of hooks
    if is_function(value):
        place = _place_of(value)
        return ("function", place) if place is not None else ("", None)
    if isinstance(value, torch.nn.Module):
        fields = _settings(value)
        return ("", None) if fields is None else ("module", [kind.__module__, kind.__qualname__, fields])
    whole = made.tell_entry(value)
    return ("", None) if whole is MISSING or not made.is_told(whole) else ("object", whole)


def is_told(told: Any) -> bool:
    """Whether `tell` has said it."""
    return type(told) is list and len(told) == 4 and told[0] == _MARK


def can_be_had(value: Any) -> bool:
    """Whether a replacement finds it, or makes it anew."""
    return _told(value)[0] != ""


def make(told: list[Any], live: Any, objects: Collection[Any]) -> Any:
    """What was told of; `MISSING` if it cannot be had. `live`: what stands there. `objects`: what a walk has met."""
    _, name, how, what = told
    if how == "row":
        return _fill(live if type(live) in (list, deque) else [], what, objects)
    if live is not MISSING and live is not None and type(live) not in PLAIN and name_of(live) == name:
        return live
    if how == "function":
        found = _found(what[0], what[1])
        return found if found is not MISSING and name_of(found) == name else MISSING
    if how == "method":
        return _method(what, live, objects)
    if how == "partial":
        func = make(what[0], MISSING, objects)
        return MISSING if func is MISSING else functools.partial(func, *what[1], **what[2])
    if how == "module":
        return _module(*what)
    return made.make_entry(what, None) if how == "object" else MISSING


def _fill(row: Any, told: list[Any], objects: Collection[Any]) -> Any:
    """The same row, filled anew; those that stay are the same ones."""
    there = {name_of(each): each for each in row if type(each) not in PLAIN}
    found = [make(each, there.get(each[1], MISSING), objects) for each in told]
    if any(each is MISSING for each in found):
        return MISSING
    row.clear()
    row.extend(found)
    return row


def _method(what: list[Any], live: Any, objects: Collection[Any]) -> Any:
    """A method of the object whose method stands there, or of the only one of its class."""
    module, kind, name = what
    held = [live.__self__] if isinstance(live, types.MethodType) else []
    alike = [each for each in held if (type(each).__module__, type(each).__qualname__) == (module, kind)]
    alike = alike or [each for each in objects if (type(each).__module__, type(each).__qualname__) == (module, kind)]
    function = found_in_class(type(alike[0]), name) if len(alike) == 1 else None
    return types.MethodType(function, alike[0]) if isinstance(function, types.FunctionType) else MISSING


def _module(module: str, name: str, fields: dict[str, Any]) -> Any:
    kind = _found(module, name)
    if not isinstance(kind, type) or not issubclass(kind, torch.nn.Module):
        return MISSING
    made_anew = kind.__new__(kind)
    torch.nn.Module.__init__(made_anew)
    vars(made_anew).update(fields)
    return made_anew


def _settings(module: torch.nn.Module) -> dict[str, Any] | None:
    """What a module has of values, if it has nothing else: no parameters, no modules in it, no hooks."""
    fields = vars(module)
    if any(fields.get(name) for name in _HOLDS):
        return None
    own = {name: value for name, value in items_of(fields) if name not in _FIELDS or name == "training"}
    return own if all(is_plain(value) for value in own.values()) else None


def _place_of(function: Any) -> list[str] | None:
    """A module and a name by which it is found."""
    name = getattr(function, "__qualname__", None)
    short = getattr(function, "__name__", None)
    module = getattr(function, "__module__", None)
    for where in (module, "torch", "torch.nn.functional", "builtins"):
        for called in (name, short):
            if isinstance(where, str) and isinstance(called, str) and _found(where, called) is function:
                return [where, called]
    return None


def _found(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module, MISSING)
    for part in name.split("."):
        held = getattr(found, "__dict__", None)
        found = held.get(part, MISSING) if held is not None else MISSING
    return found.__func__ if isinstance(found, staticmethod) else found
