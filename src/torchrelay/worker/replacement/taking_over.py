"""Taking over: what a replacement does on its way from its first call to the safepoint where it gets its rank.

Its script makes the recorded calls of its place again, which return their recorded results without being run. What it
would have made them with is compared with what its predecessor made them with (see `given`). After the last one it has
its predecessor's random state and the values of the state, and what it reads of the rest is brought (see `Tail`).
"""

from __future__ import annotations

import functools
import multiprocessing.process
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchrelay.errors import UndeclaredError
from torchrelay.protocol.messages.ids import Point
from torchrelay.protocol.messages.orders import Replay
from torchrelay.worker.data import alongside
from torchrelay.worker.data.cursor import Call, Cursor, Record, decode_call, decode_record
from torchrelay.worker.parallel import shards
from torchrelay.worker.replacement import foresight
from torchrelay.worker.replacement.given import Doubt, Function
from torchrelay.worker.retry import late, returned
from torchrelay.worker.session import Session
from torchrelay.worker.state import random_state
from torchrelay.worker.state.parts import StatefulPart
from torchrelay.worker.state.record import (
    AtGate,
    AtReturn,
    Private,
    decode_private,
    decode_told,
    encode_gate,
    encode_return,
)
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import values
from torchrelay.worker.tensors.arguments import SIZE
from torchrelay.worker.transfer import transfer
from torchrelay.worker.transfer.serving import STATE, snapshot_of


class TakingOver:
    """Of one replacement."""

    def __init__(self, session: Session, state: State, private: Private) -> None:
        """`private`: what the rank's last holder left."""
        self.private = private
        # By function, numbers with which recorded steps were called and which are others here: see `Proving`.
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


# ---------------------------------------------------------------- what is brought before

# From a source it takes what its script may read before it comes to the safepoint.
#
# The sources stand at the safepoint of the same point and serve until all have what they need. If one fails, or a fault
# comes in between, the next order names others.

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
        """All of the state of the point that we were brought to, into the live tensors.

        Its values are those of a rank that has gone on since; ours have gone on as far as the script has.
        """
        ours = returned.now(self._state) if self._values else b""
        self._fetch(self._fetch_state)
        if self._values:
            returned.take(self._state, ours, returned.told_of(self._values))

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
    """The lost worker did not live to see its last call return: what it has not foreseen comes from other ranks.

    Returns what else another rank lends; None if nothing has come. Raises `UnprovedError` if nobody knows the result.
    """
    told = []
    for source in order.sources:
        try:
            found = transfer.fetch_record(
                [source], session.welcome.secret, order.generation, order.point, timeout_s=RECORD_S,
                cancel=session.new_transfer(),
            )  # fmt: skip
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
    return told[0].late


# ---------------------------------------------------------------- after the last recorded call

# What a replacement's script does between its last recorded call and the safepoint, it does all by itself.
#
# It may save, log or decide there, as its predecessor did. Plain values have come before (see `returned`). Tensors of
# the state are brought when the first of them is read: mostly none is, and at the safepoint the whole state comes once
# more. What another thread or process reads nobody here would see: before one of the script's is given work all is
# brought.

