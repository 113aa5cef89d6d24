"""Taking over: what a replacement does on its way from its first call to the safepoint where it gets its rank.

Its script makes the recorded calls of its place again, which return their recorded results without being run. What it
would have made them with is compared with what its predecessor made them with (see `given`). After the last one it has
its predecessor's random state and the values of the state, and what it reads of the rest is brought (see `tail`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrelay.protocol.messages.ids import Point
from torchrelay.worker.data import alongside
from torchrelay.worker.data.cursor import Call
from torchrelay.worker.hidden_state.arguments import SIZE
from torchrelay.worker.replacement.bringing import Bringing
from torchrelay.worker.replacement.given import Doubt, Function
from torchrelay.worker.replacement.tail import Tail
from torchrelay.worker.retry import late
from torchrelay.worker.session import Session
from torchrelay.worker.state import random_state
from torchrelay.worker.state.record import AtGate, AtReturn, Private, encode_gate, encode_return
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import values


class TakingOver:
    """Of one replacement."""

    def __init__(self, session: Session, state: State, private: Private) -> None:
        """`private`: what the rank's last holder left."""
        self.private = private
        # By function, numbers with which recorded steps were called and which are others here: see `proving`.
        self.doubts: dict[bytes, Doubt] = {}
        self._session = session
        self._state = state
        self._bringing = Bringing(session, state)
        self._inherited: tuple[tuple[bytes | memoryview, ...], bytes] = ((), b"")
        self._tail: Tail | None = None
        self._random = random_state.capture()  # when the script went on last
        self._drawn_alike = False  # whether what it draws from there is what its predecessor drew

    def goes_on(self, drawn_alike: bool) -> None:
        """The script goes on in a recorded place. `drawn_alike`: with the random numbers of its predecessor."""
        self._random = random_state.capture()
        self._drawn_alike = drawn_alike

    def replay(self, call: Call, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The recorded result of this call. Raises `UnprovedError` if it would have been made with something else."""
        assert call.result is not None, "results that were missing were fetched from a source"
        # What it has drawn for this call otherwise than its predecessor is no sign: random numbers come with the last
        # recorded call, and what is drawn for the next one will be right.
        if self._drawn_alike or random_state.capture() == self._random:
            doubt = function.check_replayed(call.given, args, kwargs, f"the {call.kind} of {call.point}")
            if doubt.entries:
                name = call.given[:SIZE]
                former = self.doubts.get(name)
                self.doubts[name] = doubt if former is None else former.and_also(doubt)
        self.goes_on(False)
        return values.decode(call.result)

    def begin_tail(self, call: Call) -> None:
        """The last recorded call is about to return: from here on the script is where its predecessor was."""
        assert call.result is not None, "results that were missing were fetched from a source"
        self._state.private.load(self.private.state)
        if not self.private.returned:
            self._state.private.hidden.borrow(self.private.lent)
            late.make_again(self._state.private, self.private.late)
        self._bringing.values()
        random_state.restore(self.private.rng)
        self._inherited = self._inherit(call.result)
        self._tail = Tail(self._state, self._bring, self._bringing.moved)
        self._tail.begin()

    def end_tail(self, point: Point) -> None:
        """At the safepoint after `point`. The rank is ours soon, and may be taken from us before we have committed.

        Raises `PageFull`.
        """
        if self._tail is not None:
            self._tail.end()
            self._tail = None
        alongside.remove()
        gate, back = self._inherited
        self._session.page.keep(point, *gate)
        self._session.page.supplement(back)

    def _bring(self) -> None:
        """What the script draws goes on where it was, whatever bringing the state draws."""
        drawn = random_state.capture()
        self._bringing.state()
        random_state.restore(drawn)

    def _inherit(self, result: bytes) -> tuple[tuple[bytes | memoryview, ...], bytes]:
        """The record of the point that we are brought to, at its gate and at its return, as of now."""
        private = self.private
        state = self._state.private.record()
        back = AtReturn(result, state if state != private.state else None, private.late)
        gate = AtGate(private.state, private.place, private.late, private.learned, private.code)
        return encode_gate((private.rng,), gate), encode_return(back)
