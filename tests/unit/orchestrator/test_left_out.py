"""What nobody listened to: the clock owns up to it, and what was said meanwhile tells how long ago it was."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from tests.support.brain import JOB, NODE, RecordingLink, serving, train
from tests.support.service import FakeTime, run, told
from torchrelay.agent.uplink import MOST_TOGETHER, Kept, framed, together
from torchrelay.orchestrator.core import service as shell
from torchrelay.orchestrator.core.clock import COUNTED_NS, LATE_NS, WORTH_WHILE_BUSY_NS, Clock
from torchrelay.orchestrator.core.service import Orchestrator
from torchrelay.orchestrator.core.traffic import SPAN_MS, Heard, Lateness
from torchrelay.orchestrator.store.journal import Journal, JournalUnavailable, read_history
from torchrelay.orchestrator.views.views import view_incidents
from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.messages.ids import Generation, JobId, Point, Rank, WorkerId
from torchrelay.wire.messages.channel import EventFrame, EventsFrame, decode_to_orchestrator
from torchrelay.wire.messages.codec import encode
from torchrelay.worker.control.agent_connection import Said

COUNTED_MS = COUNTED_NS // 1_000_000
EXITED = ev.WorkerExited(worker=WorkerId("node-0.1.1"), node=NODE, signal=9, cause="SIGKILL")
RESUMED = ev.WorkerResumed(job=JobId("job"), generation=Generation(2), worker=WorkerId("w"), rank=Rank(0))


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the clock on the wall says, in ms; a test sets it."""
    now = [1_800_000_000_000]
    monkeypatch.setattr(shell, "wall_clock_ms", lambda: now[0])
    return now


def trained(folder: Path, now: FakeTime) -> int:
    """A first orchestrator has come and gone; how often it has told of time that was left out."""

    async def first() -> None:
        async with serving(folder, now) as service:
            await train(service, RecordingLink())

    asyncio.run(first())
    return len(told(folder))


# ---------------------------------------------------------------- the clock


def test_the_clock_knows_what_it_has_left_out() -> None:
    now = FakeTime()
    clock = Clock(500, now, away_ms=7)
    now.sleep(1.0)
    assert (clock.now_ms(), clock.left_out_ms()) == (1_500, 7)
    now.sleep(12.0)
    assert (clock.now_ms(), clock.left_out_ms()) == (1_500 + COUNTED_MS, 7 + 12_000 - COUNTED_MS)
    clock.hold()
    now.sleep(1.0)
    before = 12_007 - COUNTED_MS
    assert clock.left_out_ms() == before + 1_000, "also while it is held"
    clock.release()
    now.sleep(0.2)
    assert clock.left_out_ms() == before + 1_000


def test_what_one_who_is_busy_does_not_look_at_does_not_count() -> None:
    now = FakeTime()
    clock = Clock(0, now)
    clock.look(0.1)
    skips = clock.skips
    for _ in range(50):
        now.sleep(0.1)  # it asks all the time, and looks at nothing
        clock.now_ms()
    counted = (LATE_NS + 100_000_000) // 1_000_000
    assert (clock.now_ms(), clock.left_out_ms()) == (counted, 5_000 - counted)
    assert clock.skips > skips, "the wall clock is to be noted"
    clock.look(0.1)
    now.sleep(0.5)
    assert clock.now_ms() == counted + 500, "looks that come in time leave nothing out"
    assert clock.left_out_ms() == 5_000 - counted


