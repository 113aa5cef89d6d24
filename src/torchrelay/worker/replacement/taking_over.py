"""Taking over: what a replacement does on its way from its first call to the safepoint where it gets its rank.

Its script makes the recorded calls of its place again, which return their recorded results without being run. What it
would have made them with is compared with what its predecessor made them with (see `given`). After the last one it has
its predecessor's random state and the values of the state, and what it reads of the rest is brought (see `Tail`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torchrelay.errors import UnprovedError
from torchrelay.protocol.messages.ids import Point
from torchrelay.protocol.messages.orders import Replay
from torchrelay.worker.data import alongside
from torchrelay.worker.data.cursor import Call, Cursor, LoopRecord, Skip, decode_call, decode_record
from torchrelay.worker.replacement import foresight
from torchrelay.worker.replacement.given import Doubt, Function
from torchrelay.worker.replacement.tail import Tail, TailReplay
from torchrelay.worker.retry import late, plain, returned
from torchrelay.worker.session import Session
from torchrelay.worker.state import random_state
from torchrelay.worker.state.lent import Lent
from torchrelay.worker.state.record import (
    AtGate,
    AtReturn,
    Private,
    decode_private,
    decode_told,
    encode_gate,
    encode_return,
)
from torchrelay.worker.state.saved import BetweenCalls, SavedPart
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import values
from torchrelay.worker.tensors.arguments import SIZE
from torchrelay.worker.transfer import transfer
from torchrelay.worker.transfer.serving import STATE, snapshot_of


class TakingOver:
    """Of one replacement."""

    def __init__(
        self, session: Session, state: State, private: Private, cursor: Cursor, kept: returned.Returned
    ) -> None:
        """`private`: what the rank's last holder left. `cursor`: on its way. `kept`: of this worker."""
        self.private = private
        # By function, numbers with which recorded steps were called and which are others here: see `Proving`.
        self.doubts: dict[bytes, Doubt] = {}
        self._session = session
        self._state = state
        self._bringing = Bringing(session, state)
        self._inherited: tuple[tuple[bytes | memoryview, ...], bytes] = ((), b"")
        self._cursor = cursor
        self._kept = kept
        self._way: TailReplay | None = None
        self._tail: Tail | None = None
        self._between: BetweenCalls | None = None  # with save() and load()
        self._random = random_state.capture()  # when the script went on last
        self._drawn_alike = False  # whether what it draws from there is what its predecessor drew

    def goes_on(self, drawn_alike: bool, told: bytes) -> None:
        """The script goes on in a recorded place. `drawn_alike`: with the random numbers of its predecessor.

        `told`: values of the state there, see `plain`.
        """
        self._random = random_state.capture()
        self._drawn_alike = drawn_alike
        self._stand(told, behind_a_call=False)

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
        ahead = self._cursor.next_entry() if self._cursor.replaying else None
        since = None if ahead is None or isinstance(ahead, Skip) else ahead.since
        if since is not None:
            random_state.restore(since.drawn)  # the call would have drawn
        self._random, self._drawn_alike = random_state.capture(), since is not None
        if self._cursor.replaying:
            self._stand(b"" if since is None else since.plain, behind_a_call=True)
        return values.decode(call.result)

    def _stand(self, told: bytes, *, behind_a_call: bool) -> None:
        """The script goes on, and calls are ahead: what it may read of the state is there, or is refused."""
        cursor = self._cursor
        values_there, moving = returned.parted(told)
        self._state.private.hidden.place(moving)
        whole = plain.put(self._kept.at_head, values_there)
        if not cursor.is_behind_changes:
            return  # the state is the initial one, as it is here
        if self._way is None:
            self._way = TailReplay(self._state, cursor, lambda: self._keeping(self._bringing.tensors))
            self._way.begin()
        ahead, moved = cursor.next_entry(), frozenset[str]()
        if isinstance(ahead, Call) and ahead.before and (behind_a_call or not ahead.moved):
            moved = returned.take(self._state, ahead.before)
            whole = True
        self._way.stands(values_known=whole, moved=moved)

    def begin_tail(self, call: Call) -> None:
        """The last recorded call is about to return: from here on the script is where its predecessor was."""
        assert call.result is not None, "results that were missing were fetched from a source"
        if self._way is not None:
            self._way.end()
            self._way = None
        saved = next((part for part in self._state.flat() if isinstance(part, SavedPart)), None)
        if saved is not None:
            self._keeping(self._bringing.state)
        self._between = None if saved is None else BetweenCalls(saved)
        self._state.private.load(self.private.state)
        if not self.private.returned:
            self._state.private.borrow(self.private.lent)
            late.make_again(self._state.private, self.private.late)
        if self._between is not None:
            self._between.begin()
        self._bringing.values(self.private.values)
        random_state.restore(self.private.rng)
        self._inherited = self._inherit(call.result)
        self._tail = Tail(self._state, lambda: self._keeping(self._bringing.state), self._bringing.moved)
        self._tail.begin()

    def end_tail(self, point: Point) -> None:
        """At the safepoint after `point`. The rank is ours soon, and may be taken from us before we have committed.

        Raises `PageFull`.
        """
        if self._tail is not None:
            self._tail.end()
            self._tail = None
        if self._between is not None:
            self._keeping(self._between.check)
        alongside.remove()
        gate, back = self._inherited
        self._session.page.keep(point, *gate)
        self._session.page.supplement(back)

    @staticmethod
    def _keeping(bring: Callable[[], None]) -> None:
        """What the script draws goes on where it was, whatever bringing the state draws."""
        drawn = random_state.capture()
        bring()
        random_state.restore(drawn)

    def _inherit(self, result: bytes) -> tuple[tuple[bytes | memoryview, ...], bytes]:
        """The record of the point that we are brought to, at its gate and at its return, as of now."""
        private = self.private
        state = self._state.private.record()
        back = AtReturn(result, state if state != private.state else None, private.late)
        gate = AtGate(private.state, private.place, private.late, private.learned, private.code)
        return encode_gate((private.rng,), gate), encode_return(back)


