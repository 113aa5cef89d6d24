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
    """How far everything is.

    written  the newest part
    held     the newest part that each copy has, and all those before it
    left     the newest part that anything which has left the head depends on
    """

    written: int = 0
    held: dict[CopyId, int] = {}
    left: int = 0


def write(copying: Copying) -> Copying:
    """The head has written the next part."""
    return msgspec.structs.replace(copying, written=copying.written + 1)


def hear_held(copying: Copying, copy: CopyId, part: int) -> Copying:
    """An heir has all parts up to this one."""
    known = copying.held.get(copy, 0)
    return msgspec.structs.replace(copying, held={**copying.held, copy: max(known, part)})


def forget(copying: Copying, copy: CopyId) -> Copying:
    """This copy is no more."""
    return msgspec.structs.replace(copying, held={name: part for name, part in copying.held.items() if name != copy})


def let_leave(copying: Copying, head: Head) -> Copying:
    """All leaves that may: see `left`. From a head that does not act nothing may, as somebody else may act."""
    if not head.acts:
        return copying
    part = min((copying.held.get(place.copy, 0) for place in head.needed), default=copying.written)
    return msgspec.structs.replace(copying, left=max(copying.left, part))


def may_be_heirs(copying: Copying, places: Iterable[Place]) -> bool:
    """Whether these may be proposed as heirs: they have all that anything has left of before they were needed."""
    return all(place.copy in copying.held and copying.held[place.copy] >= copying.left for place in places)
