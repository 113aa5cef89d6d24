"""Blame: an exception in words that are equal for equal exceptions, so that the core can tell whose fault it is."""

from __future__ import annotations

import re
import sys
import traceback
from pathlib import Path
from types import TracebackType

from torchrelay.errors import RefusedError, StateMismatchError, UndeclaredError, UnprovedError
from torchrelay.protocol.messages.events import CollectiveFailed, WorkerRaised
from torchrelay.protocol.messages.ids import Point
from torchrelay.worker.data.cursor import Diverged
from torchrelay.worker.session import Session
from torchrelay.worker.source.lines import is_library

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
MAX_SUMMARY = 500


def signature_of(error: BaseException) -> str:
    """Type, message without numbers, and the innermost line of the script."""
    text = _NUMBERS.sub("#", _first_line(error))[:200]
    return f"{type(error).__qualname__}: {text} at {line_of(error)}"


def summary_of(error: BaseException) -> str:
    """For people: what was raised, and where."""
    text = _first_line(error)[:MAX_SUMMARY]
    return f"{type(error).__qualname__}: {text} ({line_of(error)})"


def line_of(error: BaseException) -> str:
    """The innermost line of the script itself: not of a library, nor ours."""
    frames = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    scripts = [place for place in frames if not is_library(place[0])]
    if not scripts:
        return "no line of the script"
    name, number = scripts[-1]
    return f"{Path(name).name}:{number}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def tell_raised(
    session: Session,
    error: BaseException,
    *,
    fatal: bool,
    kind: str = "script",
    remedy: str = "",
    replayed: Point | None = None,
) -> None:
    """Tell the core of an exception. Nothing if this worker holds no rank yet: its end tells enough.

    `replayed`: the point to which a replacement has followed its predecessor. It has committed nothing itself; but
    where both raise the same after the same point, the error is the script's own.
    """
    if not session.identity.known:
        return
    summary = f"{summary_of(error)}. {remedy}" if remedy else summary_of(error)
    raised = WorkerRaised(
        worker=session.worker,
        job=session.job,
        rank=session.rank,
        point=replayed if session.position.committed is None else session.position.committed,
        kind=kind,
        signature=signature_of(error),
        summary=summary,
        fatal=fatal,
    )
    session.agent.say(raised)


def tell_failed(session: Session, error: BaseException) -> None:
    """Tell the core that a collective of this worker has failed. Nothing if this worker holds no rank yet."""
    if not session.identity.known:
        return
    failed = CollectiveFailed(
        worker=session.worker,
        job=session.job,
        rank=session.rank,
        generation=session.position.wired,
        summary=f"{type(error).__name__}: {_first_line(error)[:200]}",
    )
    session.agent.say(failed)


def kind_of(error: BaseException) -> str:
    """What the core calls it: refused, undeclared, diverged, or the script's own."""
    if isinstance(error, UndeclaredError | UnprovedError):
        return "undeclared"
    if isinstance(error, Diverged):
        return "diverged"
    return "refused" if isinstance(error, RefusedError | StateMismatchError) else "script"


def print_for_people(error: BaseException, before: str = "") -> None:
    """The traceback as Python would print it: from the script's first line on, by the script's hook if it has one.

    Quiet where nothing can be written.
    """
    trace: TracebackType | None = error.__traceback__
    while trace is not None and is_library(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    whole = error.__traceback__
    error.__traceback__ = trace or whole  # Python's own hook looks there
    try:
        print(before, end="\n" if before else "", file=sys.stderr, flush=True)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
    except OSError:
        pass  # the disk under the log is full; the core will be told
    except Exception as broken:  # noqa: BLE001  the hook is the script's, and the process ends
        for each in (broken, error):
            sys.__excepthook__(type(each), each, each.__traceback__)
    finally:
        error.__traceback__ = whole
