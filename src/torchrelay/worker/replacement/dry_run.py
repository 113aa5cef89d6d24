"""Dry run: the target of a move goes through a step before it counts, while the others train on.

It asks a rank that trains what its steps are called with and what its optimizers keep. It takes memory for the latter,
makes arguments that look the same, and calls each step function on its own model: forward, backward, DDP's reducer, up
to the gate, where it is cut. Then everything is as it was. First times (kernels, memory, compilation) are behind it
when it takes over, and nothing else has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchrelay.errors import RefusedError, StateMismatchError, StepInterrupted
from torchrelay.protocol.messages.events import WorkerPrepared
from torchrelay.protocol.messages.orders import Assign, Replay
from torchrelay.worker.hardware import device
from torchrelay.worker.hardware.niceness import Pace
from torchrelay.worker.parallel import ddp, fsdp
from torchrelay.worker.replacement import examples
from torchrelay.worker.replacement.examples import Example, NotRehearsable, Told
from torchrelay.worker.retry.redo import Redo
from torchrelay.worker.session import Session
from torchrelay.worker.state import random_state
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors.reserve import Reserve
from torchrelay.worker.transfer import transfer

EXAMPLE_S = 10.0  # fetching the example may take
BEGIN_S = 60.0  # after this no further step is begun; the one under way cannot be cut
Function = Callable[..., Any]
Go = Callable[[Function, list[Any], dict[str, Any]], None]  # calls a step function, and cuts it at its gate


class PlaceAsked(StepInterrupted):
    """Unwinds a step that asks for `run.global_step` in its rehearsal: there is no true answer yet."""


class AtGate(StepInterrupted):
    """Unwinds a step at the gate of its rehearsal."""


@dataclass
class Tried:
    """How the rehearsal of a step went."""

    gate: bool = False  # it came to its gate
    whole: bool = False  # and DDP's reducers are as its gate leaves them on a rank that trains


def prepare(session: Session, state: State, functions: list[Function], go: Go, rehearse: bool | None = None) -> bool:
    """Rehearse what can be rehearsed, and say so. `functions`: of the steps, in the order of their decoration.

    `rehearse`: see `torchrelay.Options`. Returns whether DDP's reducers may stay: made with the layout that they have
    in the job, they have gone through steps up to their gates, and through nothing else.
    """
    whole = False
    session.rehearsing = True
    rest = partial(session.position.rest, enough=lambda: called_for(session))
    try:
        told = _fetch(session)
        state.reserve = Reserve(told.pieces, Pace(rest, session.identity.assigned_cpu_s))
        if rehearse is False:
            raise NotRehearsable("Options(rehearse=False)")
        _lay_out(state, told)
        note, whole = _rehearse(session, state, told.examples, functions, go, Pace(rest), anyway=rehearse is True)
    except NotRehearsable as why:
        note = f"no rehearsal: {why}"
        whole = False
    finally:
        session.rehearsing = False
    session.agent.say(WorkerPrepared(worker=session.worker, note=note))
    return whole and bool(told.layouts)


def called_for(session: Session) -> bool:
    """Whether there is no time any more: the place is known, or the rank is ours alone by now."""
    position = session.position
    assigned = position.order(Assign)
    alone = assigned is not None and not assigned.examples
    return position.poisoned or alone or position.order(Replay) is not None


def _lay_out(state: State, told: Told) -> None:
    """Give DDP the buckets that it has in the job, and stages what they have settled. The buckets' reducers stay."""
    wrappers = state.ddps()
    try:
        for wrapper, layout in zip(wrappers, told.layouts, strict=True) if told.layouts else ():
            ddp.renew(wrapper, layout)
        state.pipeline.take((told.stages, told.schedules))
    except (ValueError, StateMismatchError) as error:
        raise NotRehearsable(f"what is laid out is laid out otherwise on a rank that trains: {error}") from error


