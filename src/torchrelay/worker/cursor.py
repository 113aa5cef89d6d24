"""Cursor: where a script is in its loops and calls, and how a newcomer's script is brought to the same place.

Tracked loops form a stack of frames. A frame counts the items it has yielded and keeps a trace of what happened since
the last one: calls, with their results, and loops that have ended. The stack is the record of a point:

    script    item -    trace: [section 0+1, loop epochs: item 3, trace: [...], section 500+2]
    epochs    item 4    trace: [section 600+1]
    batches   item 71   trace: [step 671]                     <- the point

A newcomer's script runs from the top. Its loops start at the recorded items, its calls return the recorded results,
and a loop that has ended yields its last item again and ends, so that what the script keeps in variables of a loop is
there. The call after the last recorded one is the edge, where all others wait.

A record is a few kilobytes and is written at every gate, so it is the live frames themselves that are encoded.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from torchrelay.errors import Refused, TorchrelayError
from torchrelay.protocol.ids import START, Point

# Calls and ended loops within one item. A script whose loop is not tracked makes them without end.
MAX_TRACE = 4096


class Call(Struct, array_like=True, tag="call", kw_only=True):
    """A call that is committed."""

    kind: str  # step, section
    point: Point
    result: bytes | None = None  # encoded; None as long as it has not returned
    given: bytes = b""  # what it was made with, see `given`


class Frame(Struct, array_like=True, tag="loop"):
    """A tracked loop; in a trace, one that has ended."""

    kind: str  # script, epochs, batches, steps
    count: int = 0  # items yielded
    begun: Point = START  # the point when the item was yielded
    mark: bytes = b""  # how the loop's source is entered
    drawn: bytes = b""  # random state just before the item was fetched, if fetching may draw
    trace: list[Call | Frame] = []
    moved: bytes = b""  # what was seen to move of what the loop's objects keep, just before the item was fetched
    item: bytes = b""  # a digest of the item, if its loader is entered by a state of its own


class Record(Struct, array_like=True):
    """Where a script is: its open loops, outermost first."""

    frames: list[Frame]

    @property
    def last(self) -> Call | None:
        """The call that was committed last."""
        trace = self.frames[-1].trace if self.frames else []
        return trace[-1] if trace and isinstance(trace[-1], Call) else None


class Diverged(TorchrelayError):
    """A newcomer's script did not take the path that the record tells of."""


_decoder = msgspec.msgpack.Decoder(Record)
_call_decoder = msgspec.msgpack.Decoder(Call)


def decode_record(data: bytes) -> Record:
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
    """A recorded frame that a newcomer's script is going through."""

    def __init__(self, frame: Frame, inner: list[Frame] | None) -> None:
        self.frame = frame
        self.inner = inner  # open loops within the item; None for a loop that had ended
        self.at = 0  # how much of the trace is behind

    def next(self) -> Call | Frame | None:
        trace = self.frame.trace
        return trace[self.at] if self.at < len(trace) else None


