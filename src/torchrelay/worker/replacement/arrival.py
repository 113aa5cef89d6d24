"""Arrival: a replacement learns its place at the first moment at which the script's place matters, and not before.

`protect()` returns at once. What the script does until it reads `run.global_step`, begins a tracked loop, calls a step
or section, or ends, is the same wherever it goes on, and is done while the others still agree where that is.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from torchrelay.protocol.messages.orders import Replay
from torchrelay.worker.data.cursor import Cursor, Record, decode_call, decode_record
from torchrelay.worker.session import Session
from torchrelay.worker.state.record import Private, decode_private, decode_told
from torchrelay.worker.transfer import transfer

RECORD_S = 60.0  # fetching a record may take


def await_place(session: Session, cursor: Cursor) -> Private:
    """Wait for the point to go to, and set the cursor on the way there; returns what the rank's last holder left.

    Orders are repeated: if no source can give the record, the next order names others.
    """
    standing = session.standing
    tried: Replay | None = None

    def fresh() -> Replay | None:
        order = standing.order(Replay)
        if order is None or order is tried:
            return None
        standing.bring_to(order.point)
        return order

    while True:
        order = standing.wait(fresh, session.welcome.patience_s)
        session.identity.take_over_output()
        private = decode_private(order.private)
        record = decode_record(private.place)
        assert record.last is not None, "records end with a call"
        record.last.result = private.result
        lent = b"" if private.returned else _complete(session, record, order)
        if lent is not None:
            cursor.follow(record)
            return replace(private, lent=lent)
        tried = order


def _complete(session: Session, record: Record, order: Replay) -> bytes | None:
    """The lost worker did not live to see its last call return: another rank's result is taken for its own.

    Returns what else that rank lends; None if nothing has come.
    """
    cancel = session.new_transfer()
    try:
        data = transfer.fetch_record(
            order.sources, session.welcome.secret, order.generation, order.point, timeout_s=RECORD_S, cancel=cancel
        )
    except transfer.TransferFailed as error:
        print(f"torchrelay: the record of {order.point} did not come: {error}", file=sys.stderr, flush=True)
        return None
    told = decode_told(data)
    theirs, mine = decode_call(told.call), record.last
    assert mine is not None, "records end with a call"
    assert theirs.point == order.point, f"asked for the call of {order.point}, got that of {theirs.point}"
    mine.result = theirs.result
    return told.late