# ---------------------------------------------------------------- what is brought before

# From a source it takes what its script may read before it comes to the safepoint.
#
# The sources stand at the safepoint of the same point and serve until all have what they need. If one fails, or a fault
# comes in between, the next order names others.

VALUES_S, STATE_S = 60.0, 600.0  # to fetch them may take
AGAIN_S, TRIES = 1.0, 5  # between two tries, and how many with the same sources


class Bringing:
    """Of one replacement."""

    def __init__(self, session: Session, state: State) -> None:
        self._session = session
        self._state = state
        self._values = b""
        self.moved: frozenset[str] = frozenset()  # parts that no source has as they were at that return

    def values(self, told: bytes) -> None:
        """Plain values of the state, as they were when the call returned that we were brought to.

        `told`: with a snapshot, which holds what the script has made of them since.
        """
        order = self._session.position.order(Replay)
        if order is not None and order.snapshot:
            self.state()  # nobody stands there who could tell them alone
            if told:
                self._values, self.moved = told, returned.take(self._state, told)
        else:
            self._fetch(self._fetch_values)

    def state(self) -> None:
        """All of the state of the point that we were brought to, into the live tensors.

        Its values are those of a rank that has gone on since; ours have gone on as far as the script has.
        """
        ours = returned.now(self._state, tensors=True) if self._values else b""
        self._fetch(self._fetch_state)
        if self._values:
            returned.take(self._state, ours, returned.told_of(self._values))

    def tensors(self) -> None:
        """The same, before that point is reached: plain values stay as they are here."""
        ours = returned.now(self._state)
        self._fetch(self._fetch_state)
        returned.take(self._state, ours)

    def _fetch(self, fetch: Callable[[Replay, transfer.Cancel], None]) -> None:
        session = self._session
        tried: Replay | None = None

        def fresh() -> Replay | None:
            order = session.position.order(Replay)
            return None if order is tried else order

        failures = 0
        while True:
            order = session.position.wait(fresh, session.welcome.patience_s)
            try:
                return fetch(order, session.new_transfer())
            except transfer.TransferCancelled:
                tried = order  # a fault has come: another one follows
            except transfer.TransferFailed as error:
                if error.misfit:
                    raise transfer.misfit_error(error) from error
                print(f"torchrelay: what is held at {order.point} did not come: {error}", file=sys.stderr, flush=True)
                # Nobody else knows of it. If its sources are lost, another order follows; else it may go better.
                # The same order comes again and again, each time as another object.
                session.position.rest(AGAIN_S, lambda: fresh() != order)  # noqa: B023  called in this turn only
                failures = failures + 1 if fresh() == order else 0
                if failures == TRIES:
                    raise UnprovedError(
                        f"what is held at {order.point} did not come, in {TRIES} tries: {error}"
                    ) from error

    def _fetch_values(self, order: Replay, cancel: transfer.Cancel) -> None:
        self._values = transfer.fetch_values(
            order.sources,
            self._session.welcome.secret,
            order.generation,
            order.point,
            timeout_s=VALUES_S,
            cancel=cancel,
            tls=self._session.tls,
        )
        self.moved = returned.take(self._state, self._values)

    def _fetch_state(self, order: Replay, cancel: transfer.Cancel) -> None:
        session = self._session
        want = snapshot_of(order.rank, session.identity.wait().restarts) if order.snapshot else STATE
        transfer.fetch_state(
            order.sources,
            session.welcome.secret,
            order.generation,
            order.point,
            self._state,
            want=want,
            host=session.server.host,
            timeout_s=STATE_S,
            cancel=cancel,
            tls=session.tls,
        )


