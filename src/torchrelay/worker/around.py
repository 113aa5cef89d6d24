"""Around: what a step function uses from around it: variables of outer functions, globals, its own `self`.

Functions of the script that it calls are gone through, too, as far as they are found by their names. Libraries are not.
"""

from __future__ import annotations

import builtins
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from torchrelay.worker.graph import MISSING, Leaf, names_used
from torchrelay.worker.lines import is_library

MAX_FUNCTIONS = 64
_ELSEWHERE = (types.ModuleType, type, DataLoader, Dataset, Sampler)  # looked at in another way, or not at all


def around(function: Any) -> Iterator[Leaf]:
    """The variables, each once; a variable that has no value yet has `MISSING`."""
    waiting = [function]
    known: set[types.CodeType] = set()
    while waiting and len(known) < MAX_FUNCTIONS:
        one = waiting.pop(0)
        if isinstance(one, functools.partial):
            yield Leaf(f"arguments of {getattr(one.func, '__qualname__', '')}", None, None, [*one.args, one.keywords])
            waiting.append(one.func)
            continue
        if isinstance(one, types.MethodType):
            yield Leaf(f"self of {one.__func__.__qualname__}", None, None, one.__self__)
            one = one.__func__
        if not isinstance(one, types.FunctionType) or one.__code__ in known or is_library(one.__code__.co_filename):
            continue
        known.add(one.__code__)
        for leaf in _variables(one):
            if isinstance(leaf.value, (types.FunctionType, types.MethodType, functools.partial)):
                waiting.append(leaf.value)
            elif not issubclass(type(leaf.value), _ELSEWHERE):
                yield leaf


def _variables(function: types.FunctionType) -> Iterator[Leaf]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        leaf = Leaf(f"{name} of {function.__qualname__}", cell, "cell_contents", MISSING)
        leaf.value = leaf.read()
        yield leaf
    here = function.__globals__
    for name in dict.fromkeys(names_used(code)):
        if name in here or not hasattr(builtins, name):
            yield Leaf(f"{name} of {function.__module__}", here, name, here.get(name, MISSING))
    for at, value in enumerate(function.__defaults__ or ()):
        yield Leaf(f"default {at} of {function.__qualname__}", None, None, value)


@functools.cache
def is_of_the_script(kind: type) -> bool:
    """Whether a class is the script's own, and no library's."""
    if kind is types.SimpleNamespace:
        return True
    module = sys.modules.get(str(kind.__module__))
    file = getattr(module, "__file__", None)
    return file is not None and not is_library(file)
