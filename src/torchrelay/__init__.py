"""torchrelay: a rank dies; training goes on.

    import torchrelay

    run = torchrelay.protect(model=model, optimizer=optimizer, state={"schedule": schedule})

    @run.step
    def train_step(batch): ...            # one optimizer update; called again after a fault

    for epoch in run.epochs(10):
        for batch in run.batches(loader):
            loss = train_step(batch)      # returns once, for a committed step
        score = run.atomic(evaluate)     # communication between steps

Under `torchrelay run` the loss of a rank is repaired underneath this loop. Under `torchrun` or plain `python` the same
script runs as before, and nothing here imports torch.

    TorchrelayError         base class of all errors raised by torchrelay
      RefusedError          this script cannot be protected as it is: reason and remedy
      StateMismatchError    ranks have built different models or state
      UnprovedError         a replacement's data or code could not be verified against its predecessor's
      UndeclaredError       communication between steps, outside of any atomic section, was cut by a fault
    StepInterrupted         unwinds a step that will be called again; a BaseException, not for scripts to catch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from torchrelay import plain
from torchrelay.errors import (
    RefusedError,
    StateMismatchError,
    StepInterrupted,
    TorchrelayError,
    UndeclaredError,
    UnprovedError,
)
from torchrelay.face import Options, Run

__all__ = [
    "Options",
    "RefusedError",
    "Run",
    "StateMismatchError",
    "StepInterrupted",
    "TorchrelayError",
    "UndeclaredError",
    "UnprovedError",
    "once",
    "protect",
]

P = ParamSpec("P")
R = TypeVar("R")

# What answers under the launcher: set by the worker before it runs the script.
_protect: Callable[..., Run] | None = None
_once: Callable[..., Any] | None = None


def protect(
    model: Any = None,
    optimizer: Any = None,
    state: Mapping[str, Any] | None = None,
    *,
    save: Callable[..., Any] | None = None,
    load: Callable[..., Any] | None = None,
    options: Options | None = None,
) -> Run:
    """Declare the state of this script, and get a `Run`. Call it once, after everything is built and before training.

    model       a module (DDP or not), or a list or dict of them
    optimizer   an optimizer, or a list or dict of them: every one that steps
    state       by name, what else training depends on: LR schedulers, GradScaler, EMA, generators, plain values and
                tensors, anything with state_dict() and load_state_dict()
    save, load  instead of model and optimizer: checkpoint functions that the script already has. `save()` returns a
                state dict and `load(state)` takes it, or `save(path)` and `load(path)` use files
    options     see `Options`

        run = torchrelay.protect(model=ddp, optimizer=adamw, state={"schedule": schedule, "ema": ema})

    Raises `RefusedError`, with the remedy, for what cannot be protected, and `StateMismatchError` if ranks have built
    different things. Without the launcher it does nothing, and returns a run that passes everything through.
    """
    if _protect is None:
        return plain.PlainRun()
    return _protect(model, optimizer, state, save=save, load=load, options=Options() if options is None else options)


def once(name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function once on this rank; a replacement gets the recorded result.

    Use it for what a replacement must not repeat: starting a tracker's run, agreeing on settings by a broadcast, or
    loading the newest checkpoint, which by then was written by this very job. May be used before `protect()`. When all
    ranks restart from their checkpoint (`--max-restarts`), the function is called again.

        run_id = torchrelay.once("tracker", start_tracker, project="gpt")
        start = torchrelay.once("start", load)  # loads what there is, and returns the epochs behind it
    """
    if _once is None:
        return plain.once(name, function, *args, **kwargs)
    result: R = _once(name, function, *args, **kwargs)
    return result
