"""Cursor: where a script is in its loops and calls, and how a replacement's script is brought to the same place.

Tracked loops form a stack of frames. A frame counts the items it has yielded and keeps a trace of what happened since
the last one: calls, with their results, and loops that have ended. The stack is the record of a point:

    script    item -    trace: [section 0+1, loop epochs: item 3, trace: [...], section 500+2]
    epochs    item 4    trace: [section 600+1]
    batches   item 71   trace: [step 671]                     <- the point

A replacement's script runs from the top. Its loops start at the recorded items, its calls return the recorded results,
and a loop that has ended yields its last item again and ends, so that what the script keeps in variables of a loop is
there. The call after the last recorded one is the safepoint, where all others wait.

A loop that is not tracked leaves only its last turn in the trace, if it goes by `run.global_step` (`own_loops`):

    script    item -    trace: [section 0+1, skip to 671 at train.py:40, step 672]

A record is a few kilobytes and is written at every gate, so it is the live frames themselves that are encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from msgspec import Struct, structs

from torchrelay.errors import RefusedError, TorchrelayError
from torchrelay.protocol.messages.ids import START, Point
from torchrelay.worker.data.own_loops import Place, Rhythm

# Calls and ended loops within one item. A script whose loop is not tracked makes them without end.
MAX_TRACE = 4096
FEW = 1  # of them within an item: no need to look for loops. In a longer one each turn has random numbers of its own
MANY = 8  # calls and ended loops in one turn: what follows is recorded without `Since`, which is some kilobytes
MAX_STEPS = 10  # made by a loop outside of all tracked ones that does not ask where it is


PATH = (
    "Let the path of the script depend on its settings and on results of steps and sections only. What it computes "
    'from a checkpoint must stay what it was when the job began: start = torchrelay.once("start", load)'
)


class Since(Struct, array_like=True):
    """What holds when a call returns that another call, or a loop, follows in the same turn."""

    drawn: bytes  # random state
    plain: bytes  # values of the state that are read without a trace, see `plain`


class Call(Struct, array_like=True, tag="call", kw_only=True):
    """A call that is committed."""

    kind: str  # step, section
    point: Point
    result: bytes | None = None  # encoded; None as long as it has not returned
    given: bytes = b""  # what it was made with, see `given`
    foreseen: bytes = b""  # what is known of its result before it has returned, see `foresight`
    still: bool = False  # a section that has left all tensors of the state as they were
    before: bytes = b""  # of a section: plain values of the state when the call before it returned, see `returned`
    moved: bool = True  # of a section: whether the script has changed them since
    since: Since | None = None  # if there is a call before it in the same turn


class Skip(Struct, array_like=True, tag="skip", kw_only=True):
    """Turns of a loop of the script's own that are over: it asks at its head, and the answer is the point."""

    point: Point
    key: str  # of the place where it asks
    line: str
    drawn: bytes = b""  # random state when it asked
    kept: bytes = b""  # variables of the script then, see `variables`
    holds: bytes = b""  # digests of the data that functions use, see `holdings`
    plain: bytes = b""  # values of the state that are read without a trace, see `plain`


class Frame(Struct, array_like=True, tag="loop"):
    """A tracked loop; in a trace, one that has ended."""

    kind: str  # script, epochs, batches, steps
    count: int = 0  # items yielded
    begun: Point = START  # the point when the item was yielded
    mark: bytes = b""  # how the loop's source is entered
    drawn: bytes = b""  # random state just before the item was fetched
    trace: list[Call | Frame | Skip] = []
    moved: bytes = b""  # what was seen to move of what the loop's objects keep, just before the item was fetched
    item: bytes = b""  # a digest of the item, if its loader is entered by a state of its own
    length: int = -1  # how many items there are in all; less than 0: it does not say
    kept: bytes = b""  # variables of the script when the item was fetched, see `variables`
    holds: bytes = b""  # digests of the data that the loop's objects hold, see `holdings`
    along: list[tuple[str, int]] = []  # where enumerate() and the like were that go along with it, see `alongside`
    plain: bytes = b""  # values of the state that are read without a trace, when the item was fetched, see `plain`
    since: Since | None = None  # if there is a call before the loop in the same turn


class LoopRecord(Struct, array_like=True):
    """Where a script is: its open loops, outermost first."""

    frames: list[Frame]

    @property
    def last(self) -> Call | None:
        """The call that was committed last."""
        trace = self.frames[-1].trace if self.frames else []
        return trace[-1] if trace and isinstance(trace[-1], Call) else None


class Diverged(TorchrelayError):
    """A replacement's script did not take the path that the record tells of."""


_decoder = msgspec.msgpack.Decoder(LoopRecord)
_call_decoder = msgspec.msgpack.Decoder(Call)


