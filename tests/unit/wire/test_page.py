"""The page keeps what a replacement may ask for, whenever its writer is killed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from torchrelay.protocol.messages.ids import Point
from torchrelay.wire.files.page import MAX_GROUPS, MAX_RECORD, WITHOUT_GROUPS, Groups, Page, PageFull

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


def told(page: Page, groups: Sequence[tuple[int, int]] | None) -> Groups:
    """What a reader finds after a beat with these groups."""
    page.beat(1, 5, 3, groups)
    return page.groups()


def test_what_was_begun_in_which_groups_is_told_as_it_is_now(page: Page) -> None:
    assert page.groups() == Groups(())
    assert told(page, [(11, 2), (2**64 - 1, 3)]) == Groups(((11, 2), (2**64 - 1, 3)), 5)
    assert told(page, [(11, 4)]) == Groups(((11, 4),), 4)
    assert told(page, []) == Groups(())
    assert (page.status().collectives, page.status().generation) == (5, 3)
    assert told(page, None) == Groups(None, 1)


def test_of_more_groups_than_it_holds_a_page_tells_how_much_was_begun_in_all(page: Page) -> None:
    most = [(key + 1, 2) for key in range(MAX_GROUPS)]
    commit(page, LAST)
    assert told(page, most) == Groups(tuple(most), 2 * MAX_GROUPS)
    assert told(page, [*most, (MAX_GROUPS + 1, 7)]) == Groups(None, 2 * MAX_GROUPS + 7)
    assert kept(page)[LAST] == b"gate, result"


def test_a_page_of_the_version_before_has_a_status_and_no_groups(page: Page) -> None:
    page.beat(1, 5, 3, [(11, 2)])
    page._map[:8] = WITHOUT_GROUPS.to_bytes(8, "little")
    assert page.status().collectives == 5
    assert page.groups() == Groups(None)
    page._map[:8] = bytes(8)
    with pytest.raises(ValueError, match="is not a worker's page"):
        page.status()
