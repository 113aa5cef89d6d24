"""Facts about seats, workers and nodes, as tables count them: see `Table.count`, `any`, `where` and `group`.

In a large job nobody walks over all ranks to see whether one is not ready. Each fact is one function, named once.
"""

from __future__ import annotations

from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.model.roster import Life, Node, Seat, Worker

# ---------------------------------------------------------------- of seats


def is_vacant(seat: Seat) -> bool:
    return seat.worker is None


def is_replacement(seat: Seat) -> bool:
    return seat.replacement


def has_answered(seat: Seat) -> bool:
    """It has anything that is forgotten with each generation."""
    return bool(
        seat.report is not None
        or seat.ready
        or seat.reconfigured
        or seat.resumed
        or seat.serves
        or seat.failed
        or seat.asked_buddies
        or seat.silent_buddies
        or seat.parked
    )


def has_not_reported(seat: Seat) -> bool:
    return seat.report is None


# Asked of all seats as soon as a rank is lost, while the survivors wait.
ASKED_OF_A_FAULT = (has_answered, has_not_reported, is_vacant, is_replacement)


def is_not_ready(seat: Seat) -> bool:
    return not seat.ready


def is_not_reconfigured(seat: Seat) -> bool:
    return not seat.reconfigured


def has_not_resumed(seat: Seat) -> bool:
    return not seat.resumed


def has_not_finished(seat: Seat) -> bool:
    return not seat.finished


def has_not_parked(seat: Seat) -> bool:
    return seat.parked is None


def has_not_joined(seat: Seat) -> bool:
    return not seat.joined


def holds_nothing(seat: Seat) -> bool:
    return seat.holds is None


def is_not_restored(seat: Seat) -> bool:
    """A replacement without the state. (At the first wiring there is neither.)"""
    return seat.replacement and seat.holds is None


def holds_unnamed(seat: Seat) -> bool:
    """Its holder has some state, and has not said which shard of it."""
    return seat.holds is not None and not seat.shard


def has_outgoing(seat: Seat) -> bool:
    return seat.outgoing is not None


def shard_of(seat: Seat) -> str:
    return seat.shard


# ---------------------------------------------------------------- of workers


def is_fencing(worker: Worker) -> bool:
    return worker.life is Life.FENCING


def is_idle(worker: Worker) -> bool:
    """A spare: no rank, none to come, wherever it is in its start."""
    return worker.rank is None and worker.incoming_for is None and worker.life is not Life.FENCING


def is_guest(worker: Worker) -> bool:
    return worker.guest


def is_idle_guest(worker: Worker) -> bool:
    return worker.guest and is_idle(worker)


def node_of(worker: Worker) -> NodeId:
    return worker.node


# ---------------------------------------------------------------- of nodes


def is_alive(node: Node) -> bool:
    return node.alive
