"""Settings that numbers are computed with are read as they are, and set again."""

from __future__ import annotations

import decimal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from torchrelay.worker.hardware import settings
from torchrelay.worker.hardware.settings import NAMES, SETTINGS

CHANGES: dict[str, Callable[[], object]] = {
    "torch.get_default_dtype()": lambda: torch.set_default_dtype(torch.float64),
    "torch.get_num_threads()": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch.get_float32_matmul_precision()": lambda: torch.set_float32_matmul_precision("medium"),
    "torch.nn.attention.sdpa_kernel()": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "torch.get_deterministic_debug_mode()": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "torch.set_flush_denormal()": lambda: torch.set_flush_denormal(True),
    "torch.backends.mkldnn.enabled": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "torch.backends.mkldnn.deterministic": lambda: setattr(torch.backends.mkldnn, "deterministic", True),
    "numpy.geterr()": lambda: np.seterr(all="raise", under="print"),
    "decimal.getcontext()": lambda: setattr(decimal.getcontext(), "prec", 5),
}


@pytest.fixture(autouse=True)
def start() -> Iterator[dict[str, object]]:
    before = {name: SETTINGS[name] for name in NAMES}
    yield before
    for name, value in before.items():
        SETTINGS[name] = value


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_made_again(start: dict[str, object], name: str) -> None:
    CHANGES[name]()
    changed = SETTINGS.get(name)
    assert changed != start[name]
    SETTINGS[name] = start[name]
    assert SETTINGS[name] == start[name]
    SETTINGS[name] = changed
    assert SETTINGS[name] == changed


PRECISIONS = "torch.get_float32_matmul_precision()"
MKLDNN: Any = torch.backends.mkldnn
WAYS: dict[str, Callable[[], object]] = {
    "older": lambda: torch.set_float32_matmul_precision("high"),
    "all": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "products": lambda: setattr(MKLDNN.matmul, "fp32_precision", "bf16"),
    "both": lambda: [WAYS[way]() for way in ("older", "all")],
    "convolutions": lambda: setattr(MKLDNN.conv, "fp32_precision", "tf32"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("other", WAYS)
def test_precisions_set_in_any_way_are_put_back_and_made_again(start: dict[str, object], way: str, other: str) -> None:
    for told in ("from the start", way, other):
        if told in WAYS:
            WAYS[told]()
        changed = SETTINGS[PRECISIONS]
        SETTINGS[PRECISIONS] = start[PRECISIONS]
        assert SETTINGS[PRECISIONS] == start[PRECISIONS]
        SETTINGS[PRECISIONS] = changed
        assert SETTINGS[PRECISIONS] == changed


def test_what_torch_does_not_say_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setitem(settings._TABLE, PRECISIONS, (refuse, refuse))
    assert SETTINGS[PRECISIONS] is None
    SETTINGS[PRECISIONS] = None


def test_all_of_them_at_once(start: dict[str, object]) -> None:
    for change in CHANGES.values():
        change()
    changed = {name: SETTINGS[name] for name in NAMES}
    for told in (start, changed):
        for name, value in told.items():
            SETTINGS[name] = value
        assert {name: SETTINGS[name] for name in NAMES} == told


def test_there_are_no_others() -> None:
    assert SETTINGS.get("anything", 7) == 7
    assert "anything" not in SETTINGS
    assert all(name in SETTINGS for name in NAMES)