def _rehearse(
    session: Session,
    state: State,
    told: list[Example],
    functions: list[Function],
    go: Go,
    pace: Pace,
    *,
    anyway: bool,
) -> tuple[str, bool]:
    """Returns what was done, in words, and whether DDP's reducers are whole. Raises `NotRehearsable`.

    `anyway`: also with plain values.
    """
    if not functions:
        raise NotRehearsable("no step function is defined before the script asks for its place")
    begin = time.monotonic()
    notes = []
    rehearsed, whole = 0, True
    for function, example in zip(functions, told, strict=False):
        if called_for(session):
            notes.append("called for meanwhile")
            break
        if time.monotonic() - begin >= BEGIN_S:
            notes.append("it takes too long for more")
            break
        if example.name != examples.name_of(function):
            notes.append(f"{examples.name_of(function)} is {example.name} on a rank that trains")
        elif example.called:
            why = _risk(example, anyway)
            if not why:
                why, tried = _try(state, function, example, go, pace)
                whole = whole and tried.whole
            rehearsed += not why
            notes += [f"{example.name}: {why}"] if why else []
    if not rehearsed:
        raise NotRehearsable("; ".join(notes) or "none of its steps was called yet")
    what = "a step" if rehearsed == 1 else f"{rehearsed} steps"
    return "; ".join([f"rehearsed {what} in {time.monotonic() - begin:.1f} s", *notes]), whole


def _fetch(session: Session) -> Told:
    assigned = session.identity.assigned
    assert isinstance(assigned, Assign), "targets are assigned"
    cancel = session.new_transfer()
    if called_for(session):
        raise NotRehearsable("called for before")
    try:
        data = transfer.fetch_example(
            assigned.examples, session.welcome.secret, timeout_s=EXAMPLE_S, cancel=cancel, tls=session.tls
        )
        return examples.decode(data)
    except (transfer.TransferFailed, ValueError) as error:
        raise NotRehearsable(str(error)) from error


def _risk(example: Example, anyway: bool) -> str:
    """Why this step had better not be rehearsed: a plain value is as it is in the job, the model is not."""
    where = "" if anyway else examples.plain_in(example)
    if not where:
        return ""
    return (
        f"the step is called with plain values ({where}), on which side effects may depend; "
        "Options(rehearse=True) rehearses all the same"
    )


def _try(state: State, function: Function, example: Example, go: Go, pace: Pace) -> tuple[str, Tried]:
    """Go through one step; returns why that went wrong, if it did, and how it was left."""
    tried = Tried()
    return _why(state, function, example, go, pace, tried), tried


def _why(state: State, function: Function, example: Example, go: Go, pace: Pace, tried: Tried) -> str:
    try:
        with _put_back(state, pace, tried):
            pace()
            # The script may look at its place from within any of these.
            with torch.inference_mode(False), torch.enable_grad(), state.pipeline.alone():
                args, kwargs = examples.arguments(example, _device(state))
                pace()
                _go_to_gate(go, function, args, kwargs, tried)
            device.wait()
    except PlaceAsked:
        return "the step asks for run.global_step"
    except StepInterrupted:
        return ""  # it came to its gate
    except (NotRehearsable, RefusedError) as why:
        return str(why)
    except (Exception, SystemExit) as error:  # noqa: BLE001  the script's own, about values that are none of its data
        return f"it raised {type(error).__name__}: {error}"
    return ""


def _go_to_gate(go: Go, function: Function, args: list[Any], kwargs: dict[str, Any], tried: Tried) -> None:
    try:
        go(function, args, kwargs)
    except AtGate:
        tried.gate = True
        raise


@contextmanager
def _put_back(state: State, pace: Pace, tried: Tried) -> Iterator[None]:
    """Afterwards all is as before. What is in the state will be overwritten anyway, the rest would be a trace."""
    rng = random_state.capture()
    wrappers, layouts, gradients = state.ddps(), state.ddp_layouts(), state.gradients()
    redo = Redo(state)
    redo.mark()
    state.private.hidden.remember()
    pretended = [ddp.pretend(wrapper) for wrapper in wrappers]
    try:
        yield
    finally:
        try:
            device.wait()
            pace()
            redo.rewind()
        finally:
            for wrapper, layout in zip(wrappers, layouts, strict=True):
                if not (ddp.unpretend(wrapper) and tried.gate):
                    ddp.renew(wrapper, layout)
            state.pipeline.put_right()
            fsdp.put_right(state.fsdp_states())
            tried.whole = True
            del pretended
            state.put_gradients(gradients)
            random_state.restore(rng)
            pace()


def _device(state: State) -> torch.device:
    """Where the model is; else the GPU that the script has chosen, if there is one."""
    for _, parameter in state.parameters():
        if parameter.device.type != "cpu":
            return parameter.device
    return device.own() if device.is_used() else torch.device("cpu")
