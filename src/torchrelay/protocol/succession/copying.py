"""Copying: how far the heirs' copies of the journal are, and what may leave the head therefore.

The head numbers what it writes into its journal: its *parts*, from 1, under each lease anew.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from torchrelay.protocol.succession.head import Head
from torchrelay.protocol.succession.succession import CopyId


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


def may_be_told(copying: Copying, head: Head, part: int) -> bool:
    """Whether voters may hear of a proposal that stands in this part of the journal.

    All of its heirs have that part then. So they know of it, and have what had left before they were needed.
    """
    return all(copying.held.get(place.copy, 0) >= part for place in head.newest.heirs)