# ---------------------------------------------------------------- where it learns its place

# That is at the first moment at which the script's place matters, and not before.
#
# `protect()` returns at once. What the script does until it reads `run.global_step`, begins a tracked loop, calls a
# step or section, or ends, is the same wherever it goes on, and is done while the others still agree where that is.

RECORD_S = 60.0  # fetching a record may take
WITNESSES = 2  # ranks that are asked for a result that a lost one could not tell


def await_place(session: Session, cursor: Cursor) -> Private:
    """Wait for the point to go to, and set the cursor on the way there; returns what the rank's last holder left.

    Orders are repeated: if no source can give the record, the next order names others.
    """
    position = session.position
    tried: Replay | None = None

    def fresh() -> Replay | None:
        order = position.order(Replay)
        if order is None or order is tried:
            return None
        position.bring_to(order.point)
        return order

    while True:
        order = position.wait(fresh, session.welcome.patience_s)
        session.identity.take_over_output()
        private = decode_private(order.private)
        record = decode_record(private.place)
        assert record.last is not None, "records end with a call"
        record.last.result = private.result
        lent = () if private.returned else _complete(session, record, order)
        if lent is not None:
            cursor.follow(record)
            return replace(private, lent=lent)
        tried = order


def _complete(session: Session, record: LoopRecord, order: Replay) -> tuple[Lent, ...] | None:
    """The lost worker did not live to see its last call return: what it has not foreseen comes from other ranks.

    Returns what else they lend; None if nothing has come. Raises `UnprovedError` if nobody knows the result.
    """
    told = []
    for source in order.sources:
        try:
            found = transfer.fetch_record(
                [source],
                session.welcome.secret,
                order.generation,
                order.point,
                timeout_s=RECORD_S,
                cancel=session.new_transfer(),
                tls=session.tls,
            )
        except transfer.TransferFailed as error:
            print(f"torchrelay: the record of {order.point} did not come: {error}", file=sys.stderr, flush=True)
        else:
            told.append(decode_told(found))
        if len(told) == WITNESSES:
            break
    if not told:
        return None
    mine, theirs = record.last, [decode_call(one.call) for one in told]
    assert mine is not None, "records end with a call"
    assert all(one.point == order.point for one in theirs), f"asked for the call of {order.point}"
    mine.result = foresight.complete(mine.foreseen, [one.result for one in theirs if one.result is not None])
    return tuple(one.lent for one in told)
