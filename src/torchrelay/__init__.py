"""torchrelay: a rank dies; training goes on.

    import torchrelay

    run = torchrelay.join(model=model, optimizer=optimizer, extra={"schedule": schedule})

    @run.step
    def train_step(batch): ...            # one optimizer update; called again after a fault

    for epoch in run.epochs(10):
        for batch in run.batches(loader):
            loss = train_step(batch)      # returns once, for a committed step
        score = run.section(evaluate)     # communication between steps

Under `torchrelay run` the loss of a rank is repaired underneath this loop. Under `torchrun` or plain `python` the same
script runs as before, and nothing here imports torch.

    TorchrelayError         anything that torchrelay says no to
      Refused               this script cannot be protected as it is: reason and remedy
      StateMismatch         a rank has built something else than the others
      Undeclared            communication between steps, outside of any section, was cut by a fault
    StepInterrupted         unwinds a step that will be called again; a BaseException, not for scripts to catch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, ParamSpec, TypeVar

from torchrelay import plain
from torchrelay.errors import Refused, StateMismatch, StepInterrupted, TorchrelayError, Undeclared
from torchrelay.face import Run

__all__ = [
    "Refused",
    "Run",
    "StateMismatch",
    "StepInterrupted",
    "TorchrelayError",
    "Undeclared",
    "join",
    "once",
]

P = ParamSpec("P")
R = TypeVar("R")

# Who answers under the launcher: set by the worker before it runs the script.
_join: Callable[..., Run] | None = None
_once: Callable[..., Any] | None = None


def join(
    model: Any = None,
    optimizer: Any = None,
    extra: Mapping[str, Any] | None = None,
    *,
    save: Callable[..., Any] | None = None,
    load: Callable[..., Any] | None = None,
    shard: str | None = None,
    rehearse: bool | None = None,
    snapshot_every: int | Literal["auto"] | None = None,
    snapshot_buddies: int = 1,
    compare_every: int | None = None,
) -> Run:
    """Say what this script's state is, and get a `Run`. Once, after all of it is built and before training.

    model       a module (DDP or not), or a list or dict of them
    optimizer   an optimizer, or a list or dict of them: all that step
    extra       by name, what else training depends on: LR schedulers, GradScaler, EMA, generators, plain values and
                tensors, anything with state_dict() and load_state_dict()
    save, load  instead of model and optimizer: functions for checkpoints that the script already has; `save()` returns
                a state dict and `load(state)` takes it, or `save(path)` and `load(path)` use files
    shard       the name of the part of the state that this rank holds: ranks with equal names are replicas. None: found
                out from DTensors, device meshes and DDP's groups; to be given where these do not show it
    rehearse    whether a worker that a rank moves to tries its steps before, up to their gate, on made-up tensors and
                on a model that holds no trained weights: side effects of a step happen there, too. None: only steps
                that are called with tensors and flags alone (on numbers and texts side effects may depend); True: all
                steps; False: none. A step that reads `run.committed` is left there, as it is not known yet
    snapshot_every   steps between two snapshots of each rank's state, in the memory of its own node and of another
                one: so many steps are made again if a shard is lost of which there is no replica. None: every 10 if
                there is such a shard (with save= none: it may be slow), else none; 0: none. "auto": as None, and then
                as often as is best by what they cost here and how often such jobs fail; at most ten minutes of work
    snapshot_buddies   how many other nodes get a copy of each snapshot, 1 or 2. 2: any two nodes may be lost at once,
                for half as much memory again, and twice the traffic
    compare_every    steps between two comparisons of what replicas hold, which find bits that have flipped: who differs
                from most is replaced. None: every 100; 0: none

        run = torchrelay.join(model=ddp, optimizer=adamw, extra={"schedule": schedule, "ema": ema})

    Raises `Refused`, with the remedy, for what cannot be protected, and `StateMismatch` if ranks have built different
    things. Without the launcher it does nothing, and returns a run that passes everything through.
    """
    if _join is None:
        return plain.PlainRun()
    return _join(
        model, optimizer, extra, save=save, load=load, shard=shard, rehearse=rehearse, snapshot_every=snapshot_every,
        snapshot_buddies=snapshot_buddies, compare_every=compare_every,
    )  # fmt: skip


def once(name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function once, on this rank; a successor gets the recorded result.

    For what a worker that takes over a rank in the middle must not repeat: starting a run of a tracker, agreeing on
    settings by a broadcast, loading the newest checkpoint, which by then is one of this very job. May be used before
    `join()`. When all ranks start again from their checkpoint (`--max-restarts`) it is called again.

        run_id = torchrelay.once("tracker", start_tracker, project="gpt")
        start = torchrelay.once("start", load)  # loads what there is, and returns the epochs behind it
    """
    if _once is None:
        return plain.once(name, function, *args, **kwargs)
    result: R = _once(name, function, *args, **kwargs)
    return result
