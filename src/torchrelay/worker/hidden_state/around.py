"""Around: what a step function uses from around it: variables of outer functions, globals, its own `self`.

Functions of the script that it calls are gone through, too, as far as they are found by their names; so are hooks of
modules, how they compute, and what classes keep in attributes of their own. Libraries are not.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from torchrelay.worker.hidden_state.graph import Leaf, of_class, told_apart, variables_of
from torchrelay.worker.source.lines import is_library, is_of_the_script

MAX_FUNCTIONS = 64
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_ELSEWHERE = (types.ModuleType, type, DataLoader, Dataset, Sampler)  # looked at in another way, or not at all


def around(functions: Iterable[Any]) -> Iterator[Leaf]:
    """The variables, each once; a variable that has no value yet has `MISSING`."""
    waiting = list(functions)
    known: set[tuple[int, ...]] = set()
    named: dict[str, list[tuple[int, Any]]] = {}
    while waiting and len(known) < MAX_FUNCTIONS:
        one = waiting.pop(0)
        if isinstance(one, functools.partial):
            yield Leaf(f"arguments of {getattr(one.func, '__qualname__', '')}", None, None, [*one.args, one.keywords])
            waiting.append(one.func)
            continue
        if isinstance(one, types.MethodType):
            yield Leaf(f"self of {one.__func__.__qualname__}", None, None, one.__self__)
            one = one.__func__
        if not isinstance(one, types.FunctionType) or is_library(one.__code__.co_filename):
            continue
        which = (id(one.__code__), *map(id, one.__closure__ or ()))
        if which in known:
            continue
        known.add(which)
        for leaf in variables_of(one):
            if isinstance(leaf.value, (types.FunctionType, types.MethodType, functools.partial)):
                waiting.append(leaf.value)
            elif isinstance(leaf.value, type):
                yield from of_class(leaf.value)
            elif not issubclass(type(leaf.value), _ELSEWHERE):
                yield told_apart(leaf, named)


def of_modules(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """Functions of the script that these modules call: hooks, and how they compute."""
    seen: set[type] = set()
    for module in modules:
        fields = vars(module)
        for hooks in _HOOKS:
            yield from list((fields.get(hooks) or {}).values())
        for parameter in fields.get("_parameters", {}).values():
            for hooks in _TENSOR_HOOKS:
                yield from list((getattr(parameter, hooks, None) or {}).values())
        kind = type(module)
        if kind not in seen and is_of_the_script(kind):
            seen.add(kind)
            yield kind.forward
