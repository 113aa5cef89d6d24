"""Together: which orders to one worker make sense at one time."""

from __future__ import annotations

from torchrelay.protocol.messages import orders as od
from torchrelay.protocol.messages.ids import WorkerId
from torchrelay.simulation.judge.violation import Violation


def check_together(standing: frozenset[od.Order]) -> None:
    """What is said to one worker at one time makes sense together."""
    of_worker: dict[WorkerId, set[type[od.Order]]] = {}
    for order in standing:
        worker: WorkerId = getattr(order, "worker")  # noqa: B009 - every order names a worker, each kind by itself
        kinds = of_worker.setdefault(worker, set())
        if type(order) in kinds:
            raise Violation(f"{worker} is told {type(order).__name__} twice, differently")
        kinds.add(type(order))
    for worker, kinds in of_worker.items():
        if len(kinds) > 1 and frozenset(kinds) not in TOGETHER:
            raise Violation(f"{worker} is told at once: {sorted(kind.__name__ for kind in kinds)}")


TOGETHER = frozenset(
    {
        frozenset({od.Assign, od.Interrupt}),
        frozenset({od.Assign, od.Replay}),
        frozenset({od.Assign, od.Decide}),  # a replacement that was restored, and is interrupted before it resumed
        frozenset({od.Reconfigure, od.Restore}),
        frozenset({od.Decide, od.Recall}),
        frozenset({od.Assign, od.Decide, od.Recall}),
        frozenset({od.Assign, od.Recall}),  # all go back to snapshots: replacements hand out what lies on their nodes
        frozenset({od.Assign, od.Replay, od.Recall}),
    }
)
