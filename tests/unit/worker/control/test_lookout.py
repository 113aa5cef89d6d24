"""Where a main thread stands: looked at only when nothing has changed, and kept until something does."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

from torchrelay.protocol.health.stalls import Spot
from torchrelay.protocol.messages.ids import Generation, Point, WorkerPhase
from torchrelay.wire.files.page import Page
from torchrelay.worker.control import agent_connection
from torchrelay.worker.control.agent_connection import Lookout, communication, line_in
from torchrelay.worker.control.position import Position


def frames_in(name: str, file: str, caller: str = "/home/user/train.py") -> list[FrameType]:
    """The stack of a script that has called a function of this name in this file."""
    found: list[FrameType] = []
    names: dict[str, object] = {"keep": lambda: found.append(sys._getframe(1))}
    exec(compile(f"def {name}(group=None):\n    keep()", file, "exec"), names)
    exec(compile(f"\n\n{name}()", caller, "exec"), names)
    frames, frame = [], found[0]
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]  # ends with None
    return frames


C10D = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("name", "file", "expected"),
    [
        ("barrier", C10D, ("barrier", 0, False)),
        ("_new_group_with_tag", C10D, ("new_group", 0, False)),
        ("recv", C10D, ("recv", 0, True)),
        ("destroy_process_group", C10D, ("", 0, False)),  # waits for nobody
        ("_engine_run_backward", "/usr/lib/torch/autograd/graph.py", ("backward", 0, False)),
        ("barrier", "/home/user/train.py", ("", 0, False)),  # the script's own function of that name
    ],
)
def test_what_communicates_is_told_by_the_stack(name: str, file: str, expected: tuple[str, int, bool]) -> None:
    assert communication(frames_in(name, file)) == expected


def test_the_line_is_the_scripts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_connection, "is_library", lambda name: name == C10D)
    assert line_in(frames_in("barrier", C10D)) == "train.py:3"
    assert line_in([]) == ""


def test_the_stack_is_that_of_the_main_thread() -> None:
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.extend(frame.f_code.co_name for frame in agent_connection.stack()))
    thread.start()
    thread.join()
    assert "test_the_stack_is_that_of_the_main_thread" in seen


def test_a_spot_is_marked_at_the_second_look_and_holds_until_the_worker_gets_on(tmp_path: Path) -> None:
    page = Page(tmp_path / "w.page", create=True)
    position = Position(page)
    watch = Lookout(position)
    position.start(Point(3))
    position.enter(WorkerPhase.COMPUTING, Point(4))

    def beat(collectives: int) -> Spot | None:
        position.beat(collectives)
        watch.look(collectives, ())
        return page.spot()

    assert beat(5) is None
    spot = beat(5)
    assert spot is not None
    assert (spot.line.split(":")[0], spot.kind) == ("test_lookout.py", "step")
    assert beat(6) is None, "it has begun something"
    assert beat(6) is not None
    position.enter(WorkerPhase.BETWEEN)
    assert page.spot() is None, "it is elsewhere"


def test_how_a_script_was_ended_is_its_place(tmp_path: Path) -> None:
    page = Page(tmp_path / "w.page", create=True)
    position = Position(page)
    watch = Lookout(position)
    position.ended_at = "train.py:9"
    position.enter(WorkerPhase.FINISHED)
    for _ in range(2):
        watch.look(0, ())
    assert page.spot() == Spot("train.py:9")


def test_a_page_without_a_spot_or_with_one_too_long_tells_none(tmp_path: Path) -> None:
    page = Page(tmp_path / "w.page", create=True)
    assert page.spot() is None
    page.mark_spot(Spot("x" * 2_000))
    assert page.spot() is None
    page.beat(1, 2, Generation(1))
    page.mark_spot(Spot("a.py:1", "barrier", 2**64 - 1))
    assert page.spot() == Spot("a.py:1", "barrier", 2**64 - 1)