# What can be asked of a tensor without reading its values.
_LOOKS = frozenset(
    (
        *("shape", "size", "dtype", "device", "layout", "ndim", "dim", "numel", "nelement", "stride", "storage_offset"),
        *("element_size", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_leaf"),
        *("is_contiguous", "is_floating_point", "is_complex", "requires_grad", "requires_grad_", "grad", "grad_fn"),
        *("names", "_backward_hooks", "_version", "register_hook", "is_nested", "is_mkldnn", "is_xla", "is_mps"),
        *("is_inference", "get_device", "has_names", "retains_grad", "_is_view", "__len__", "__hash__"),
    )
)


# What hands a tensor's values over to something that outlives this moment, such as a file.
_GIVES_AWAY = frozenset(
    ("untyped_storage", "_typed_storage", "storage", "data_ptr", "numpy", "tolist", "__array__", "__reduce_ex__")
)


class Tail:
    """From the return of the last recorded call to the safepoint."""

    def __init__(self, state: State, bring: Callable[[], None], moved: frozenset[str] = frozenset()) -> None:
        """`bring`: put the state of this point into the live tensors; returns when it is there.

        `moved`: parts that came as they are a little later, as no rank has them as they were any more.
        """
        self._moved = [tensor for path, tensor in state.given_besides() if path in moved]
        self._names = ", ".join(sorted(moved))
        self._state = state
        self._bring = bring
        self._brought = False
        self._bringing = False
        self._held: set[int] = set()
        self._storages: set[int] = set()
        self._handing = _Handing(self.bring)
        self._alone = _NoCollectives()  # type: ignore[no-untyped-call]
        self._reading = _Reading(self)
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """From now on a collective raises `UndeclaredError`, and the state is brought when it is read."""
        self._note()
        for optimizer in self._state.optimizers():
            # Its state is not there yet: nothing of it could be read that a mode would see.
            self._hooks.append(optimizer.register_state_dict_pre_hook(lambda _: self.bring()))
        self._handing.begin()
        self._alone.__enter__()  # type: ignore[no-untyped-call]
        self._reading.__enter__()  # type: ignore[no-untyped-call]
        if self._state.saves:
            self.bring()  # it is known by save() and load() only: nobody can tell what is read of it

    def end(self) -> None:
        """No longer."""
        self._reading.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._alone.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._handing.end()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def bring(self) -> None:
        """What is read next must be there."""
        if self._brought or self._bringing:
            return
        self._bringing = True
        try:
            self._bring()
        finally:
            self._bringing = False
        self._brought = True

    def check(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises `UndeclaredError` if this call gives away what no rank has any more."""
        if not self._moved or _name_of(func) not in _GIVES_AWAY:
            return
        places = {_storage(tensor) for tensor in self._moved}
        if any(_storage(tensor) in places for tensor in _tensors(args, kwargs)):
            raise UndeclaredError(
                f"{self._names} changes between two steps, and is saved or read there: a worker that takes over a rank "
                "has it only as it is afterwards. Change it in the step, after optimizer.step(), or put saving and "
                "reading it into run.atomic(function, ...)"
            )

    def reads(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether this call of a torch function reads a tensor of the state that has not come yet."""
        if self._brought or self._bringing or _name_of(func) in _LOOKS:
            return False
        return any(self._is_of_state(tensor) for tensor in _tensors(args, kwargs))

    def _is_of_state(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._held or _storage(tensor) in self._storages

    def _note(self) -> None:
        found = [value for value in self._state.objects() if isinstance(value, torch.Tensor)]
        self._held = set(map(id, found))
        for optimizer in self._state.optimizers():
            for kept in optimizer.state.values():
                found += [value for value in kept.values() if isinstance(value, torch.Tensor)]
        for part in self._state.flat():
            if isinstance(part, StatefulPart):
                found += _tensors((part.value.state_dict(),), {})
        self._storages = {place for tensor in found if (place := _storage(tensor))}


class _Handing:
    """While it is begun, the state is brought before the main thread gives work to another thread or process."""

    _WAYS: tuple[tuple[Any, str], ...] = (
        (threading.Thread, "start"), (multiprocessing.process.BaseProcess, "start"), (ThreadPoolExecutor, "submit"),
        (queue.Queue, "put"),
    )  # fmt: skip

    def __init__(self, bring: Callable[[], None]) -> None:
        self._bring = bring
        self._plain: list[Any] = []

    def begin(self) -> None:
        self._plain = [vars(owner)[name] for owner, name in self._WAYS]
        for (owner, name), plain in zip(self._WAYS, self._plain, strict=True):
            setattr(owner, name, self._standing_before(plain))

    def end(self) -> None:
        for (owner, name), plain in zip(self._WAYS, self._plain, strict=True):
            setattr(owner, name, plain)

    def _standing_before(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def hands(this: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is threading.main_thread() and not _reads_no_state(this):
                self._bring()
            return plain(this, *args, **kwargs)

        return hands


def _reads_no_state(worker: Any) -> bool:
    """Whether it is a thread or process of a loader, or of ours."""
    target = getattr(worker, "_target", None) or type(worker)
    return str(getattr(target, "__module__", "")).startswith(("torch.utils.data", "multiprocessing", "torchrelay"))


class _Reading(TorchFunctionMode):
    """Sees each function of torch that is called with a tensor, before it is run."""

    def __init__(self, tail: Tail) -> None:
        super().__init__()
        self._tail = tail

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        given = kwargs or {}
        self._tail.check(func, args, given)
        if self._tail.reads(func, args, given):
            self._tail.bring()
        return func(*args, **given)


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's metaclass work
    """While it is entered, a collective raises `UndeclaredError`: its result would be wrong, as no peer is there."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        function: Callable[..., Any] = func
        if func.namespace in ("c10d", "_c10d_functional"):
            raise UndeclaredError(
                f"the script calls {func.__name__.split('.')[0].rstrip('_')} between two steps, in no section: "
                "a worker that takes over a rank cannot do that alone. Put it into run.atomic(function, ...)"
            )
        return function(*args, **(kwargs or {}))


def _name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name


def _tensors(args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return list(_found((*args, *kwargs.values()), 0))


def _found(values: Any, depth: int) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth < 8 and isinstance(value, (list, tuple)):
            yield from _found(value, depth + 1)
        elif depth < 8 and isinstance(value, Mapping):
            yield from _found(value.values(), depth + 1)


def _storage(tensor: torch.Tensor) -> int:
    """Where its memory is; 0 if it has none of its own."""
    try:
        return int(shards.local(tensor).untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0
