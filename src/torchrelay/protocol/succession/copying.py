"""Copying: how far the heirs' copies of the journal are, and what may leave the head therefore.

The head numbers what it writes into its journal: its *parts*, from 1, under each lease anew.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct

from torchrelay.protocol.succession.head import Head
from torchrelay.protocol.succession.succession import CopyId, Place


class Copying(Struct, frozen=True):
    """`written`: the newest part. `held`: the newest part that each heir has, and all those before it."""

    written: int = 0
    held: dict[CopyId, int] = {}


def hear_held(copying: Copying, copy: CopyId, part: int) -> Copying:
    """An heir has all parts up to this one."""
    known = copying.held.get(copy, 0)
    return msgspec.structs.replace(copying, held={**copying.held, copy: max(known, part)})


def forget(copying: Copying, copy: CopyId) -> Copying:
    """This copy is no more."""
    return msgspec.structs.replace(copying, held={name: part for name, part in copying.held.items() if name != copy})


def may_leave(copying: Copying, head: Head) -> int:
    """What depends on parts up to this one may leave; 0: nothing may, as somebody else may act."""
    if not head.acts:
        return 0
    return min((copying.held.get(place.copy, 0) for place in head.needed), default=copying.written)


def may_be_heirs(copying: Copying, head: Head, places: Iterable[Place]) -> bool:
    """Whether these may be proposed as heirs: they have all that anything has left of before they were needed."""
    left = may_leave(copying, head)
    return all(place.copy in copying.held and copying.held[place.copy] >= left for place in places)
