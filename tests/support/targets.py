"""A stage on which replacements are prepared as the targets of moves are: with examples, and with time to rehearse."""

from __future__ import annotations

import msgspec

from tests.support.stage import Actor, Stage
from torchrelay.protocol.messages.events import Event, WorkerPrepared
from torchrelay.protocol.messages.ids import WorkerId
from torchrelay.protocol.messages.orders import Assign, Replay, Source, WorkerOrder
from torchrelay.wire.messages.codec import encode


class TargetStage(Stage):
    """Tells replacements who can show an example, and tells them their place only when they are prepared."""

    shown_by: tuple[Source, ...] = ()  # set by a test; without it, those that have a rank
    kept_waiting = False  # set by a test: nobody is told its place

    def notes(self) -> dict[WorkerId, str]:
        return {event.worker: event.note for event in self.of(WorkerPrepared)}

    def take(self, event: Event) -> None:
        if isinstance(event, WorkerPrepared):
            self.events.append(event)  # the core knows of no move here
        else:
            super().take(event)

    def sources(self, but: WorkerId) -> tuple[Source, ...]:
        seats = self.job.seats.items()
        return tuple(
            Source(rank, self.cluster.workers[seat.worker].address)
            for rank, seat in seats
            if seat.worker is not None and seat.worker != but
        )

    def _pass_on(self, order: WorkerOrder, again: bool) -> None:
        if isinstance(order, Assign) and order.replacement:
            order = msgspec.structs.replace(order, examples=self.shown_by or self.sources(order.worker))
        if isinstance(order, Replay) and (self.kept_waiting or order.worker not in self.notes()):
            return
        super()._pass_on(order, again)

    def tell(self, actor: Actor, order: WorkerOrder) -> None:
        """Something that the core does not say."""
        self._tell(actor, encode(order))

    def log_of(self, actor: Actor) -> str:
        return self.log(actor.worker)
