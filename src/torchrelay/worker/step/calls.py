"""Calls: steps and sections, each run until it is committed.

    entry       the safepoint, if a fault or a replacement's arrival asks for it; then remember the way back
    function    forward, backward, and in a step, from a hook before the first update: the gate
    gate        at the latest when the function has returned
    exit        keep the result for a replacement

A fault cuts an attempt short at any place before its gate: the attempt is poisoned, everything is put back as it was
at the entry, and the function is called again with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import msgspec
from msgspec import structs
from torch.optim import Optimizer

from torchrelay.errors import RefusedError, StepInterrupted, TorchrelayError, UndeclaredError, with_article
from torchrelay.protocol.messages.ids import Point, WorkerPhase
from torchrelay.wire.files.page import PageFull
from torchrelay.worker.agreement.blame import tell_raised
from torchrelay.worker.agreement.comparing import EARLY_LAST, Comparison, Differing, DigestLog, Early
from torchrelay.worker.agreement.gate import Afterwards, Attempt, Gate, do_all, exchange_of, largest_of_ranks
from torchrelay.worker.data import cursor as places
from torchrelay.worker.data.cursor import Cursor
from torchrelay.worker.data.own_loops import Places
from torchrelay.worker.hardware import device
from torchrelay.worker.parallel import ddp, zero
from torchrelay.worker.peers.snapshots import Snapshots
from torchrelay.worker.process_groups import groups
from torchrelay.worker.replacement import dry_run, foresight
from torchrelay.worker.replacement.examples import Examples
from torchrelay.worker.replacement.given import STEP, Function, Functions, NobodyPasses, Proving
from torchrelay.worker.replacement.taking_over import TakingOver
from torchrelay.worker.retry import late
from torchrelay.worker.retry.redo import Redo
from torchrelay.worker.retry.returned import Returned
from torchrelay.worker.session import Session
from torchrelay.worker.state import random_state
from torchrelay.worker.state.private import too_large
from torchrelay.worker.state.record import AtGate, AtReturn, Private, Told, encode_gate, encode_return
from torchrelay.worker.state.state import State
from torchrelay.worker.step import between
from torchrelay.worker.step.safepoint import Safepoint
from torchrelay.worker.tensors import values
from torchrelay.worker.tensors.reserve import pieces_of

FIRST, EVERY = 3, 64  # calls of which it is checked that nothing but local work follows their gate


class Calls:
    """All calls of this worker's script."""

    def __init__(
        self, session: Session, state: State, cursor: Cursor, place: Callable[[], Private] | None, shard: str,
        rehearse: bool | None = None,
    ) -> None:  # fmt: skip
        """`shard`: what this rank holds, by which replicas know one another.

        `place`: for a replacement, waits until its place is known, and sets `cursor` on the way there.

        It returns what the rank's last holder left at the point where `cursor` then leads. `rehearse`: see `join`.
        """
        self._session = session
        self._position = session.position
        self._state = state
        self.cursor = self._cursor = cursor
        self.hidden = state.private.hidden
        self._place = place
        self._rehearse = rehearse
        self._whole = False  # of a target: the reducers with which it has rehearsed may stay
        self._taking_over: TakingOver | None = None  # of a replacement, until it goes on from the safepoint
        self.examples = Examples(
            keep=session.target, pieces=lambda: pieces_of(state.optimizers()), layouts=state.known_layouts,
            pipeline=state.pipeline.told,
        )  # fmt: skip
        self.places = Places()
        self._functions = Functions(state.objects(), self.hidden)
        session.server.example = self.examples.encoded
        self.returned = Returned(state)
        self._snapshots = session.snapshots = Snapshots(session, state, shard, largest_of_ranks, self.returned.encoded)
        self._gate = Gate(session, exchange_of(session, {tensor.device.type for _, tensor in state.parameters()}))
        self._safepoint = Safepoint(session, state, self._tell, self.returned.encoded)
        self._redo = {"step": Redo(state), "section": Redo(state, sections=True)}
        self._early = Early(state, shard)
        self._comparison = Comparison(session, state, shard)
        self._afterwards = Afterwards()
        self._between = between.of(session)
        self._proof = DigestLog.from_environment(session, state, cursor)
        self._wrappers = state.ddps()
        self._unsettled = list(self._wrappers)
        for optimizer in state.zeros():
            zero.stand_before_gather(optimizer, self._gather)
        self._proving = Proving(lambda: session.rank)
        self._proved = 0  # renewals after which the numbers of steps were shown to be right
        self._attempt: Attempt | None = None
        self._count = 0
        self._late: dict[str, str] | None = None
        self._half_done: str | None = None  # an exception has left a call after its gate
        self._strayed: str | None = None  # an exception has left a call, and the script has gone on

    @property
    def inside(self) -> bool:
        """Whether a call is under way."""
        return self._attempt is not None

    @property
    def committed(self) -> Point:
        """The last committed point, as far as the script can know: in a call that of its entry, as without us."""
        return self._cursor.point if self._attempt is None else self._attempt.begun

    def arrive(self) -> None:
        """The script's place matters now: a replacement waits for it, once. If there is time, it rehearses before."""
        if self._place is None or self._session.rehearsing:
            return
        if self._session.target:
            functions = self.examples.functions()
            self._whole = dry_run.prepare(self._session, self._state, functions, self._try, self._rehearse)
        private = self._place()
        self._session.program.check(private.code)
        self._taking_over = TakingOver(self._session, self._state, private, self._cursor, self.returned)
        self._cursor.on_way = self._taking_over.goes_on
        self._late = private.late
        self._place = None

    def _try(self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
        """A step that does not count. It is cut at its gate, and whoever calls it puts everything back."""
        self._attempt = Attempt("step", self._pending("step"), random_state.look(), self._cursor.point)
        try:
            function(*args, **kwargs)
        finally:
            self._attempt = None

    # ------------------------------------------------------------ a call

    def function(self, kind: str, function: Callable[..., Any]) -> Function:
        """A function that is to be called as a step or section."""
        return self._functions.add(function, kind)

    def run(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a step or section until it is committed, and return its result; a replacement's is recorded."""
        kind = function.kind
        if self._attempt is not None:
            raise RefusedError(f"a {kind} inside a {self._attempt.kind}", "call plain functions inside it")
        self._come(kind)
        if self._cursor.replaying:
            return self._replay(function, args, kwargs)
        if self._half_done is not None:
            raise RuntimeError(
                f"a {self._half_done} after its optimizer.step(), and the script went on: what it has updated by then "
                "nobody can tell. Let the exception leave the script, raise it earlier, or return a flag instead"
            )
        given: Callable[[], bytes] | None = None
        while True:
            # Most calls may begin; who may not looks why.
            attempt = self._begin(function) if self._taking_over is None and self._strayed is None else None
            if attempt is None:
                self.stand_still()
                attempt = self._begin(function)
            if attempt is None:
                continue
            if given is None:
                given = function.begin(args, kwargs)
                function.mark()
            attempt.given, attempt.foresight = given, function.foresight
            try:
                value = function.call(*args, **kwargs)
                self._finish(attempt, value)
            except BaseException as error:
                if not self._to_be_redone(attempt, error):
                    self._functions.returned()
                    raise
            else:
                self._functions.returned()
                return value
            finally:
                self._attempt = None
            self._go_back(attempt)
            function.rewind()
            function.check_again(given(), args, kwargs, _named(kind, attempt.pending))

    def _come(self, kind: str) -> None:
        """The script makes a call, from wherever it is."""
        if self._place is not None:
            self.arrive()
        if self._cursor.looks:
            self._cursor.come(self.places.here(3), step=kind == STEP)

    def stand_still(self) -> None:
        """At the entry of a call, or at the script's end: stop if somebody has asked for it."""
        if self._taking_over is not None:
            self._arrive_at_safepoint(self._taking_over)
            self._taking_over = self._cursor.on_way = None
        elif self._strayed is not None:
            # No safepoint that others could be brought to. A halt sends us on, to the end of the call that comes.
            if not self._position.await_way(self._session.welcome.patience_s):
                raise UndeclaredError(STRAYED.format(self._strayed))
        elif self._position.stop():
            for wrapper in self._wrappers:
                ddp.mark(wrapper)  # a call lies behind us: what DDP is now belongs to the one that follows
            self._safepoint.stop(whole=True)

    def _begin(self, function: Function) -> Attempt | None:
        """The entry: what follows can be undone. None if we have to stand still before."""
        kind = function.kind
        phase = WorkerPhase.COMPUTING if kind == STEP else WorkerPhase.SECTION
        pending = self._pending(kind)
        self._between.enter()
        if not self._position.begin_call(phase, pending):
            return None
        self._snapshots.entry(self._cursor.point)
        compares = self._comparison.due(pending, self._safepoint.renewed_after)
        if compares:
            self._comparison.begin()
        redo = self._redo[kind]
        redo.mark()
        redo.probe_entry(function)
        for wrapper in self._wrappers:
            ddp.mark(wrapper)
        attempt = self._attempt = Attempt(kind, pending, random_state.look(), self._cursor.point)
        attempt.compares, attempt.entered = compares, self.returned.enter(section=kind != STEP)
        if self._proof is not None:
            self._proof.note(random_state.pack(attempt.rng))
        return attempt

    def _pending(self, kind: str) -> Point:
        point = self._cursor.point
        return point.after_step() if kind == STEP else point.after_section()

    def _go_back(self, attempt: Attempt) -> None:
        """Put all back as it was at the entry, and wait until the call may be run again."""
        if self._strayed is not None:  # a replacement makes the call that raised once more, and we do not
            raise UndeclaredError(STRAYED.format(self._strayed))
        redo = self._redo[attempt.kind]
        if attempt.call is not None:
            self._cursor.drop_call(attempt.call)
        device.wait()  # what was cut short may still write to what is put back
        redo.rewind()
        random_state.restore(random_state.pack(attempt.rng))
        self._safepoint.stop(whole=False)

    # ------------------------------------------------------------ the gate

    def before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """The hook of every optimizer: in a step, the gate before its first update."""
        if self._session.rehearsing:
            raise dry_run.AtGate
        attempt = self._attempt
        if attempt is None or attempt.kind != STEP:
            where = "in a section" if attempt is not None else "outside of any step"
            if self._state.has_optimizer(optimizer):
                raise RefusedError(
                    f"{type(optimizer).__name__}.step() {where}: a fault could not undo it",
                    "call it in a function decorated with @run.step",
                )
            return
        if not self._state.has_optimizer(optimizer):
            if not self._state.saves:
                raise RefusedError(
                    f"{with_article(type(optimizer).__name__)} steps that was not given to protect()",
                    "pass all optimizers: protect(optimizer=[first, second])",
                )
            self._state.watch(optimizer)
        if not attempt.passed:
            self._pass_gate(attempt, optimizer)
        else:
            self._redo[STEP].also_steps(optimizer)

    def _pass_gate(self, attempt: Attempt, optimizer: Optimizer | None = None, result: bytes | None = None) -> None:
        """Commit, or raise `StepInterrupted`. `result`: if it is known."""
        if self._position.poisoned:
            raise StepInterrupted  # scripts catch what unwinds them: again at every gate of the attempt
        self._redo[attempt.kind].probe_gate(optimizer)
        # DDP changes its buckets once, early in the run: within the commit, so that no fault comes between.
        if self._unsettled:
            self._unsettled = [wrapper for wrapper in self._unsettled if not ddp.settle(wrapper)]
        pending = attempt.pending
        attempt.rng_at_gate = random_state.look()
        proofs = self._proofs(attempt)
        if attempt.call is None:
            attempt.call = self._cursor.begin_call(attempt.kind, pending, attempt.given())
            attempt.describe(self.returned, behind=len(self._cursor.frames[-1].trace) - 1)
        attempt.call.foreseen = attempt.foresight.at_gate(_CODE) if result is None else foresight.whole(result)
        try:
            record = self._record(attempt, attempt.rng_at_gate)
            complete = self._gate.enter(pending, *record, also=self._also(attempt, pending, proofs))
        except PageFull as error:
            raise too_large(error) from error
        except Differing as found:
            self._stand_for(found)
        except NobodyPasses:
            self._gate.await_interrupt(lambda: None)  # another rank says what is the matter
            raise StepInterrupted from None
        if proofs is not None and self._proving.settled:
            self._proved = self._safepoint.renewals
        if attempt.kind == STEP:
            self._proving.note(attempt.call.given)
        attempt.passed = True
        self._cursor.point = pending
        if not self._snapshots.idle:
            self._snapshots.passed(complete, step=attempt.kind == STEP)
        self._strayed = None
        if self._count < FIRST or self._count % EVERY == 0:
            self._afterwards.note()

    def _proofs(self, attempt: Attempt) -> Callable[[], None] | None:
        """In the first steps after ranks have changed hands: what shows that they are made with the right numbers."""
        if self._proved == self._safepoint.renewals or attempt.kind != STEP:
            return None
        return self._proving.look(attempt.given(), attempt.pending.step - self._safepoint.renewed_after.step)

    def _also(self, attempt: Attempt, pending: Point, proofs: Callable[[], None] | None) -> Callable[[], None] | None:
        """What all ranks do together in this gate, if anything: in few."""
        early_look = self._early.look(pending) if pending.step <= EARLY_LAST and attempt.kind == STEP else None
        since = self._safepoint.renewed_after
        compares = partial(self._comparison.exchange, pending, since) if attempt.compares else None
        agrees = None if self._snapshots.idle else self._snapshots.agree()
        found = [each for each in (proofs, early_look, compares, agrees) if each is not None]
        return partial(do_all, found) if len(found) > 1 else next(iter(found), None)

    def _stand_for(self, found: Differing) -> NoReturn:
        """Replicas differ: nobody goes on from here. One says so, and all wait until that has led to something."""
        speaks = self._comparison.speaks(found.event)

        def say() -> None:
            if speaks:
                self._session.agent.say(structs.replace(found.event, generation=self._position.wired))

        self._gate.await_interrupt(say)
        raise StepInterrupted

    def _record(self, attempt: Attempt, rng: random_state.Seen) -> tuple[bytes | memoryview, ...]:
        """What outlives this process, as of the gate."""
        private = self._state.private
        attempt.private = b"" if private.empty else private.record()
        learned = {"step": self._redo["step"].learned, "section": self._redo["section"].learned}
        gate = AtGate(attempt.private, self._cursor.record(), self._late, learned, self._session.program.digests())
        return encode_gate(random_state.parts(rng), gate)

    def _gather(self, optimizer: Optimizer) -> None:
        """The one thing that may communicate behind the gate. If it is cut, stand still: it is repeated at the end.

        Only once in a call: else one rank could be in the first gather while another one is in the second.
        """
        attempt = self._attempt
        assert attempt is not None, "no step of ours outside of a call"
        if attempt.gathered:
            raise RefusedError("a ZeroRedundancyOptimizer steps twice in a step", "decorate a step with one update")
        attempt.gathered = True
        cut = None
        try:
            self._afterwards.excuse(lambda: zero.gather(optimizer))
        except RuntimeError as error:  # torch's own errors derive from it, and so does ours
            if not groups.is_collective_error(error):
                raise
            cut = error.with_traceback(None)  # whoever held its frames would hold what communicated
        if cut is not None:
            self._gate.broken(cut)
            self._safepoint.stop(whole=True, serves=False)
            self._position.enter(WorkerPhase.UPDATING)
            self._afterwards.note()  # connected anew: all counts begin from nothing

    # ------------------------------------------------------------ the exit

    def _finish(self, attempt: Attempt, value: Any) -> None:
        """The function has returned: pass the gate if that is still to be done, and keep the result."""
        result = values.NOTHING if value is None else foresight.encoded(attempt.kind, value)
        if not attempt.passed:
            self._pass_gate(attempt, result=result)
        if self._count < FIRST or self._count % EVERY == 0:
            self._check_local(attempt)
        self._count += 1
        self._state.private.note_return()
        assert attempt.call is not None, "a committed call is in the record"
        attempt.call.result, attempt.call.foreseen = result, b""
        attempt.foresight.returned(value, result)
        private = self._state.private
        state = b"" if private.empty else private.record()
        since = AtReturn(result, state if state != attempt.private else None, self._late)
        try:
            self._session.page.supplement(encode_return(since))
        except PageFull as error:
            raise too_large(error) from error
        self.returned.mark()
        self._comparison.note_return()
        self._position.enter(WorkerPhase.BETWEEN)
        self._between.leave()

    def _check_local(self, attempt: Attempt) -> None:
        """Nothing but local work may follow the gate: it is not repeated, and nobody helps with it."""
        if attempt.kind == STEP and self._afterwards.found():
            raise RefusedError(
                "a step communicates after its first optimizer.step()",
                "move that communication before optimizer.step(), or into run.atomic(), or make each update a step",
            )
        assert attempt.rng_at_gate is not None, "it has been in the gate"
        if random_state.capture() != random_state.pack(attempt.rng_at_gate):
            raise RefusedError(
                "a step draws random numbers after its first optimizer.step()",
                "draw them before optimizer.step(), or after the step",
            )
        if attempt.kind == STEP:
            private = self._state.private
            moving = set().union(*(redo.moving for redo in self._redo.values()))
            self._late, shared = late.look(attempt.private, private.record(), private.unknown(moving))
            private.share(shared)

    # ------------------------------------------------------------ exceptions

    def _to_be_redone(self, attempt: Attempt, error: BaseException) -> bool:
        """Whether the call is to be run again after this exception; if not, it leaves the call."""
        if attempt.passed and isinstance(error, Exception) and not isinstance(error, TorchrelayError):
            self._half_done = f"{attempt.kind} raised {type(error).__name__}"
        if attempt.passed or isinstance(error, TorchrelayError):
            return False
        if isinstance(error, StepInterrupted):
            return True
        if not isinstance(error, (Exception, SystemExit)):
            return False
        if groups.is_collective_error(error):
            self._gate.broken(error)
            return True
        if self._position.poisoned:
            # It may be a consequence of the fault, or the script's own: others will tell. A collective of NCCL
            # that was cut short leaves behind what is no number, and scripts exit at that.
            tell_raised(self._session, error, fatal=False)
            return True
        if isinstance(error, SystemExit):
            return False
        self._strayed = type(error).__name__
        if attempt.call is not None:
            self._cursor.drop_call(attempt.call)
        self._position.stray()
        return False

    # ------------------------------------------------------------ replacements

    def _replay(self, function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The recorded result."""
        assert self._taking_over is not None, "only replacements replay"
        call = self._cursor.replay_call(function.kind)
        result = self._taking_over.replay(call, function, args, kwargs)
        if call.kind == STEP:
            self._proving.note(call.given)
        if not self._cursor.replaying:
            self._taking_over.begin_tail(call)
            self.returned.mark()
        return result

    def _arrive_at_safepoint(self, taking_over: TakingOver) -> None:
        """A replacement gets its rank, and knows what the calls of its last holder have shown."""
        try:
            taking_over.end_tail(self._cursor.point)
        except PageFull as error:
            raise too_large(error) from error
        self._safepoint.stop(whole=self._whole)
        self._proving.take_over(taking_over.doubts)
        for kind, redo in self._redo.items():
            if kind in taking_over.private.learned:
                redo.take_over(taking_over.private.learned[kind])

    def _tell(self) -> bytes:
        """Of our last call, for a replacement whose predecessor did not see it return."""
        return msgspec.msgpack.encode(Told(self._cursor.last_call(), self._state.private.lend()))

    # ------------------------------------------------------------ the end

    def end(self) -> None:
        """The script has ended: stand at the last safepoint until nobody asks for it any more."""
        self.arrive()
        self._between.enter()
        if self._cursor.replaying:
            raise places.Diverged("this worker takes over a rank, and its script ended before it came to its place")
        self.stand_still()

    def held(self) -> str:
        """For the comparison of replicas at the end of the job."""
        return self._comparison.at_the_end(self._safepoint.renewed_after)

    def note_end(self) -> None:
        """For tests: the digest of everything at the script's end."""
        if self._proof is not None:
            self._proof.note(random_state.capture())


_CODE = Calls.run.__code__
STRAYED = (
    "a step raised {}, the script went on without it, and a fault came before the next one was committed: other ranks "
    "may stand elsewhere. Let exceptions leave the script, or return a flag instead"
)


def _named(kind: str, point: Point) -> str:
    """A call, in words."""
    return f"the {kind} of {point}"