def test_small_pieces_are_noted_when_they_come_to_something() -> None:
    now = FakeTime()
    clock = Clock(0, now)
    clock.look(0.0)
    now.sleep(LATE_NS / 1e9)
    clock.now_ms()
    for _ in range(WORTH_WHILE_BUSY_NS // 1_000_000 - 1):
        now.sleep(0.001)
        clock.now_ms()
    assert (clock.skips, clock.left_out_ms()) == (0, WORTH_WHILE_BUSY_NS // 1_000_000 - 1)
    now.sleep(0.001)
    assert (clock.left_out_ms(), clock.skips) == (WORTH_WHILE_BUSY_NS // 1_000_000, 1)


# ---------------------------------------------------------------- the orchestrator


def test_no_node_is_lost_and_no_deadline_passes_while_the_orchestrator_has_too_much_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock asks all the time, as in a large job; agents beat and answer, and all of that lies unread."""
    now = FakeTime()

    async def story() -> None:
        async with serving(tmp_path, now) as service:
            link = RecordingLink()
            await train(service, link)
            service.clock.look(0.1)
            heard, rounds = service.cluster, 0

            def work(first: Heard) -> None:
                nonlocal rounds
                rounds += 1
                for _ in range(200):
                    now.sleep(0.1)
                    service.clock.now_ms()
                real(first)

            real = service._take_all
            monkeypatch.setattr(service, "_take_all", work)
            for _ in range(3):
                await service.put(ev.PointCommitted(job=JOB, generation=Generation(1), point=Point(1)))
                service._pass_time()
            assert rounds == 3
            assert service.cluster.nodes[NODE].alive
            assert not service.cluster.jobs[JOB].accounting.incidents
            assert service.cluster.jobs[JOB].phase is heard.jobs[JOB].phase
            assert sum(told(tmp_path)) > 3 * 18_000, "and the ledger knows of it"

    run(story)


def test_it_is_told_before_what_was_said_meanwhile_is_heard(tmp_path: Path) -> None:
    now = FakeTime()

    async def story() -> None:
        async with serving(tmp_path, now) as service:
            await train(service, RecordingLink())
            begun = told(tmp_path)
            now.sleep(12.0)
            await service.put(ev.age_event(EXITED, 11_000))
            *_, gap, heard = read_history(tmp_path / "journal.db").entries
            assert isinstance(gap.event, ev.TimeLeftOut)
            assert isinstance(heard.event, ev.WorkerExited)
            assert gap.event.ms == 12_000 - COUNTED_MS
            (incident,) = view_incidents(service.scene(), service.cluster.jobs[JOB]).incidents
            assert incident.phases["detect"] == 11_000
            wall = service.journal.wall_ms(service.clock.now_ms())
            assert service.scene().told_at(JOB, service.cluster.jobs[JOB].moment(service.clock.now_ms(), 11_000)) == (
                incident.at
            )
            assert service.scene().wall_ms(service.clock.now_ms()) == wall
            service._pass_time()
            assert len(told(tmp_path)) == len(begun) + 1, "once"

    run(story)


def test_one_that_is_busy_does_not_note_each_moment_of_it(tmp_path: Path) -> None:
    """Each note takes time, too."""
    now = FakeTime()

    async def story() -> None:
        async with serving(tmp_path, now) as service:
            await train(service, RecordingLink())
            before, anchors = len(told(tmp_path)), len(service.journal.anchors)
            service.clock.look(0.1)
            for number in range(100):
                now.sleep(0.03)
                service.hear(ev.OnceRecorded(job=JOB, rank=Rank(0), name=f"{number}", value=b""))
            assert 1 <= len(told(tmp_path)) - before <= 4
            assert len(service.journal.anchors) - anchors <= 8

    run(story)


def test_nobody_needs_to_say_anything(tmp_path: Path) -> None:
    now = FakeTime()

    async def story() -> None:
        async with serving(tmp_path, now) as service:
            await train(service, RecordingLink())
            before = len(told(tmp_path))
            now.sleep(2.0)
            service._pass_time()
            assert told(tmp_path)[before:] == [2_000 - COUNTED_MS]

    run(story)


def test_after_a_restart_the_time_without_any_orchestrator_is_told(tmp_path: Path, wall: list[int]) -> None:
    now = FakeTime()
    before = trained(tmp_path, now)

    async def second() -> None:
        async with serving(tmp_path, now) as service:
            link = RecordingLink()
            now.sleep(1.0)  # for so long the clock is held: nobody is back yet
            await service.put(EXITED)
            assert told(tmp_path)[before:] == [40_000, 1_000], "before anything is heard, and before that"
            now.sleep(0.5)
            await service.attach(link, link.joined())
            assert told(tmp_path)[before:] == [40_000, 1_000, 500]
            assert service.cluster.jobs[JOB].accounting.left_out_ms == sum(told(tmp_path))

    wall[0] += 40_000
    run(second)


def test_what_was_told_of_a_hold_is_not_told_again_by_the_next_one(tmp_path: Path, wall: list[int]) -> None:
    now = FakeTime()
    before = trained(tmp_path, now)

    async def killed_while_held() -> None:
        with closing(Journal(tmp_path / "journal.db")) as journal:
            service = Orchestrator(journal, source=now)
            now.sleep(3.0)
            wall[0] += 3_000
            service.hear(EXITED)
            assert service.clock.held

    async def second() -> None:
        async with serving(tmp_path, now):
            assert sum(told(tmp_path)[before:]) == 40_000 + 3_000 + 1_000

    wall[0] += 40_000
    asyncio.run(killed_while_held())
    wall[0] += 1_000
    run(second)


def test_the_clock_on_the_wall_counts_from_where_it_was_noted_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has slept for eight hours, in which its monotonic clock stood still and nobody trained."""
    wall = [1_800_000_000_000]
    monkeypatch.setattr(shell, "wall_clock_ms", lambda: wall[0])
    now = FakeTime()

    async def first() -> None:
        async with serving(tmp_path, now) as service:
            await train(service, RecordingLink())
            wall[0] += 8 * 3_600_000
            now.sleep(1.0)
            service._keep_time(service.clock.now_ms())

    async def second() -> None:
        async with serving(tmp_path, now):
            assert told(tmp_path)[before:] == [2_000]

    asyncio.run(first())
    before = len(told(tmp_path))
    wall[0] += 2_000
    run(second)


def test_a_clock_on_the_wall_that_was_set_back_says_nothing(tmp_path: Path, wall: list[int]) -> None:
    now = FakeTime()
    before = trained(tmp_path, now)

    async def second() -> None:
        async with serving(tmp_path, now) as service:
            await service.put(EXITED)
            assert told(tmp_path)[before:] == []

    wall[0] -= 3_600_000
    run(second)


def test_without_any_job_there_is_nothing_to_tell(tmp_path: Path) -> None:
    now = FakeTime()

    async def story() -> None:
        async with serving(tmp_path, now) as service:
            now.sleep(60.0)
            link = RecordingLink()
            await service.attach(link, link.joined())
            await train(service, link)
            assert told(tmp_path) == []
            assert service.cluster.jobs[JOB].accounting.left_out_ms == 0

    run(story)


def test_a_journal_that_is_not_writable_loses_nothing_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = FakeTime()

    async def story() -> None:
        async with serving(tmp_path, now) as service:
            await train(service, RecordingLink())
            before = len(told(tmp_path))
            now.sleep(3.0)
            with monkeypatch.context() as patch:
                patch.setattr(Journal, "append", unwritable)
                with pytest.raises(JournalUnavailable):
                    service.hear(EXITED)
            service.hear(EXITED)
            assert told(tmp_path)[before:] == [3_000 - COUNTED_MS]

    def unwritable(*_: object) -> int:
        raise JournalUnavailable("no space left")

    run(story)


# ---------------------------------------------------------------- how late something is read


def test_lateness_is_what_exceeds_the_promptest_of_a_connection() -> None:
    now = FakeTime()
    lateness = Lateness(now)
    now.sleep(100.0)
    assert lateness.of(5_000) == 0, "the clocks are 95 s apart, or this was late: nobody knows yet"
    now.sleep(0.25)
    assert lateness.of(5_240) == 10
    now.sleep(0.25)
    assert lateness.of(5_510) == 0, "this was prompter than the first"
    now.sleep(12.0)
    assert [lateness.of(5_760), lateness.of(17_510)] == [11_750, 0]
    assert lateness.of(0) == 0, "who does not say when it was sent is taken to be prompt"


def test_clocks_that_drift_are_followed() -> None:
    now = FakeTime()
    lateness = Lateness(now)
    sent = 1_000.0
    for _ in range(4 * 3600 // 10):  # four hours; the other clock loses 50 millionths
        now.sleep(10.0)
        sent += 10_000 * (1 - 5e-5)
        assert lateness.of(int(sent)) <= 2 * SPAN_MS * 5e-5 + 2


# ---------------------------------------------------------------- who keeps something adds to its age


def test_an_agent_adds_how_long_it_has_kept_an_event() -> None:
    for event, age in ((EXITED, 400), (ev.age_event(RESUMED, 30), 430), (ev.WorkerWarm(worker=WorkerId("w")), None)):
        frame = decode_to_orchestrator(framed([Kept(3, event, 100_000_000)], 500_000_000))
        assert isinstance(frame, EventFrame)
        assert (frame.seq, frame.sent_ms) == (3, 500)
        assert getattr(frame.event, "age_ms", None) == age


def test_events_that_are_sent_together_have_each_its_own_age() -> None:
    kept = [Kept(3, RESUMED, 100_000_000), Kept(4, RESUMED, 300_000_000)]
    frame = decode_to_orchestrator(framed(kept, 500_000_000))
    assert isinstance(frame, EventsFrame)
    ages = [(one.seq, one.event.age_ms) for one in frame.each() if isinstance(one.event, ev.WorkerResumed)]
    assert ages == [(3, 400), (4, 200)]


def test_what_has_bytes_of_the_script_goes_alone_and_all_go_in_order() -> None:
    light, bulky = ev.WorkerWarm(worker=WorkerId("w")), EXITED
    for events, expected in (
        ([light] * 3, [3]),
        ([bulky, bulky], [1, 1]),
        ([light, bulky, light, light], [1, 1, 2]),
        ([light] * (2 * MOST_TOGETHER + 1), [MOST_TOGETHER, MOST_TOGETHER, 1]),
        ([], []),
    ):
        kept = [Kept(seq, event, 0) for seq, event in enumerate(events, 1)]
        found = list(together(kept))
        assert [len(some) for some in found] == expected
        assert [one for some in found for one in some] == kept


def test_a_worker_adds_how_long_ago_it_has_said_something(monkeypatch: pytest.MonkeyPatch) -> None:
    said = Said(RESUMED)
    monkeypatch.setattr("time.monotonic_ns", lambda: said.at_ns + 250_000_000)
    again = said.again()
    assert isinstance(again, ev.WorkerResumed)
    assert again.age_ms == 250


def test_frames_of_agents_that_do_not_say_when_are_understood() -> None:
    frame = msgspec.msgpack.decode(encode(EventFrame(1, EXITED, 500)))
    del frame["sent_ms"]
    assert decode_to_orchestrator(msgspec.msgpack.encode(frame)) == EventFrame(1, EXITED, 0)