def decode_record(data: bytes) -> LoopRecord:
    """Decode what `Cursor.record` has encoded. Raises `ValueError` for anything else."""
    try:
        record = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"{len(data)} bytes that are no record of a script's place: {error}") from error
    if not record.frames or record.last is None:
        raise ValueError("a record of a script's place that ends without a call")
    return record


def decode_call(data: bytes) -> Call:
    """Decode what `Cursor.last_call` has encoded. Raises `ValueError` for anything else."""
    try:
        return _call_decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"{len(data)} bytes that are no call: {error}") from error


class _Followed:
    """A recorded frame that a replacement's script is going through."""

    def __init__(self, frame: Frame, inner: list[Frame] | None) -> None:
        self.frame = frame
        self.inner = inner  # open loops within the item; None for a loop that had ended
        self.at = 0  # how much of the trace is behind

    def next(self) -> Call | Frame | Skip | None:
        trace = self.frame.trace
        return trace[self.at] if self.at < len(trace) else None


class Cursor:
    """The place of one script. Only the main thread moves it; it may be read while that stands still."""

    def __init__(self, record: LoopRecord | None = None) -> None:
        """`record`: for a replacement, where to go, if that is known already."""
        self._stack = [Frame("script")]
        self._open = {id(self._stack[0])}
        self._followed: list[_Followed] = []
        self._goal = START  # of a replacement: the point of its last recorded call
        self._passed = False  # of a replacement: a call behind it has changed the state
        self.incomplete = False  # of a replacement: earlier calls of this turn were run by its predecessor alone
        self._trouble: TorchrelayError | None = None  # found where nothing can be raised
        self._last: Call | None = None  # begun or replayed last; the loops may have moved on since
        self._former: Call | None = None  # the one before it, should it not be committed
        self._rhythms: dict[int, Rhythm] = {}  # for each open loop, by its id
        self._held_at = -1  # the step at which the data was looked at that the script's own loops use
        self.point = START  # committed, as far as the script can know
        # Of a replacement: the script goes on in a recorded place; whether random numbers are those of its predecessor.
        # And the plain values there.
        self.on_way: Callable[[bool, bytes], None] | None = None
        if record is not None:
            self.follow(record)

    def follow(self, record: LoopRecord) -> None:
        """For a replacement, before its first loop or call: where to go."""
        assert len(self._stack) == 1, "loops wait until it is known where to go"
        self._followed.append(_Followed(record.frames[0], record.frames[1:]))
        assert record.last is not None, "records end with a call"
        self._goal = record.last.point

    @property
    def replaying(self) -> bool:
        """Whether the script is still on its way to the recorded place."""
        return bool(self._followed)

    @property
    def is_behind_changes(self) -> bool:
        """Of a replacement: whether the state is no longer the initial one here."""
        return self._passed or self.point.step > 0

    def still_ahead(self) -> bool:
        """Of a replacement: whether no call between here and the last recorded one has changed the state."""
        ahead = list(self._ahead())
        known = len(ahead) == self._goal.section - self.point.section
        return self.point.step == self._goal.step and known and all(call.still for call in ahead)

    def next_entry(self) -> Call | Frame | Skip | None:
        """Of a replacement: the call or loop that comes next. Loops that have no call left end before it."""
        for followed in reversed(self._followed):
            entry = followed.next()
            if entry is not None or followed.inner is not None:
                return entry or next(iter(followed.inner or ()), None)
        return None

    def _ahead(self) -> Iterator[Call]:
        for followed in self._followed:
            yield from _calls(followed.frame.trace[followed.at :])
        for frame in self._followed[-1].inner or () if self._followed else ():
            yield from _calls(frame.trace)

    @property
    def frames(self) -> list[Frame]:
        """The open loops, outermost first. The live ones: not to be changed."""
        return self._stack

    def record(self) -> bytes:
        """The place now, encoded."""
        return msgspec.msgpack.encode(LoopRecord(self._stack))

    def last_call(self) -> bytes:
        """The call that was committed last, with its result, encoded. At a safepoint only."""
        assert self._last is not None, "whoever is asked has committed something"
        return msgspec.msgpack.encode(self._last)

    def refuse(self, error: RefusedError) -> None:
        """Found where nothing can be raised, such as in a thread: the next call raises it."""
        self._trouble = error

    def counts(self) -> list[int]:
        """For each open loop, how many items it has yielded."""
        return [frame.count for frame in self._stack]

    # ------------------------------------------------------------ loops of the script's own

    @property
    def looks(self) -> bool:
        """Whether it matters from where the script calls or asks: outside of all tracked loops, or in a long item."""
        return len(self._stack) == 1 or len(self._stack[-1].trace) >= FEW

    def come(self, place: Place, *, step: bool = False) -> None:
        """The script makes a call, or begins a loop, here. Raises `RefusedError` if that would have no end."""
        frame = self._stack[-1]
        rhythm = self._rhythms.setdefault(id(frame), Rhythm())
        seen = rhythm.come(place, len(frame.trace), step=step)
        if seen.steps > MAX_STEPS and len(self._stack) == 1 and not self.replaying and not rhythm.asked_before(seen):
            raise RefusedError(
                f"more than {MAX_STEPS} steps at {place.line} outside of all tracked loops: a worker that takes over a "
                "rank begins such a loop anew, and cannot tell how far it is",
                "write `for _ in run.steps(n):`, or run.epochs() and run.batches(); or `while run.global_step < n:`, "
                "and no counter beside it",
            )

    def ask(
        self,
        place: Place,
        draw: Callable[[], bytes],
        keep: Callable[[], bytes] = bytes,
        hold: Callable[[], bytes] = bytes,
        plain: Callable[[], bytes] = bytes,
    ) -> Skip | None:
        """The script asks for the point here. Returns where it is to go on; None: as it is.

        `draw`: the random state now. `keep`: the variables of the script now. `hold`: the data that it uses.
        `plain`: values of the state.
        """
        frame = self._stack[-1]
        trace = frame.trace
        rhythm = self._rhythms.setdefault(id(frame), Rhythm())
        if self.replaying:
            return self._ask_again(place, rhythm)
        at = rhythm.heads.get(place.key)
        if at is not None:
            skip = trace[at]
            assert isinstance(skip, Skip), "heads know where their loops are"
            del trace[at + 1 :]
            rhythm.cut(at + 1)
            self.incomplete = False
            skip.point, skip.drawn, skip.kept, skip.plain = self.point, draw(), keep(), plain()
            if self.point.step & (self.point.step - 1) == 0 and self.point.step != self._held_at:
                self._held_at, skip.holds = self.point.step, hold()
            return None
        seen = rhythm.come(place, len(trace), asks=True)
        if len(trace) - seen.first >= FEW and rhythm.leads(seen):
            at = seen.first
            asked = {"drawn": draw(), "kept": keep(), "holds": hold(), "plain": plain()}
            found = Skip(point=self.point, key=place.key, line=place.line, **asked)
            trace[at:] = [found]
            self._head(rhythm, place, at)
        return None

    def _ask_again(self, place: Place, rhythm: Rhythm) -> Skip | None:
        followed, trace = self._followed[-1], self._stack[-1].trace
        entry = followed.next()
        if not isinstance(entry, Skip) or entry.key != place.key:
            rhythm.come(place, len(trace), asks=True)
            return None
        followed.at += 1
        trace.append(structs.replace(entry))
        self._head(rhythm, place, len(trace) - 1)
        self.point = entry.point
        return entry

    def _head(self, rhythm: Rhythm, place: Place, at: int) -> None:
        rhythm.cut(at)
        rhythm.heads[place.key] = at
        rhythm.come(place, at, asks=True)

    # ------------------------------------------------------------ calls

    def begin_call(self, kind: str, point: Point, given: bytes = b"") -> Call:
        """A call is about to be committed: the record of `point` holds it, without its result.

        Raises `RefusedError` if the script makes calls without end within one item.
        """
        trace = self._stack[-1].trace
        if self._trouble is not None or len(trace) >= MAX_TRACE:
            self._check()
        call = Call(kind=kind, point=point, given=given)
        trace.append(call)
        self._former, self._last = self._last, call
        return call

    def drop_call(self, call: Call) -> None:
        """It is not committed after all."""
        trace = self._stack[-1].trace
        assert trace[-1:] == [call], "only the last call can be dropped"
        trace.pop()
        self._last = self._former

    def replay_call(self, kind: str) -> Call:
        """The recorded call that the script makes now; its result is returned instead of running it.

        When it was the last one, `replaying` is over. Raises `Diverged`.
        """
        self._check()
        followed = self._followed[-1]
        entry = followed.next()
        if not isinstance(entry, Call) or entry.kind != kind:
            raise self._diverged(f"calls a {kind}", entry)
        followed.at += 1
        self._stack[-1].trace.append(entry)
        self._last = entry
        self.point, self.incomplete = entry.point, True
        self._passed = self._passed or not entry.still
        if followed.next() is None and followed.inner == []:
            self._followed.clear()
        return entry

    def _check(self) -> None:
        if self._trouble is not None:
            raise self._trouble
        if len(self._stack[-1].trace) >= MAX_TRACE:
            raise RefusedError(
                f"{MAX_TRACE} calls and loops within one item of a tracked loop, whose results would have to be kept",
                "let the loop around the step be one of run.epochs(), run.batches() or run.steps()",
            )

    # ------------------------------------------------------------ loops

    def open(
        self,
        kind: str,
        length: int = -1,
        holds: Callable[[], bytes] = bytes,
        since: Callable[[], tuple[bytes, bytes]] | None = None,
    ) -> Opened:
        """A tracked loop of so many items begins, inside the item of the innermost open one. Raises `Diverged`.

        `holds`: what its objects hold; `since`: see `Since`. Asked only of a loop that is not recorded.
        """
        self._check()
        if not self.replaying:
            told = since if 0 < len(self._stack[-1].trace) < MANY else None
            return self._push(Frame(kind, length=length, holds=holds(), since=told and Since(*told())))
        followed = self._followed[-1]
        entry = followed.next()
        if isinstance(entry, Frame) and entry.kind == kind:
            followed.at += 1
            _check_length(entry, length)
            self._followed.append(_Followed(entry, None))
            return self._push(_copy(entry))
        if entry is None and followed.inner and followed.inner[0].kind == kind:
            _check_length(followed.inner[0], length)
            self._followed.append(_Followed(followed.inner[0], followed.inner[1:]))
            return self._push(_copy(followed.inner[0]))
        raise self._diverged(f"begins a loop of {kind}", entry)

    def _push(self, frame: Frame) -> Opened:
        self._stack.append(frame)
        self._open.add(id(frame))
        return Opened(frame, recorded=self.replaying)

    def enter_item(self, frame: Frame) -> None:
        """A replacement's loop yields the recorded item: what follows is what its trace tells."""
        self._climb_to(frame)
        self.point = frame.begun

    def next_item(
        self,
        frame: Frame,
        mark: bytes,
        drawn: bytes,
        moved: bytes = b"",
        item: bytes = b"",
        kept: bytes = b"",
        along: list[tuple[str, int]] | None = None,
        plain: bytes = b"",
    ) -> None:
        """The loop yields its next item. Raises `RefusedError` if it had been left, and `Diverged`."""
        self._climb_to(frame)
        if self.replaying:
            raise self._diverged(f"goes on with a loop of {frame.kind}", self._followed[-1].next())
        frame.count += 1
        self.incomplete = False
        frame.begun, frame.mark, frame.drawn, frame.trace = self.point, mark, drawn, []
        frame.moved, frame.item, frame.kept, frame.along, frame.plain = moved, item, kept, along or [], plain
        self._rhythms.pop(id(frame), None)

    def close(self, frame: Frame) -> None:
        """The loop has ended, or was left; so have those inside it that were never closed. Raises nothing."""
        if id(frame) not in self._open:
            return
        self._climb_to(frame)
        self._pop()

    def _climb_to(self, frame: Frame) -> None:
        """Loops inside this one that the script left without closing them have ended."""
        if id(frame) not in self._open:
            raise RefusedError(
                f"a loop of {frame.kind} goes on although the loop around it has moved on",
                "let tracked loops lie within one another; if two advance together, track one of them, and take the "
                "items of the other from it",
            )
        while self._stack[-1] is not frame:
            self._pop()

    def _pop(self) -> None:
        frame = self._stack.pop()
        self._open.discard(id(frame))
        self._rhythms.pop(id(frame), None)
        self._stack[-1].trace.append(frame)
        if self.replaying:
            followed = self._followed.pop()
            if followed.inner is not None or followed.next() is not None:
                # A loop is left in a generator's clean-up, where what is raised is lost: the next call raises it.
                self._trouble = self._diverged(f"leaves a loop of {frame.kind}", followed.next())

    def _diverged(self, what: str, entry: Call | Frame | Skip | None) -> Diverged:
        match entry:
            case Call():
                expected = f"came to the {entry.kind} of {entry.point}"
            case Frame():
                expected = f"came to a loop of {entry.kind}"
            case Skip():
                expected = f"asked for run.global_step at {entry.line}"
            case None:
                expected = "came to nothing of the kind"
        return Diverged(
            f"this worker takes over a rank, and its script {what} where the lost worker {expected}. {PATH}"
        )


def _calls(trace: list[Call | Frame | Skip]) -> Iterator[Call]:
    for entry in trace:
        if isinstance(entry, Call):
            yield entry
        elif isinstance(entry, Frame):
            yield from _calls(entry.trace)


def _check_length(recorded: Frame, length: int) -> None:
    """Raises `Diverged` if this loop has another length than the lost worker's had."""
    if length == recorded.length or min(length, recorded.length) < 0:
        return
    raise Diverged(
        f"this worker takes over a rank, and its loop of {recorded.kind} has {length} items. That of the lost worker "
        f"had {recorded.length}. {PATH}"
    )


class Opened(Struct):
    """A loop that has begun."""

    frame: Frame
    recorded: bool  # it begins at the item that the frame counts, not at the first


def _copy(frame: Frame) -> Frame:
    """The frame as it was when its item was yielded: the trace is lived through again."""
    return structs.replace(frame, trace=[])
