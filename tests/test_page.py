"""The page keeps what a successor may ask for, whenever its writer is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrelay.protocol.ids import Point
from torchrelay.wire.page import MAX_RECORD, Page, PageFull

LAST, NEXT = Point(7), Point(8)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    page = Page(tmp_path / "page", create=True)
    yield page
    page.close()


def commit(page: Page, point: Point) -> None:
    """What a worker writes for a call: at its gate, and when it has returned."""
    page.keep(point, b"gate")
    page.supplement(b", result")


def kept(page: Page) -> dict[Point, bytes]:
    return {record.point: record.data for record in page.records()}


def test_the_last_points_are_there(page: Page) -> None:
    for step in range(1, 8):
        commit(page, Point(step))
    assert kept(page) == dict.fromkeys(map(Point, range(4, 8)), b"gate, result")
    page.keep(NEXT, b"gate")
    assert kept(page) == {**dict.fromkeys(map(Point, range(5, 8)), b"gate, result"), NEXT: b"gate"}


def test_a_step_that_is_redone_again_and_again_does_not_push_out_the_points_before_it(page: Page) -> None:
    commit(page, Point(6))
    commit(page, LAST)
    for _ in range(10):
        page.keep(NEXT, b"gate")
        assert kept(page) == {Point(6): b"gate, result", LAST: b"gate, result", NEXT: b"gate"}
    commit(page, NEXT)
    assert kept(page)[NEXT] == b"gate, result"


def test_a_record_that_is_written_again_has_lost_its_supplement(page: Page) -> None:
    for step in range(1, 9):
        commit(page, Point(step))
    page.keep(Point(9), b"short")
    assert kept(page)[Point(9)] == b"short"


def test_a_record_and_its_supplement_fit_a_slot_or_are_refused(page: Page) -> None:
    with pytest.raises(PageFull):
        page.keep(LAST, bytes(MAX_RECORD + 1))
    page.keep(LAST, bytes(MAX_RECORD - 3))
    with pytest.raises(PageFull):
        page.supplement(b"four")
    page.supplement(b"abc")
    assert kept(page)[LAST] == bytes(MAX_RECORD - 3) + b"abc"


def test_a_reader_of_another_process_sees_the_same(page: Page) -> None:
    commit(page, LAST)
    other = Page(page.path)
    assert kept(other) == {LAST: b"gate, result"}
    other.close()