class Cursor:
    """The place of one script. Only the main thread moves it; it may be read while that stands still."""

    def __init__(self, record: Record | None = None) -> None:
        """`record`: for a newcomer, where to go, if that is known already."""
        self._stack = [Frame("script")]
        self._open = {id(self._stack[0])}
        self._followed: list[_Followed] = []
        self._trouble: Diverged | None = None  # found where nothing can be raised
        self._last: Call | None = None  # begun or replayed last; the loops may have moved on since
        self._former: Call | None = None  # the one before it, should it not be committed
        self.point = START  # committed, as far as the script can know
        if record is not None:
            self.follow(record)

    def follow(self, record: Record) -> None:
        """For a newcomer, before its first loop or call: where to go."""
        assert len(self._stack) == 1, "loops wait until it is known where to go"
        self._followed.append(_Followed(record.frames[0], record.frames[1:]))

    @property
    def replaying(self) -> bool:
        """Whether the script is still on its way to the recorded place."""
        return bool(self._followed)

    @property
    def frames(self) -> list[Frame]:
        """The open loops, outermost first. The live ones: not to be changed."""
        return self._stack

    def record(self) -> bytes:
        """The place now, encoded."""
        return msgspec.msgpack.encode(Record(self._stack))

    def last_call(self) -> bytes:
        """The call that was committed last, with its result, encoded. At an edge only."""
        assert self._last is not None, "whoever is asked has committed something"
        return msgspec.msgpack.encode(self._last)

    @property
    def last_given(self) -> bytes:
        """What the call that was committed last was made with."""
        return self._last.given if self._last is not None else b""

    def counts(self) -> list[int]:
        """For each open loop, how many items it has yielded."""
        return [frame.count for frame in self._stack]

    # ------------------------------------------------------------ calls

    def begin_call(self, kind: str, point: Point, given: bytes = b"") -> Call:
        """A call is about to be committed: the record of `point` holds it, without its result.

        Raises `Refused` if the script makes calls without end within one item.
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
        self.point = entry.point
        if followed.next() is None and followed.inner == []:
            self._followed.clear()
        return entry

    def _check(self) -> None:
        if self._trouble is not None:
            raise self._trouble
        if len(self._stack[-1].trace) >= MAX_TRACE:
            raise Refused(
                f"{MAX_TRACE} calls and loops within one item of a tracked loop, whose results would have to be kept",
                "let the loop around the step be one of run.epochs(), run.batches() or run.steps()",
            )

    # ------------------------------------------------------------ loops

    def open(self, kind: str) -> Opened:
        """A tracked loop begins, inside the item of the innermost open one. Raises `Diverged`."""
        self._check()
        if not self.replaying:
            return self._push(Frame(kind))
        followed = self._followed[-1]
        entry = followed.next()
        if isinstance(entry, Frame) and entry.kind == kind:
            followed.at += 1
            self._followed.append(_Followed(entry, None))
            return self._push(_copy(entry))
        if entry is None and followed.inner and followed.inner[0].kind == kind:
            self._followed.append(_Followed(followed.inner[0], followed.inner[1:]))
            return self._push(_copy(followed.inner[0]))
        raise self._diverged(f"begins a loop of {kind}", entry)

    def _push(self, frame: Frame) -> Opened:
        self._stack.append(frame)
        self._open.add(id(frame))
        return Opened(frame, recorded=self.replaying)

    def enter_item(self, frame: Frame) -> None:
        """A newcomer's loop yields the recorded item: what follows is what its trace tells."""
        self._climb_to(frame)
        self.point = frame.begun

    def next_item(self, frame: Frame, mark: bytes, drawn: bytes, moved: bytes = b"", item: bytes = b"") -> None:
        """The loop yields its next item. Raises `Refused` if it had been left, and `Diverged`."""
        self._climb_to(frame)
        if self.replaying:
            raise self._diverged(f"goes on with a loop of {frame.kind}", self._followed[-1].next())
        frame.count += 1
        frame.begun, frame.mark, frame.drawn, frame.trace = self.point, mark, drawn, []
        frame.moved, frame.item = moved, item

    def close(self, frame: Frame) -> None:
        """The loop has ended, or was left; so have those inside it that were never closed. Raises nothing."""
        if id(frame) not in self._open:
            return
        self._climb_to(frame)
        self._pop()

    def _climb_to(self, frame: Frame) -> None:
        """Loops inside this one that the script left without closing them have ended."""
        if id(frame) not in self._open:
            raise Refused(
                f"a loop of {frame.kind} goes on although the loop around it has moved on",
                "let tracked loops lie within one another; if two advance together, track one of them, and take the "
                "items of the other from it",
            )
        while self._stack[-1] is not frame:
            self._pop()

    def _pop(self) -> None:
        frame = self._stack.pop()
        self._open.discard(id(frame))
        self._stack[-1].trace.append(frame)
        if self.replaying:
            followed = self._followed.pop()
            if followed.inner is not None or followed.next() is not None:
                # A loop is left in a generator's clean-up, where what is raised is lost: the next call raises it.
                self._trouble = self._diverged(f"leaves a loop of {frame.kind}", followed.next())

    def _diverged(self, what: str, entry: Call | Frame | None) -> Diverged:
        if isinstance(entry, Call):
            expected = f"the {entry.kind} of {entry.point}"
        else:
            expected = f"a loop of {entry.kind}" if entry is not None else "nothing of the kind"
        return Diverged(
            f"this worker takes over a rank, and its script {what} where the lost worker came to {expected}. "
            "Let the path of the script depend on its settings and on results of steps and sections only; what it "
            "finds at its start, such as its newest checkpoint, let torchrelay.once(NAME, FUNCTION) keep for successors"
        )


class Opened(Struct):
    """A loop that has begun."""

    frame: Frame
    recorded: bool  # it begins at the item that the frame counts, not at the first


def _copy(frame: Frame) -> Frame:
    """The frame as it was when its item was yielded: the trace is lived through again."""
    return Frame(frame.kind, frame.count, frame.begun, frame.mark, frame.drawn, [], frame.moved, frame.item)
