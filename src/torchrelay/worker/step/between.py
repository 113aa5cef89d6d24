"""Between: what a script communicates between its calls, in no section, is said once, before a fault shows it.

leave, enter    around what lies between two calls: in the first ones, and now and then, counts are compared
Watch           when they have moved, the collective is caught in one of the gaps that follow, with its line
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from torchrelay.worker.process_groups import groups
from torchrelay.worker.session import Session
from torchrelay.worker.source.lines import is_library

FIRST, EVERY = 8, 64  # gaps in which counts are compared
TRIES = 256  # gaps in which what has moved them is waited for; a thread of the script's may have done it
REMEDY = (
    "A fault that cuts it ends the job with 91, or starts it again from its checkpoint (--max-restarts). "
    "Put it into run.atomic(function, ...): then it is repeated"
)


def of(session: Session) -> Between:
    """For the calls of this worker. Rank 0 speaks for all."""

    def counts() -> object:
        return session.position.wired, groups.collectives(), groups.begun_elsewhere()

    def say(text: str) -> None:
        if session.rank == 0:
            print(f"torchrelay: warning: {text}", file=sys.stderr, flush=True)

    return Between(counts, say)


class Between:
    """What lies between this worker's calls."""

    def __init__(self, counts: Callable[[], Any], say: Callable[[str], None]) -> None:
        """`counts`: what was begun so far, and since when that is counted."""
        self._counts = counts
        self._say = say
        self._gaps = 0
        self._left: Any = None
        self._watch: Watch | None = None
        self._tries = 0
        self._over = False

    def leave(self) -> None:
        """A call has returned."""
        if self._over:
            return
        self._gaps += 1
        if self._tries:
            self._watch = Watch(self._caught)
            self._watch.begin()
        elif self._gaps <= FIRST or self._gaps % EVERY == 0:
            self._left = self._counts()

    def enter(self) -> None:
        """The next one begins, or the script has ended."""
        if self._watch is not None:
            self._watch.end()
            self._watch = None
            self._tries -= 1
        elif self._left is not None:
            moved = self._counts() != self._left
            self._tries = TRIES if moved else 0
        self._left = None

    def _caught(self, name: str) -> None:
        self._over, self._tries = True, 0
        self._say(f"{line_of(sys._getframe(1))} calls {name} between two calls, in no section. {REMEDY}")


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's metaclass work
    """While it is entered, the first collective is told."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell: Callable[[str], None] | None = tell

    def begin(self) -> None:
        """From now on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """No longer."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        if self._tell is not None and func.namespace in ("c10d", "_c10d_functional"):
            tell, self._tell = self._tell, None
            tell(func.__name__.split(".")[0].rstrip("_"))
        return func(*args, **(kwargs or {}))


def line_of(frame: FrameType | None) -> str:
    """The innermost line of the script."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return "the script" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
