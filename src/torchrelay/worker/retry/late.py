"""Late buffers: private ones that change after the gate, in the update.

The private record that is written before a gate holds all buffers that differ between ranks; but an EMA takes over
BatchNorm's buffers when the update is done. A worker that dies between the two leaves a record with the old ones. So
we look, at the exit of a few calls, which buffers have changed since their gate: a copy of another private buffer can
be made again. One of which it was not known yet whether it is private (an EMA's counter) is not: it belongs to what the
update changes, and a replica has it. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import torch

from torchrelay.errors import RefusedError, UnprovedError
from torchrelay.worker.state.private import Private, PrivateState

LOST = ""  # it is a copy of nothing


def look(at_gate: bytes, at_exit: bytes, unknown: Collection[str] = ()) -> tuple[dict[str, str], list[str]]:
    """For each buffer that has changed since the gate, the one that it is a copy of; and those that are not private.

    Also, with `LOST`, parts of `state=` that are this rank's own, and have changed.

    The first two are records of `Private`. `unknown`: buffers that may be late, or not. Raises `RefusedError`.
    """
    before, after = _decode(at_gate), _decode(at_exit)
    if before.generators != after.generators:
        raise RefusedError(
            "a generator given to protect() draws after the first optimizer.step()",
            "let it draw before optimizer.step(), or after the step",
        )
    then = dict(zip(before.names, before.buffers, strict=True))
    now = dict(zip(after.names, after.buffers, strict=True))
    still = {name: values for name, values in now.items() if then.get(name) == values}
    found: dict[str, str] = {}
    shared: list[str] = []
    for name, values in now.items():
        if name in still or name not in then:
            continue
        origin = next((other for other, value in still.items() if value == values), None)
        if origin is None and name in unknown:
            shared.append(name)
            continue
        if origin is None:
            raise RefusedError(
                f"{name} differs between ranks and changes after optimizer.step(): a fault in between would lose it",
                "change it after the step function has returned (such as ema.update_parameters())",
            )
        found[name] = origin
    return found | {path: LOST for path, told in after.own.items() if before.own.get(path, told) != told}, shared


def make_again(private: Private, copies: dict[str, str] | None) -> None:
    """After a record from before the gate was loaded: the copies that its worker did not live to make.

    Raises `UnprovedError` if it is not known yet which there are.
    """
    if copies is None:
        if _decode(private.record()).names:
            raise UnprovedError(
                "a rank was lost in its first update, and has buffers of its own of which it is not known yet whether "
                "the update changes them. Start the job again: nothing but its first step is lost"
            )
        return
    if lost := [name for name, origin in copies.items() if origin == LOST]:
        raise UnprovedError(
            f"{lost[0]} is each rank's own and changes after optimizer.step(), and a rank was lost in between. Change "
            "it after the step function has returned"
        )
    buffers = private.buffers()
    with torch.no_grad():
        for name, origin in copies.items():
            buffers[name].copy_(buffers[origin])


def _decode(record: bytes) -> PrivateState:
    return msgspec.msgpack.decode(record, type=PrivateState) if record else PrivateState({}, [], [])
