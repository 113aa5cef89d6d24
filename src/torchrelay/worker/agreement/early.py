"""Early: whether ranks that were equal at protect() are replicas, as the first steps show.

A plain tensor that is in no DDP and is no DTensor has nothing to tell who else holds it. Equal at protect(), it may be
a replica whose gradients the script reduces by hand, or the stage of a pipeline, an expert, a LoRA matrix of zeros,
that began like the others' and goes its own way. A lost rank would then be given another one's values, and train on. So
what is trained is compared again when 1, 2, 4 and 8 steps are committed, and refused if it differs.

It is compared in the gate of the step that follows, by all ranks, whether or not they have such tensors: whether others
have some they do not know. For those without it is two all-gathers of some 50 bytes, four times in a run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torchrelay.protocol.messages.ids import Point
from torchrelay.worker.agreement import agreement
from torchrelay.worker.state import layout
from torchrelay.worker.state.state import State
from torchrelay.worker.tensors import sums

AFTER = (1, 2, 4, 8)  # committed steps
LAST = AFTER[-1] + 1  # in the gate of which it is compared last
REMEDY = (
    "They were equal at protect() and so were taken for replicas. Reduce its gradients over all ranks (DDP does); if "
    "each rank trains its own, name what it holds: Options(shard=...), by which a lost one has no replica"
)


class Early:
    """Of one rank."""

    def __init__(self, state: State, shard: str) -> None:
        """`shard`: by which replicas know one another."""
        self._state = state
        self._shard = shard

    def look(self, pending: Point) -> Callable[[], None] | None:
        """Before the update that is to commit this point: what all ranks have to do in its gate; None if nothing.

        All come to the same answer, and the values are those of now.
        """
        if pending.step - 1 not in AFTER:
            return None
        return partial(self.compare, self.values(), pending)

    def values(self) -> list[str]:
        """A line for each trained tensor that is only supposed to have replicas."""
        named = layout.supposed(self._state)
        found = sums.of([tensor for _, tensor in named])
        return [f"{name}: {value:016x}" for (name, _), value in zip(named, found, strict=True)]

    def compare(self, values: list[str], pending: Point) -> None:
        """Collective over all ranks. Raises `StateMismatchError` on all of them if replicas differ."""
        steps = "a step" if pending.step == AFTER[0] + 1 else f"{pending.step - 1} steps"
        agreement.compare(self._shard, values, f"holds, after {steps}, other values than", REMEDY)
