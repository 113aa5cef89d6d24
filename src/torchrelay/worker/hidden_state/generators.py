"""Generators: states of generators of random numbers, of torch, NumPy and Python; seeds; places of iterators.

Their states are put into the generators that are there: others may hold them, too.
"""

from __future__ import annotations

import gc
import itertools
import operator
import random
import types
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from torchrelay.worker.hidden_state.graph import ITERATORS, NESTED, PLAIN, Leaf, attributes_of, is_generator
from torchrelay.worker.hidden_state.leaves import CALLING, COPIED, NUMBERED, THROUGH
from torchrelay.worker.source.lines import is_of_the_script
from torchrelay.worker.tensors import arguments, values


def bytes_of(generator: Any) -> bytes:
    """What tells whether it has moved."""
    kind = arguments.GENERATORS.get(type(generator))
    if kind is not None:
        return kind(generator)
    return repr(state_of(generator)).encode()


def state_of(generator: Any) -> Any:
    """The state of a generator, as values."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    version, words, gauss = generator.getstate()
    return [version, array("I", words).tobytes(), gauss]


def put_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = state
    else:
        generator.setstate((state[0], tuple(array("I", state[1])), state[2]))


def kind_of(generator: Any) -> str:
    inner = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return f"{type(generator).__name__} {type(inner).__name__}"


def reseed(generator: Any, number: int) -> None:
    """Seed a generator anew with 64 bits."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(number).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed([number & 0xFFFFFFFF, number >> 32])
    elif isinstance(generator, np.random.BitGenerator):
        generator.state = type(generator)(number).state
    elif isinstance(generator, random.Random):
        generator.seed(number)


def place_of_count(counter: itertools.count[Any]) -> list[Any]:
    """The number that comes next, and the step."""
    found = counter.__reduce__()[1]
    return [*found, 1][:2]


def count_on(leaf: Leaf, live: itertools.count[Any], number: Any, step: Any) -> bool:
    """Go on to that number, as others may hold the counter, too; back it can only be put in its place."""
    now = place_of_count(live)[0]
    ahead = number - now
    if step == 1 and type(ahead) is int and 0 <= ahead < 1 << 24:
        deque(itertools.islice(live, ahead), maxlen=0)
        return True
    return leaf.put(itertools.count(number, step))


def place_of(iterator: Any, depth: int = 0) -> str:
    """Where one of `ITERATORS` is, or a cycle(), without moving it; empty if it does not tell."""
    if type(iterator) in THROUGH:
        inside = [each for one in gc.get_referents(iterator) for each in (one if type(one) is tuple else (one,))]
        through = (each for each in inside if type(each) in ITERATORS or type(each) is itertools.cycle)
        return "; ".join(place_of(each, depth + 1) for each in through) if depth < NESTED else ""
    if type(iterator) is itertools.count:
        return repr(iterator)
    if type(iterator) in _COPIES:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is on its way out of Python
            try:
                return _COPIES[type(iterator)](iterator.__reduce__())
            except (TypeError, AttributeError, ValueError):
                return ""
    if type(iterator) in NUMBERED:
        try:
            return str(getattr(iterator, NUMBERED[type(iterator)]))
        except ValueError:  # it is past its end
            return "over"
    if type(iterator) is CALLING:
        bound = (types.BuiltinMethodType, types.MethodType, types.MethodWrapperType)
        called = (one.__self__ if type(one) in bound else one for one in gc.get_referents(iterator))
        return "; ".join(place_of(one, depth + 1) for one in called if type(one) in ITERATORS and depth < NESTED)
    if type(iterator) is not types.GeneratorType:
        return str(operator.length_hint(iterator, 0))
    frame = iterator.gi_frame
    if frame is None or iterator.gi_running:
        return "over" if frame is None else ""
    found = sorted(frame.f_locals.items())
    return repr((frame.f_lasti, [(name, value if type(value) in PLAIN else id(value)) for name, value in found]))


_COPIES: dict[type, Callable[[Any], str]] = {
    **dict.fromkeys(COPIED, lambda copied: str(copied[2:] or "begins")),
    itertools.cycle: lambda copied: str([operator.length_hint(one, 0) for one in copied[1]]),
    type(reversed(deque())): lambda copied: str(copied[1][1:]),
}


# ---------------------------------------------------------------- in variables

_draws: dict[type, int] = {}  # by class: `_ITSELF` is a generator, `_INSIDE` may hold one, 0
_ITSELF, _INSIDE = 1, 2


def told_in(local: Mapping[str, Any]) -> dict[str, bytes]:
    """States of the generators in these variables, by their names."""
    return {name: values.encode([state_of(each)], name) for name, each in _generators(local).items()}


def put_in(local: Mapping[str, Any], told: Mapping[str, bytes]) -> None:
    """Put those that are there now where others were."""
    live = _generators(local) if told else {}
    for name in told.keys() & live.keys():
        put_state(live[name], values.decode(told[name])[0])


def _generators(local: Mapping[str, Any]) -> dict[str, Any]:
    """In variables, and in attributes of objects of the script's classes that are in some."""
    found: dict[str, Any] = {}
    for name, value in list(local.items()):  # in the path of every item
        kind = type(value)
        draws = _draws.get(kind)
        if draws is None:
            draws = _draws[kind] = _ITSELF if is_generator(value) else _INSIDE * is_of_the_script(kind)
        if draws == _ITSELF:
            found[name] = value
        elif draws == _INSIDE:
            held = attributes_of(value) or {}
            found.update((f"{name}.{key}", each) for key, each in held.items() if is_generator(each))
    return found


def iterators(leaves: Mapping[str, Leaf]) -> dict[str, tuple[int, str]]:
    """By path, which iterators there are, and where each is."""
    found = ((path, leaf.read()) for path, leaf in leaves.items())
    return {path: (id(one), place_of(one)) for path, one in found if type(one) in ITERATORS}
