"""A replacement that has taken its place says so, whenever it is asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Point, Rank, WorkerId
from torchrelay.protocol.messages.orders import Replay
from torchrelay.wire.files.page import Page
from torchrelay.worker.control.position import Position, Report
from torchrelay.worker.replacement import taking_over


class Enough(Exception):
    """The rest is another matter."""


def test_an_interrupt_right_after_the_order_hears_where_the_script_is_going(tmp_path: Path) -> None:
    page = Page(tmp_path / "page", create=True)
    position = Position(page)
    order = Replay(
        node=NodeId("n"),
        worker=WorkerId("w"),
        job=JobId("j"),
        generation=Generation(2),
        rank=Rank(1),
        point=Point(4),
        private=b"",
        sources=(),
    )
    assert position.hear(order)
    reports: list[Report | None] = []

    def take_over_output() -> None:
        reports.append(position.interrupt(Generation(3)))  # the control thread, meanwhile
        raise Enough

    session: Any = SimpleNamespace(
        position=position,
        welcome=SimpleNamespace(patience_s=1.0),
        identity=SimpleNamespace(take_over_output=take_over_output),
    )
    try:
        taking_over.await_place(session, cursor=None)  # type: ignore[arg-type]
    except Enough:
        pass
    (report,) = reports
    assert report is not None
    assert report.caught_up == Point(4)
    page.close()
