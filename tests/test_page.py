"""The page keeps what a successor may ask for, whenever its writer is killed."""

from __future__ import annotations

from pathlib import Path

from torchrelay.protocol.ids import Point
from torchrelay.wire.page import Page

LAST, NEXT = Point(7), Point(8)


def commit(page: Page, point: Point) -> None:
    """What a worker writes for a call: at its gate, and with its result."""
    page.keep(point, b"at the gate")
    page.keep(point, b"with the result")


def kept(page: Page) -> dict[Point, bytes]:
    return {record.point: record.data for record in page.records()}


def test_the_last_two_points_are_there(tmp_path: Path) -> None:
    page = Page(tmp_path / "page", create=True)
    for step in range(1, 8):
        commit(page, Point(step))
    assert kept(page) == {Point(6): b"with the result", LAST: b"with the result"}
    page.keep(NEXT, b"at the gate")
    assert kept(page) == {Point(6): b"with the result", LAST: b"with the result", NEXT: b"at the gate"}
    page.close()


def test_a_step_that_is_redone_again_and_again_does_not_push_out_the_point_before_it(tmp_path: Path) -> None:
    page = Page(tmp_path / "page", create=True)
    commit(page, Point(6))
    commit(page, LAST)
    for _ in range(10):
        page.keep(NEXT, b"at the gate")
        assert kept(page)[LAST] == b"with the result"
    commit(page, NEXT)
    assert kept(page)[NEXT] == b"with the result"
    page.close()
