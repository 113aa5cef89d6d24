"""Safepoint: where a worker stands still, at the entry of a call, until all ranks may go on together.

    Decide or Replay   WorkerReady: we stand after this point; who holds its state serves it from now on
    Reconfigure              connect all groups in the new generation
    Restore             a replacement: take the state from a source
    Resume              stop serving, put DDP right, go on
    Park                write ourselves down: what is written is of no use if we go on from here

After a halt nothing is wrong, and the same safepoint serves:

    Decide (go on)      at the boundary: as above, and an outgoing worker hands over its record; before it: go on
    Resume              the halt is called off: stop serving, go on, and nothing was touched
    Reconfigure              the next generation: ranks have changed hands, and the rest is as in a recovery

Orders come in any order and more than once, and a newer generation begins it all again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from torchrelay.protocol.messages.events import (
    ReconfigureFailed,
    RestoreFailed,
    StateRestored,
    WorkerReady,
    WorkerReconfigured,
    WorkerResumed,
)
from torchrelay.protocol.messages.ids import START, Generation, Point, Rank, WorkerPhase
from torchrelay.protocol.messages.orders import (
    Assign,
    Decide,
    Park,
    Reconfigure,
    Replay,
    Restore,
    Resume,
    Verdict,
    WorkerOrder,
)
from torchrelay.wire.trust import trust
from torchrelay.worker.agreement.blame import tell_failed
from torchrelay.worker.agreement.gate import await_interrupt, on_lanes
from torchrelay.worker.parallel import ddp, fsdp, zero
from torchrelay.worker.peers.buddies import RECORDS
from torchrelay.worker.peers.lanes import Ends, Parted, limit_waits, watch_over
from torchrelay.worker.peers.parking import WrittenDown
from torchrelay.worker.peers.rounds import GATE, partners
from torchrelay.worker.process_groups import groups
from torchrelay.worker.session import Session
from torchrelay.worker.state import random_state
from torchrelay.worker.state.gradients import Gradients
from torchrelay.worker.state.record import with_values
from torchrelay.worker.state.state import State
from torchrelay.worker.transfer import transfer
from torchrelay.worker.transfer.serving import STATE, snapshot_of

WIRING_S = 60.0  # connecting may take; the orchestrator gives up earlier
RESTORE_S = 600.0


class Safepoint:
    """The safepoint of one worker. `record` tells the place of its script, for replacements."""

    def __init__(
        self,
        session: Session,
        state: State | None = None,
        record: Callable[[], bytes] | None = None,
        values: Callable[[], bytes] = bytes,
    ) -> None:
        """`values`: of the state, as they were when the last call returned; asked for by the main thread."""
        self._values = values
        self._session = session
        self._position = session.position
        self._state = state
        self._record = record
        self._ready = self._handed = self._reconfigured = Generation(0)  # done in this generation
        self._tried: Restore | None = None
        self._serves = True
        self._written_down = WrittenDown()
        self.renewals = 0  # how often ranks have changed hands while we stood here
        self.renewed_after = START  # the point at which they did so last: the same on all ranks

    # ------------------------------------------------------------ stops

    def wire(self) -> None:
        """The first wiring, in init_process_group: every rank asks for it."""
        position = self._position
        position.enter(WorkerPhase.STOPPED)
        self._say_ready(position.heard, None)
        while True:
            order = position.wait(lambda: self._next(Reconfigure, Resume), self._session.welcome.patience_s)
            if isinstance(order, Reconfigure):
                self._reconfigure(order)
            elif isinstance(order, Resume) and position.go_on(order.generation):
                self._say_resumed(order.generation)
                position.enter(WorkerPhase.BOOTING)
                return

    def stop(self, *, whole: bool, serves: bool = True) -> None:
        """Stand still until ordered to go on. The state is as it was at the entry of the call, before and after.

        `whole`: no call was cut short on the way here, so that DDP is in the middle of nothing. `serves`: others may
        have the state; not in the middle of a gather, where it is not all there.
        """
        assert self._state is not None, "only who has joined stops at calls"
        rng = random_state.capture()
        gradients = self._state.gradients()
        self._serves = serves
        self._position.enter(WorkerPhase.STOPPED)
        while True:
            order = self._position.wait(
                lambda: self._next(Decide, Replay, Reconfigure, Restore, Park, Resume), self._session.welcome.patience_s
            )
            match order:
                case Decide(verdict=Verdict.GO_ON) if order.point != self._position.committed:
                    if self._position.go_further(order.generation):
                        return
                case Decide() | Replay():
                    self._become_ready(order)
                case Reconfigure():
                    self._reconfigure(order)
                case Restore():
                    gradients = self._restore(order) or gradients
                case Park():
                    self._park(order)
                case Resume() if self._go_on(order, gradients, rng, whole=whole):
                    return

    def _go_on(self, order: Resume, gradients: Gradients, rng: bytes, *, whole: bool) -> bool:
        """Leave the safepoint; False if somebody was lost meanwhile."""
        self._session.server.withdraw()
        if self._position.halted != order.generation:  # else nothing was touched
            self._put_right(gradients, whole)
            random_state.restore(rng)
            if self._session.snapshots is not None:
                self._session.snapshots.renew()
            if not self._gather(order):
                return False
            self.renewals += 1
            self.renewed_after = order.point or START
        if not self._position.go_on(order.generation):
            return False
        self._written_down.drop()
        self._say_resumed(order.generation)
        return True

    def _next(self, *kinds: type[WorkerOrder]) -> Any:
        """The first order that is still to be obeyed, as things stand. Called under the lock."""
        position = self._position
        for kind in kinds:
            order = position.order(kind)
            if order is not None and self._due(order):
                return order
        return None

    def _due(self, order: WorkerOrder) -> bool:
        position = self._position
        match order:
            case Decide():
                done = self._handed if order.hand_over else self._ready
                return done != order.generation and position.committed is not None
            case Replay():
                return self._ready != order.generation and position.committed is None
            case Reconfigure():
                return self._reconfigured != order.generation and position.wired != order.generation
            case Restore():
                again = self._tried is not None and self._tried == order
                return self._reconfigured == order.generation and position.committed is None and not again
            case Park():
                return not self._written_down.answered(order) and position.committed == order.point
            case Resume():
                if position.halted == order.generation:
                    return True
                return self._reconfigured == order.generation and position.committed == order.point
        return False

    # ------------------------------------------------------------ ready

    def _become_ready(self, order: Decide | Replay) -> None:
        """We stand at the safepoint after the point that the job goes on from; its state may be had here."""
        position, session = self._position, self._session
        here = position.committed if position.committed is not None else position.caught_up
        assert here == order.point, f"ordered to stand after {order.point}, and stands after {here}"
        if position.committed is not None and self._serves:
            session.server.publish(order.generation, order.point, self._record, self._state, self._values())
        private = b""
        if isinstance(order, Decide) and order.hand_over:
            private = self._kept(order.point)
            self._handed = order.generation
        self._say_ready(order.generation, order.point, private)
        if position.poisoned:
            groups.silence()  # all may have to wait for long; what has not ended yet has to wait for the reconfigure

    def _kept(self, point: Point) -> bytes:
        """Our private record of this point: what the agent would find in the page; empty if we have committed nothing.

        The call has returned, so its result is there, too.
        """
        kept = [record.data for record in self._session.page.records() if record.point == point]
        return kept[0] if kept else b""

    def _say_ready(self, generation: Generation, point: Point | None, private: bytes = b"") -> None:
        self._ready = generation
        session = self._session
        ready = WorkerReady(
            job=session.job,
            generation=generation,
            worker=session.worker,
            rank=session.rank,
            point=point,
            private=private,
        )
        session.agent.answer(ready, Assign, Decide, Replay)

    # ------------------------------------------------------------ reconfigure

    def _reconfigure(self, order: Reconfigure) -> None:
        position, session = self._position, self._session
        if not position.begin_wiring(order.generation):
            return
        if self._state is not None and position.committed is not None and self._serves:
            # After a halt there was no verdict in this generation; whoever has taken over a rank asks for the state.
            session.server.publish(order.generation, position.committed, self._record, self._state, self._values())
        begin = time.monotonic()
        try:
            store = groups.connect_store(order.store, WIRING_S)
            keys = trust.keys_of(session.welcome.secret, order.generation)
            groups.reconfigure(store, generation=order.generation, timeout_s=WIRING_S, keys=keys)
            here = position.committed or position.caught_up
            record = b"" if here is None else self._kept(here)
            self._connect_lanes(order, store, here, record)
            store.set_timeout(timedelta(seconds=groups.timeout_s()))  # what a script asks it for comes when it comes
        except groups.ReconfigureError as error:
            failed = ReconfigureFailed(
                job=session.job,
                generation=order.generation,
                worker=session.worker,
                rank=session.rank,
                reason=error.reason,
            )
            session.agent.answer(failed, Reconfigure)
            return
        finally:
            position.end_wiring()
        self._reconfigured = order.generation
        reconfigured = WorkerReconfigured(
            job=session.job,
            generation=order.generation,
            worker=session.worker,
            rank=session.rank,
            took_ms=1000 * (time.monotonic() - begin),
        )
        session.agent.answer(reconfigured, Reconfigure)

    def _connect_lanes(self, order: Reconfigure, store: Store, point: Point | None, record: bytes) -> None:
        """Connect rank to rank, and let our buddies have the record of where we stand. Raises `ReconfigureError`."""
        session = self._session
        wanted: dict[str, tuple[Sequence[Rank], Sequence[Rank]]] = {RECORDS: (order.buddies, order.wards)}
        if on_lanes():
            wanted[GATE] = partners(order.rank, session.identity.wait().world_size)
        ends, addresses = session.lanes.meet(
            session.server.address, session.welcome.secret, order, store, wanted, WIRING_S
        )
        session.buddies.share(ends[RECORDS], [addresses[buddy] for buddy in order.buddies], point, record)
        if GATE in ends:
            self._prove_rounds(order, ends[GATE])
        for purpose, each in ends.items():
            limit_waits(each, groups.timeout_s())  # as a collective of torch
            watch_over(each, short=purpose == GATE)

    def _prove_rounds(self, order: Reconfigure, ends: Ends) -> None:
        """A first exchange: everybody is connected for gates and knows it. Raises `ReconfigureError`."""
        rounds, world_size = self._session.rounds, self._session.identity.wait().world_size
        rounds.connect(order.rank, world_size, ends)
        try:
            alike = rounds.exchange(Point(order.generation), lacking=False)
        except Parted as error:
            raise groups.ReconfigureError(f"generation {order.generation}, connecting for gates: {error}") from error
        if not alike:
            raise groups.ReconfigureError(
                f"generation {order.generation}, connecting for gates: others are in another one"
            )

    # ------------------------------------------------------------ restore

    def _restore(self, order: Restore) -> Gradients | None:
        """Take the state; returns which gradients there are at the point, or None if it did not come."""
        assert self._state is not None, "only who has joined can be restored"
        session, state = self._session, self._state
        self._tried = order
        cancel = session.new_transfer()
        if self._position.heard != order.generation:
            return None  # interrupted just before the handle was there to be cut
        try:
            received = transfer.fetch_state(
                order.sources,
                session.welcome.secret,
                order.generation,
                order.point,
                state,
                want=self._wanted(order),
                host=session.server.host,
                failed=lambda error: self._say_failed(order, error),
                timeout_s=RESTORE_S,
                cancel=cancel,
                tls=session.tls,
            )
        except transfer.TransferCancelled:
            return None
        except transfer.TransferFailed as error:
            if error.misfit:
                raise transfer.misfit_error(error) from error
            self._say_failed(order, error)
            return None
        if order.snapshot:
            session.snapshot_store.clear_after(order.point, session.identity.wait().restarts)
        if not self._position.hold(order.point, order.generation):
            return None
        restored = StateRestored(
            job=session.job,
            generation=order.generation,
            worker=session.worker,
            rank=session.rank,
            point=order.point,
            sources=received.sources,
            shares=tuple(received.shares[rank] for rank in received.sources),
            digest=received.digest,
            size=received.size,
            took_ms=1000 * received.took_s,
        )
        session.agent.answer(restored, Restore)
        return state.gradients()

    def _wanted(self, order: Restore) -> str:
        if not order.snapshot:
            return STATE
        return snapshot_of(order.rank, self._session.identity.wait().restarts)

    def _say_failed(self, order: Restore, error: transfer.TransferFailed) -> None:
        """A source has not delivered. Others may go on meanwhile: this answer is then followed by another."""
        session = self._session
        failed = RestoreFailed(
            job=session.job,
            generation=order.generation,
            worker=session.worker,
            rank=session.rank,
            source=error.source,
            reason=error.reason,
            mismatch=error.mismatch,
        )
        session.agent.answer(failed, Restore)

    # ------------------------------------------------------------ park

    def _park(self, order: Park) -> None:
        """Write ourselves down. Whatever keeps us from it is an answer, too; but for a fault that comes in between."""
        assert self._state is not None, "only who has joined is written down"
        why_not = "" if self._serves else "the state is not all here, in the middle of a gather"
        kept = self._kept(order.point)
        why_not = why_not or ("" if kept else f"there is no private record of {order.point}")
        private = with_values(kept, self._values()) if kept else b""
        answer = self._written_down.write(self._session, self._state, order, private, why_not)
        if answer is not None:
            self._session.agent.answer(answer, Park)

    # ------------------------------------------------------------ resume

    def _put_right(self, gradients: Gradients, whole: bool) -> None:
        """All ranks come out with reducers that do the same, and with the gradients of the entry."""
        assert self._state is not None, "only who has joined goes on from a point"
        state = self._state
        state.pipeline.put_right()
        fsdp.put_right(state.fsdp_states())
        if whole and self._keep_reducers():
            return  # a fresh reducer would do no other, and take memory that was never touched
        for wrapper, layout in zip(state.ddps(), state.ddp_layouts(), strict=True):
            ddp.renew(wrapper, layout)
        state.forget_received_layouts()
        state.put_gradients(gradients)  # a fresh reducer has dropped them

    def _gather(self, order: Resume) -> bool:
        """With ZeRO: let all ranks have one another's parameters, as a gather may have been cut on some.

        Returns whether we may go on; if not, others have been lost meanwhile.
        """
        assert self._state is not None, "only who has joined goes on from a point"
        zeros, position = self._state.zeros(), self._position
        if not zeros:
            return True
        if not position.begin_wiring(order.generation):  # from now on it may have to be broken
            return False
        try:
            for optimizer in zeros:
                zero.gather(optimizer)
        except RuntimeError as error:  # torch's own errors derive from it, and so does ours
            if not groups.is_collective_error(error):
                raise
            failed = error
            await_interrupt(self._session, lambda: tell_failed(self._session, failed))
            return False
        finally:
            position.end_wiring()
        return True

    def _keep_reducers(self) -> bool:
        """Whether all reducers may go on as they are; a replacement's, if they have the layouts it received."""
        assert self._state is not None, "only who has joined has reducers"
        wrappers, received = self._state.ddps(), self._state.received_layouts()
        if not all(map(ddp.is_final, wrappers)):
            return False
        if received is not None:
            if not all(ddp.adopt(*pair) for pair in zip(wrappers, received, strict=True)):
                return False
            self._state.forget_received_layouts()
        return True

    def _say_resumed(self, generation: Generation) -> None:
        session = self._session
        resumed = WorkerResumed(job=session.job, generation=generation, worker=session.worker, rank=session.rank)
        session.agent.answer(resumed, Resume)
