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
import sys
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrelay.errors import UndeclaredError
from torchrelay.worker.data.cursor import Cursor
from torchrelay.worker.hidden_state import graph, variables
from torchrelay.worker.parallel import torch_functions
from torchrelay.worker.parallel.torch_functions import HARMLESS, name_of, storage_of, tensors_in
from torchrelay.worker.replacement.changes import Changes, asking, places_of
from torchrelay.worker.source.lines import is_library
from torchrelay.worker.state.state import State

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
        self._later = Later(state)
        self._forward = _Forward(self)
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
        self._forward.begin()

    def end(self) -> None:
        """No longer."""
        self._forward.end()
        self._reading.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._alone.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._give_back()

    def see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A function of torch is about to be run. Raises `UndeclaredError` if it reads what no rank has."""
        raise NotImplementedError

    def came(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """It has been run."""
        if self._later.names and not self._bringing:
            self._later.came(name_of(func), args, kwargs, result, self._storages)

    def computes(self, module: torch.nn.Module) -> bool:
        """A forward pass begins; returns whether all that it reads is seen to by that."""
        if self._bringing:
            return False
        found = {storage_of(each): each for each in (*module.parameters(), *module.buffers())}
        places = {place for place, each in found.items() if self._is_of_state(each)}
        if not places or self._later.is_in(found.values()):
            return False
        self._changes.see("forward", tuple(found.values()), {}, places)
        self.wanted("the state")
        return True

    def unseen(self) -> bool:
        """Let what follows go unseen; returns whether that can be."""
        functions: Any = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        dispatched: Any = _python_dispatch._get_current_dispatch_mode()
        if not functions or functions[-1] is not self._reading or dispatched is not self._alone:
            return False  # the script has entered a mode of its own since
        self._alone.__exit__(None, None, None)
        self._reading.__exit__(None, None, None)
        return True

    def seen(self) -> None:
        """No longer."""
        self._alone.__enter__()  # type: ignore[no-untyped-call]
        self._reading.__enter__()  # type: ignore[no-untyped-call]

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


class TailReplay(Watched):
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

    def stands(self, *, values_known: bool, moved: frozenset[str] = frozenset()) -> None:
        """The script goes on, behind a recorded call or in an item. `values_known`: learning rates and the like.

        `moved`: parts that the script changes before the next call: they come as they are after that.
        """
        self._values_known = values_known
        self._later.are(moved)
        if self._changes.wrote:  # what it has written it has written a second time
            self._brought = False
            self._changes = Changes(self._state)

    def see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        name = name_of(func)
        if self._bringing:
            return
        self._later.check(name, args, kwargs)
        if name in HARMLESS:
            return
        places = {storage_of(each) for each in tensors_in(args, kwargs) if self._is_of_state(each)}
        if not places or not _is_of_the_script():
            return
        self._changes.see(name, args, kwargs, places)
        if not places & torch_functions.written(name, args, kwargs):  # what comes of it is overwritten in the end
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
        self._later.are(moved)
        self._handing = _Handing(self.bring)

    def begin(self) -> None:
        self._handing.begin()
        super().begin()
        if self._state.saves:
            self._brought = True  # before: it is known by save() and load() only, and what is read of it is not seen

    def end(self) -> None:
        super().end()
        self._handing.end()
        self._later.end()

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
        if not self._bringing:
            self._later.check(name, args, kwargs)

    def _reads_gradient(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether the script itself asks for the gradient of a tensor of the state. Libraries ask to clear it."""
        asked = getattr(func, "__name__", "") == "__get__" and name_of(func) == "grad"
        if not asked or self._bringing or not self._is_of_state(args[0]):
            return False
        frame = sys._getframe(4)  # below are the mode, `see`, `check` and this
        return not is_library(frame.f_code.co_filename)

    def reads(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether this call of a torch function reads a tensor of the state that has not come yet."""
        if self._brought or self._bringing or name_of(func) in torch_functions.LOOKS:
            return False
        return any(self._is_of_state(tensor) for tensor in tensors_in(args, kwargs))


class Later:
    """Parts that the script changes in this place, and that came as they are after that.

    What it computes of them is of no matter if it only comes into them again: they come once more. It must not come
    into anything else: a file, a number, or a variable that is read later.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.names, self._paths = "", frozenset[str]()
        self._places: set[int] = set()
        self._owners: set[int] = set()
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}  # tensors that were computed from them, by their ids
        self._made_in: Counter[int] = Counter()  # how many of them lie where

    def are(self, moved: frozenset[str]) -> None:
        """These are, from now on."""
        self.end()
        self.names, self._paths = ", ".join(sorted(moved)), moved
        self._places = {storage_of(tensor) for path, tensor in self._state.given_besides() if path in moved} - {0}
        held = [part.held() for part in self._state.flat() if part.path in moved]
        modules = [each for one in held if isinstance(one, torch.nn.Module) for each in one.modules()]
        self._owners = {id(one) for one in (*held, *modules)}

    def came(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, state: Collection[int]
    ) -> None:
        """A function of this name has been run. `state`: where the tensors of the state lie."""
        if name in torch_functions.LOOKS or not self._is_in(args, kwargs):
            return
        for tensor in tensors_in((result,), {}):
            if storage_of(tensor) not in state and storage_of(tensor) not in self._places:
                self._add(tensor, storage_of(tensor))

    def check(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises `UndeclaredError` if this gives away what no rank has any more."""
        if (
            not self.names
            or not (name in torch_functions.GIVES_AWAY or name in torch_functions.TELLS)
            or not self._is_in(args, kwargs)
        ):
            return
        asks = asking(__name__)
        if asks is None or (name in torch_functions.TELLS and self._is_of_its_own(asks)):
            return
        raise UndeclaredError(_LATER.format(self.names))

    def end(self) -> None:
        """The script comes to another place. Raises `UndeclaredError` if it keeps what was made of them."""
        made = set(self._made)
        self._made.clear()
        self._made_in.clear()
        # What the script has put into them comes once more.
        made -= {id(tensor) for path, tensor in self._state.given_besides() if path in self._paths} if made else set()
        if made:
            kept = graph.Walk([(leaf.path, leaf.value) for leaf in variables.held()])
            if any(id(leaf.value) in made for leaf in kept.leaves.values()):
                raise UndeclaredError(_LATER.format(self.names))

    def is_in(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether some of these are such."""
        return bool(self.names) and self._is_in(tuple(tensors), {})

    def _is_in(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        for each in tensors_in(args, kwargs):
            place = storage_of(each)
            if id(each) in self._made or (place and (place in self._places or self._made_in[place] > 0)):
                return True
        return False

    def _add(self, tensor: torch.Tensor, place: int) -> None:
        key = id(tensor)
        if key in self._made:
            return

        def gone(_: Any) -> None:
            if self._made.pop(key, None) is not None:
                self._made_in[place] -= 1

        self._made[key] = weakref.ref(tensor, gone)
        self._made_in[place] += 1

    def _is_of_its_own(self, asking: FrameType) -> bool:
        """Whether a method of such an object asks, for what it does with itself: as for how many updates it had."""
        frame: FrameType | None = asking
        while frame is not None:
            if id(frame.f_locals.get("self")) in self._owners:
                return True
            if not is_library(frame.f_code.co_filename):
                return False
            frame = frame.f_back
        return False


_LATER = (
    "{} changes between two steps, and is saved or read there: a worker that takes over a rank has it only as it is "
    "afterwards. Change it in the step, after optimizer.step(), or put saving and reading it into "
    "run.atomic(function, ...)"
)


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


class _Forward:
    """Brings the state before a forward pass, which is not looked into: torch computes otherwise while it is watched.

    Layers such as `TransformerEncoderLayer` take a faster way, with other bits, if there is no `TorchFunctionMode`.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._hooks: list[Any] = []
        self._outermost: torch.nn.Module | None = None

    def begin(self) -> None:
        before, after = module_hooks.register_module_forward_pre_hook, module_hooks.register_module_forward_hook
        self._hooks = [before(self._begins), after(self._ends, always_call=True)]

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begins(self, module: torch.nn.Module, args: Any) -> None:
        del args
        if self._outermost is not None or threading.current_thread() is not threading.main_thread():
            return
        if self._watched.computes(module) and self._watched.unseen():
            self._outermost = module

    def _ends(self, module: torch.nn.Module, args: Any, result: Any) -> None:
        del args, result
        if module is self._outermost:
            self._outermost = None
            self._watched.seen()


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
        result = func(*args, **given)
        self._watched.came(func, args, given, result)
        return result


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
