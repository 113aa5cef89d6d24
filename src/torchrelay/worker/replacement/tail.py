"""Tail: what a replacement's script does between recorded calls, and behind the last one, all by itself.

It may save, log or decide there, as its predecessor did. Plain values have come before (see `plain`, `returned`).
Tensors of the state are brought when the first of them is read: mostly none is, and at the safepoint the whole state
comes once more. What another thread or process reads nobody here would see: before one of the script's is given work
all is brought. Gradients are not there at all.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import queue
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torchrelay.errors import UndeclaredError
from torchrelay.worker.data.cursor import Cursor
from torchrelay.worker.parallel import shards
from torchrelay.worker.source.lines import is_library
from torchrelay.worker.state.parts import ContainerPart, StatefulPart
from torchrelay.worker.state.state import State

# What can be asked of a tensor without reading its values.
LOOKS = frozenset(
    (
        *("shape", "size", "dtype", "device", "layout", "ndim", "dim", "numel", "nelement", "stride", "storage_offset"),
        *("element_size", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_leaf"),
        *("is_contiguous", "is_floating_point", "is_complex", "requires_grad", "requires_grad_", "grad", "grad_fn"),
        *("names", "_backward_hooks", "_version", "register_hook", "is_nested", "is_mkldnn", "is_xla", "is_mps"),
        *("is_inference", "get_device", "has_names", "retains_grad", "_is_view", "__len__", "__hash__"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "zeros_like", "ones_like", "empty_like"),
        *("full_like", "rand_like", "randn_like", "randint_like", "is_signed", "can_cast", "result_type"),
    )
)


# What gives another view of a tensor's memory: who reads that is seen. And how torch clears gradients.
HARMLESS = LOOKS | {"data", "detach", "detach_", "view", "view_as", "t", "T", "unsqueeze", "squeeze", "zero_"}


# What hands a tensor's values over to something that outlives this moment, such as a file.
_GIVES_AWAY = frozenset(
    ("untyped_storage", "_typed_storage", "storage", "data_ptr", "numpy", "tolist", "__array__", "__reduce_ex__")
)


GRADIENTS = (
    "the script reads gradients between two steps: a worker that takes over a rank does not have them. Read them in "
    "the step, before optimizer.step(), and return what is needed"
)


class Watched:
    """Sees what the script reads of the state, and brings the state once."""

    def __init__(self, state: State, bring: Callable[[], None]) -> None:
        """`bring`: put the state of the point that we are brought to into the live tensors."""
        self._state = state
        self._bring = bring
        self._brought = False
        self._bringing = False
        self._changes = Changes(state)
        self._held: set[int] = set()
        self._storages: set[int] = set()
        self._alone = _NoCollectives()  # type: ignore[no-untyped-call]
        self._reading = _Reading(self)
        self._waiting: list[tuple[Any, Any]] = []  # optimizers, with their own state

    def begin(self) -> None:
        """From now on a collective raises `UndeclaredError`, and the state is brought when it is read, if it may be."""
        self._held, self._storages = places_of(self._state)
        self._waiting = [(one, one.state) for one in self._state.optimizers()]
        for optimizer, kept in self._waiting:  # nothing of it is there yet that a mode would see being read
            optimizer.state = _Waiting(lambda: self.wanted("the state of an optimizer"), kept)
        self._alone.__enter__()  # type: ignore[no-untyped-call]
        self._reading.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """No longer."""
        self._reading.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._alone.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._give_back()

    def see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A function of torch is about to be run. Raises `UndeclaredError` if it reads what no rank has."""
        raise NotImplementedError

    def wanted(self, what: str) -> None:
        """The script reads this. Raises `UndeclaredError` if no rank has it."""
        del what
        self.bring()

    def bring(self) -> None:
        """What is read next must be there."""
        if self._brought or self._bringing:
            return
        self._bringing = True
        self._give_back()
        try:
            self._bring()
        finally:
            self._bringing = False
        self._brought = True

    def _give_back(self) -> None:
        """Optimizers have their own state again."""
        for optimizer, kept in self._waiting:
            optimizer.state = kept
        self._waiting = []

    def _is_of_state(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._held or storage_of(tensor) in self._storages


REMEDY = (
    "a worker that takes over a rank does not have it: other calls have changed it since. Read it behind the last call "
    "of a turn, or in a step or section: run.atomic(function, ...)"
)


class Way(Watched):
    """From the first place behind a step to the last recorded call.

    The predecessor had trained when its script did that; here the model is as it was built. If no call ahead changes
    the state, as sections that only evaluate or save do not, it is now what it is at the point that we are brought to,
    and is brought from there. Else `UndeclaredError` is raised: no rank has it. What the script writes into the state
    counts for nothing, as all of it comes at the end; but what it has written it may not read.
    """

    def __init__(self, state: State, cursor: Cursor, bring: Callable[[], None]) -> None:
        super().__init__(state, bring)
        self._cursor = cursor
        self._values_known = False  # plain values are those of this place

    def stands(self, *, values_known: bool) -> None:
        """The script goes on, behind a recorded call or in an item. `values_known`: learning rates and the like."""
        self._values_known = values_known

    def see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        name = name_of(func)
        if self._bringing or name in HARMLESS:
            return
        places = {storage_of(each) for each in tensors_in(args, kwargs) if self._is_of_state(each)}
        if not places or not _is_of_the_script():
            return
        self._changes.see(name, args, kwargs, places)
        if not places & written(name, args, kwargs):  # what comes of it is overwritten in the end
            self.wanted("the state")

    def wanted(self, what: str) -> None:
        if not self._bringing and not (self._values_known and self._cursor.still_ahead()):
            raise UndeclaredError(f"the script reads {what} between two calls, after {self._cursor.point}: {REMEDY}")
        self.bring()


def _is_of_the_script() -> bool:
    """Whether it is not our own doing: the nearest caller outside of torch is no function of ours."""
    frame = sys._getframe(3)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("torchrelay."):
            return False
        if not name.startswith("torch.") and not is_library(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return True


class Tail(Watched):
    """From the return of the last recorded call to the safepoint."""

    def __init__(self, state: State, bring: Callable[[], None], moved: frozenset[str] = frozenset()) -> None:
        """`moved`: parts that came as they are a little later, as no rank has them as they were any more."""
        super().__init__(state, bring)
        self._moved = [tensor for path, tensor in state.given_besides() if path in moved]
        self._names = ", ".join(sorted(moved))
        self._handing = _Handing(self.bring)

    def begin(self) -> None:
        self._handing.begin()
        super().begin()
        if self._state.saves:
            self._brought = True  # before: it is known by save() and load() only, and what is read of it is not seen

    def end(self) -> None:
        super().end()
        self._handing.end()

    def see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.check(func, args, kwargs)
        if self.reads(func, args, kwargs):
            self.bring()

    def check(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises `UndeclaredError` if this call gives away what no rank has any more, or reads a gradient."""
        if self._reads_gradient(func, args):
            raise UndeclaredError(GRADIENTS)
        name = name_of(func)
        if not self._bringing and name not in HARMLESS:
            found = {storage_of(tensor) for tensor in tensors_in(args, kwargs)} & self._storages
            if found:
                self._changes.see(name, args, kwargs, found)
        if not self._moved or name_of(func) not in _GIVES_AWAY:
            return
        places = {storage_of(tensor) for tensor in self._moved}
        if any(storage_of(tensor) in places for tensor in tensors_in(args, kwargs)):
            raise UndeclaredError(
                f"{self._names} changes between two steps, and is saved or read there: a worker that takes over a rank "
                "has it only as it is afterwards. Change it in the step, after optimizer.step(), or put saving and "
                "reading it into run.atomic(function, ...)"
            )

    def _reads_gradient(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether the script itself asks for the gradient of a tensor of the state. Libraries ask to clear it."""
        asked = getattr(func, "__name__", "") == "__get__" and name_of(func) == "grad"
        if not asked or self._bringing or not self._is_of_state(args[0]):
            return False
        frame = sys._getframe(4)  # below are the mode, `see`, `check` and this
        return not is_library(frame.f_code.co_filename)

    def reads(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether this call of a torch function reads a tensor of the state that has not come yet."""
        if self._brought or self._bringing or name_of(func) in LOOKS:
            return False
        return any(self._is_of_state(tensor) for tensor in tensors_in(args, kwargs))


def places_of(state: State) -> tuple[set[int], set[int]]:
    """The tensors of a state by their ids, and the memory in which they lie."""
    found = [value for value in state.objects() if isinstance(value, torch.Tensor)]
    held = set(map(id, found))
    for optimizer in state.optimizers():
        for kept in optimizer.state.values():
            found += [value for value in kept.values() if isinstance(value, torch.Tensor)]
    for part in state.flat():
        if isinstance(part, StatefulPart):
            found += tensors_in((part.value.state_dict(),), {})
        elif isinstance(part, ContainerPart):
            found += tensors_in((part.value,), {})
    return held, {place for tensor in found if (place := storage_of(tensor))}


_SETS = frozenset(("__setitem__", "__set__"))
_IN_PLACE = re.compile(r"\w*[a-z0-9]_|__i(add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift)__")
SWAPPED = (
    "the script changes parameters between two steps, and reads them there: a worker that takes over a rank may have "
    "them only as they are afterwards. Change them, and put them back, inside run.atomic(function, ...)"
)


class Changes:
    """What the script writes into parameters between two calls, and what it reads of them there.

    Other ranks may have come further in that code: what is brought from them may be what they have written. A script
    that only writes, as clipping does, gets the right values in the end; one that also reads, as an average does that
    takes the place of the parameters for an evaluation, would get others.
    """

    def __init__(self, state: State) -> None:
        besides = {storage_of(tensor) for _, tensor in state.given_besides()}
        self._tracked = {storage_of(parameter) for _, parameter in state.parameters()} - besides - {0}
        self._read: set[int] = set()
        self._written: set[int] = set()

    def see(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], places: set[int]) -> None:
        """A function that takes what lies in these places is about to be run. Raises `UndeclaredError`."""
        targets = written(name, args, kwargs) & self._tracked
        read = places & self._tracked - targets
        if targets & self._read or read & self._written:
            raise UndeclaredError(SWAPPED)
        self._written |= targets
        self._read |= read


def written(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> set[int]:
    """The memory that a function of this name writes to, by torch's way of naming them."""
    if name in _SETS or _IN_PLACE.fullmatch(name):
        return set(map(storage_of, tensors_in(args[:1], {})))
    return {storage_of(kwargs["out"])} if isinstance(kwargs.get("out"), torch.Tensor) else set()


class _Waiting(defaultdict[Any, Any]):
    """The state of an optimizer, which is brought when it is looked into."""

    def __init__(self, bring: Callable[[], None], kept: Any) -> None:
        super().__init__(dict)
        self._torchrelay = bring, kept

    def _there(self) -> Any:
        bring, kept = self._torchrelay
        bring()
        return kept

    def __getitem__(self, key: Any) -> Any:
        return self._there()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._there()[key] = value

    def __contains__(self, key: object) -> bool:
        return key in self._there()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._there())

    def __len__(self) -> int:
        return len(self._there())

    def get(self, key: Any, default: Any = None) -> Any:
        return self._there().get(key, default)

    def keys(self) -> Any:
        return self._there().keys()

    def values(self) -> Any:
        return self._there().values()

    def items(self) -> Any:
        return self._there().items()


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

    def __init__(self, watched: Watched) -> None:
        super().__init__()
        self._watched = watched

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        given = kwargs or {}
        self._watched.see(func, args, given)
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


def name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") if name == "__get__" else name


def tensors_in(args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return list(_found((*args, *kwargs.values()), 0))


def _found(values: Any, depth: int) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif depth < 8 and isinstance(value, (list, tuple)):
            yield from _found(value, depth + 1)
        elif depth < 8 and isinstance(value, Mapping):
            yield from _found(value.values(), depth + 1)


def storage_of(tensor: torch.Tensor) -> int:
    """Where its memory is; 0 if it has none of its own."""
    try:
        return int(shards.local(tensor).untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0
