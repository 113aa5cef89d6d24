"""Cost inputs: the assumptions of `torchrelay cost` as they are shown."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Used(Struct, frozen=True, kw_only=True):
    """An assumption as it is used."""

    flag: str
    value: Any
    unit: str
    default: str
    given: str  # by whom
    source: str
    what: str
