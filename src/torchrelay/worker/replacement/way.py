"""Way: what a replacement's script does between two recorded calls, before it has come to the last of them.

Its predecessor had trained when it did that; here the model is as it was built. So once a step lies behind, the state
is not read like that. If nothing ahead changes it, as sections that only evaluate or save do not, it is now what it is
at the point that we are brought to, and is brought from there. Else `UndeclaredError` is raised: no rank has it.
What the script writes into the state on its way counts for nothing, as all of it comes at the end; but what it has
written it may not read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torchrelay.errors import UndeclaredError
from torchrelay.worker.data.cursor import Cursor
from torchrelay.worker.replacement import tail
from torchrelay.worker.replacement.tail import name_of, storage_of, tensors_in
from torchrelay.worker.source.lines import is_library
from torchrelay.worker.state.state import State

REMEDY = (
    "a worker that takes over a rank does not have it: other calls have changed it since. Read it behind the last call "
    "of a turn, or in a step or section: run.atomic(function, ...)"
)


class Way(tail.Watched):
    """From the first place behind a step to the last recorded call."""

    def __init__(self, state: State, cursor: Cursor, bring: Callable[[], None]) -> None:
        super().__init__(state, bring)
        self._cursor = cursor
        self._values_known = False  # plain values are those of this place

    def stands(self, *, values_known: bool) -> None:
        """The script goes on, behind a recorded call or in an item. `values_known`: learning rates and the like."""
        self._values_known = values_known

    def see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        name = name_of(func)
        if self._bringing or name in tail.HARMLESS:
            return
        places = {storage_of(each) for each in tensors_in(args, kwargs) if self._is_of_state(each)}
        if not places or not _is_of_the_script():
            return
        self._changes.see(name, args, kwargs, places)
        if not places & tail.written(name, args, kwargs):  # what comes of it is overwritten in the end
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
