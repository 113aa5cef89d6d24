"""Bringing: a replacement takes from a source what its script may read before it comes to the safepoint.

The sources stand at the safepoint of the same point and serve until all have what they need. If one fails, or a fault
comes in between, the next order names others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from torchrelay.protocol.messages.orders import Replay
from torchrelay.worker.retry import returned
from torchrelay.worker.session import Session
from torchrelay.worker.state.state import State
from torchrelay.worker.transfer import transfer
from torchrelay.worker.transfer.serving import STATE, snapshot_of

VALUES_S, STATE_S = 60.0, 600.0  # to fetch them may take


class Bringing:
    """Of one replacement."""

    def __init__(self, session: Session, state: State) -> None:
        self._session = session
        self._state = state
        self._values = b""
        self.moved: frozenset[str] = frozenset()  # parts that no source has as they were at that return

    def values(self) -> None:
        """Plain values of the state, as they were when the call returned that we were brought to."""
        order = self._session.standing.order(Replay)
        if order is not None and order.snapshot:
            self.state()  # nobody stands there who could tell them alone
        elif not self._state.saves:
            self._fetch(self._fetch_values)

    def state(self) -> None:
        """All of the state of the point that we were brought to, into the live tensors."""
        self._fetch(self._fetch_state)
        if self._values:
            self.moved = returned.take(self._state, self._values)

    def _fetch(self, fetch: Callable[[Replay, transfer.Cancel], None]) -> None:
        session = self._session
        tried: Replay | None = None

        def fresh() -> Replay | None:
            order = session.standing.order(Replay)
            return None if order is tried else order

        while True:
            order = session.standing.wait(fresh, session.welcome.patience_s)
            try:
                fetch(order, session.new_transfer())
            except transfer.TransferFailed as error:
                tried = order
                print(f"torchrelay: what is held at {order.point} did not come: {error}", file=sys.stderr, flush=True)
            else:
                return

    def _fetch_values(self, order: Replay, cancel: transfer.Cancel) -> None:
        self._values = transfer.fetch_values(
            order.sources, self._session.welcome.secret, order.generation, order.point, timeout_s=VALUES_S,
            cancel=cancel,
        )  # fmt: skip
        self.moved = returned.take(self._state, self._values)

    def _fetch_state(self, order: Replay, cancel: transfer.Cancel) -> None:
        session = self._session
        want = snapshot_of(order.rank, session.identity.wait().restarts) if order.snapshot else STATE
        transfer.fetch_state(
            order.sources, session.welcome.secret, order.generation, order.point, self._state, want=want,
            host=session.server.host, timeout_s=STATE_S, cancel=cancel,
        )  # fmt: skip
