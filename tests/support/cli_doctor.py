"""What tests of cli doctor share."""

from __future__ import annotations

from typing import Any

import pytest

from torchrelay.cli.diagnose import consult
from torchrelay.cli.diagnose.consult import (
    Check,
)

WELL: dict[str, Any] = {
    "torch": "2.13.0+cpu", "import_s": 1.2, "gpus": 0, "nccl": False, "gloo": "", "swap": "ExtensionSwap",
    "swap_reason": "",
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe costs seconds; one test has the real one."""
    monkeypatch.setattr(consult, "probe_torch", lambda: WELL)


def only(checks: list[Check], name: str) -> Check:
    (found,) = [check for check in checks if check.name == name]
    return found
