"""Generators: the states of generators of random numbers, of torch, NumPy and Python, as values; and seeds anew.

Their states are put into the generators that are there: others may hold them, too.
"""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import torch

from torchrelay.worker.hidden_state import arguments


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
