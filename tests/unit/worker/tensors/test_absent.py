"""Whatever a script does with what a worker does not have is refused; being put elsewhere and `is None` are no use."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from torchrelay.errors import UnprovedError
from torchrelay.worker.tensors import absent
from torchrelay.worker.tensors.absent import Absent


@pytest.fixture(autouse=True)
def none_refused() -> Iterator[None]:
    absent._refused.clear()
    yield
    absent._refused.clear()


one = torch.ones(2)

USES: dict[str, Callable[[Any], Any]] = {
    "isinstance": lambda it: isinstance(it, tuple),
    "bool": bool,
    "not": lambda it: not it,
    "tuple": tuple,
    "unpack": lambda it: [*it],
    "attribute": lambda it: it.h,
    "hasattr": lambda it: hasattr(it, "h"),
    "getattr": lambda it: getattr(it, "h", None),
    "setattr": lambda it: setattr(it, "h", 1),
    "entry": lambda it: it["h"],
    "set entry": lambda it: it.__setitem__("h", 1),
    "in": lambda it: 1 in it,
    "among": lambda it: it in [1],
    "equal": lambda it: it == 1,
    "hash": lambda it: {it: 1},
    "len": len,
    "call": lambda it: it(),
    "add": lambda it: it + 1,
    "add to a tensor": lambda it: one + it,
    "add to an array": lambda it: np.ones(2) + it,
    "in place": lambda it: one.clone().add_(it),
    "cat": lambda it: torch.cat([one, it]),
    "where": lambda it: torch.where(one > 0, it, one),
    "linear": lambda it: torch.nn.functional.linear(one, it),
    "lstm": lambda it: torch.nn.LSTM(2, 2)(torch.ones(1, 1, 2), it),
    "copy_": lambda it: one.clone().copy_(it),
    "tensor": torch.tensor,
    "is_tensor": torch.is_tensor,
    "array": np.asarray,
    "float": float,
    "index": lambda it: [1][it],
    "print": str,
    "format": lambda it: f"{it}",
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "json": lambda it: json.dumps({"it": it}),
    "max": lambda it: max(it, 1),
    "keywords": lambda it: dict(**it),
    "with": lambda it: it.__enter__(),
}


@pytest.mark.parametrize("use", list(USES))
def test_every_use_is_refused_and_names_what_was_used(use: str) -> None:
    with pytest.raises(UnprovedError, match=r"^trainer\.kept was kept from one step for the next"):
        USES[use](Absent("trainer.kept"))


def test_a_script_that_catches_the_refusal_hears_of_it_again() -> None:
    absent.check()
    try:
        len(Absent("trainer.kept"))
    except Exception:  # noqa: BLE001  as scripts write it
        pass
    with pytest.raises(UnprovedError, match=r"trainer\.kept"):
        absent.check()


def test_it_may_be_put_elsewhere_and_told_from_none() -> None:
    it = Absent("trainer.kept")
    other = [it, {"there": it}]
    assert other[0] is not None
    assert absent.is_absent(it)
    absent.check()
