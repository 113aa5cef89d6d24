"""Children that the script forks (a DataLoader's workers) leave their parent's garbage alone.

A child has only the thread that forked it. To destroy what other threads served, a dropped process group of Gloo for
one, is to wait for these threads for ever. Garbage that the parent has not collected yet would be collected by its
children, too: whenever they happen to.
"""

from __future__ import annotations

import gc
import os

_collected: list[bool] = []  # for each fork under way: whether garbage was collected before it


def leave_garbage_alone() -> None:
    """From now on, children of this process never collect what was there when they were forked. Called once.

    No garbage is collected around the fork, either: what others do in the child before us makes objects, too.
    """
    os.register_at_fork(before=_rest, after_in_parent=_go_on, after_in_child=_freeze)


def _rest() -> None:
    _collected.append(gc.isenabled())
    gc.disable()


def _go_on() -> None:
    if _collected.pop():
        gc.enable()


def _freeze() -> None:
    gc.freeze()
    if any(_collected):  # another thread may have been about to fork: its end does not come here
        gc.enable()
    _collected.clear()
