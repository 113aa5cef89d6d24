"""The demonstration sees what differs, and says so: its judgement is tested on made-up runs."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from examples.demo import __main__ as demo
from examples.demo.bits import Trace, compare, pause_after, read, step_seconds
from examples.demo.display import Lines, Moment, Picture, display_on, sparkline
from examples.demo.orders import OrderRefused
from examples.demo.picture import draw
from examples.demo.report import IncidentLine, Struck, match, shortfalls, tables_of, write
from examples.demo.watch import Seen, Tail
from torchrelay.chaos.faults import Fault
from torchrelay.chaos.story import Act, Facts, Story, Strike, parse

STORY = Path(__file__).parents[3] / "examples" / "demo" / "story.txt"
RANKS, STEPS = 2, 5


def left_by_a_run(folder: Path) -> tuple[Path, Path]:
    """The files of a run of 2 ranks and 5 steps, a tenth of a second each."""
    for rank in range(RANKS):
        digests = [{"point": str(step), "digest": f"d{step}", "generation": 1} for step in range(STEPS)]
        losses: list[dict[str, Any]] = [
            {"step": step, "loss": (1 / step).hex(), "at": 100 + step / 10} for step in range(1, STEPS + 1)
        ]
        save(folder / "digests", rank, digests)
        save(folder / "losses", rank, [*losses, {"parameters": "p", "at": 101}])
    return folder / "digests", folder / "losses"


def save(folder: Path, rank: int, lines: Sequence[dict[str, Any]], mode: str = "w") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank-{rank}.jsonl").open(mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def trace_of(folder: Path) -> Trace:
    return read(*left_by_a_run(folder))


def test_equal_runs_are_bit_equal(tmp_path: Path) -> None:
    found = compare(trace_of(tmp_path / "a"), trace_of(tmp_path / "b"))
    assert found.bit_equal
    assert (found.digests, found.losses, found.parameters) == (RANKS * STEPS, RANKS * STEPS, RANKS)


def test_a_step_done_again_with_the_same_bits_is_no_difference(tmp_path: Path) -> None:
    before = trace_of(tmp_path / "a")
    digests, losses = left_by_a_run(tmp_path / "b")
    save(digests, 1, [{"point": "4", "digest": "d4", "generation": 2}], "a")
    save(losses, 1, [{"step": 5, "loss": (1 / 5).hex(), "at": 103.0}], "a")
    after = read(digests, losses)
    assert compare(before, after).bit_equal
    assert after.at[1, 5] == 100.5, "the first time counts"


@pytest.mark.parametrize(
    ("folder", "line", "told"),
    [
        ("digests", {"point": "4", "digest": "other", "generation": 2}, "state: rank 1 at 4 differs"),
        ("digests", {"point": "9", "digest": "d9", "generation": 2}, "state: rank 1 at 9 is known to one run only"),
        ("losses", {"step": 5, "loss": (0.1).hex(), "at": 0}, "loss: rank 1 at 5 differs"),
        ("losses", {"parameters": "q", "at": 0}, "final parameters: rank 1 differs"),
    ],
)
def test_a_difference_is_found_wherever_it_is(tmp_path: Path, folder: str, line: dict[str, Any], told: str) -> None:
    before = trace_of(tmp_path / "a")
    digests, losses = left_by_a_run(tmp_path / "b")
    save(tmp_path / "b" / folder, 1, [line], "a")
    found = compare(before, read(digests, losses))
    assert not found.bit_equal
    assert found.differences == (told,)


def test_a_missing_rank_is_a_difference(tmp_path: Path) -> None:
    before = trace_of(tmp_path / "a")
    digests, losses = left_by_a_run(tmp_path / "b")
    (losses / "rank-1.jsonl").unlink()
    assert len(compare(before, read(digests, losses)).differences) == STEPS + 1


def test_a_run_that_is_not_repeatable_proves_nothing(tmp_path: Path) -> None:
    digests, losses = left_by_a_run(tmp_path)
    save(digests, 0, [{"point": "4", "digest": "other", "generation": 2}], "a")
    found = compare(read(digests, losses), read(digests, losses))
    assert found.differences == ("state: rank 0 at 4 is not repeatable even without faults",)


def test_nothing_compared_is_not_equal() -> None:
    assert not compare(Trace(), Trace()).bit_equal


def test_a_torn_line_is_not_passed_over(tmp_path: Path) -> None:
    digests, losses = left_by_a_run(tmp_path)
    with (losses / "rank-0.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    with pytest.raises(ValueError, match="Unterminated string"):
        read(digests, losses)


def test_a_pause_is_the_longest_time_without_a_commit() -> None:
    at = {(0, 1): 10.0, (1, 1): 10.0, (0, 2): 12.1, (1, 2): 12.3, (0, 3): 12.2, (1, 3): 12.4}
    assert pause_after(Trace(at=at), 10.05, 12.0, 0.1) == pytest.approx(2.15)
    assert pause_after(Trace(at=at), 12.35, 12.5, 0.1) is None, "rank 0 never had another step"
    assert pause_after(Trace(), 1.0, 2.0, 0.1) is None


def test_a_step_that_was_rolled_forward_does_not_end_the_pause() -> None:
    at = {(0, step): 10.0 + step for step in range(5)} | {(0, 5): 14.05, (0, 6): 17.0, (0, 7): 18.0}
    assert pause_after(Trace(at=at), 14.01, 16.9, 0.1) == pytest.approx(2.85)


def test_a_pause_may_begin_steps_after_the_strike_and_ends_with_its_incident() -> None:
    times = [10.0, 10.1, 10.2, 10.3, 10.4, 10.5, 12.0, 12.1, 19.0]  # a node's processes are killed one after the other
    at = {(0, step): moment for step, moment in enumerate(times)}
    assert pause_after(Trace(at=at), 10.01, 11.9, 0.1) == pytest.approx(1.4)


def test_the_time_of_a_step_is_the_median() -> None:
    at = {(0, step): step / 2 for step in range(9)} | {(0, 9): 100.0, (1, 1): 7.0}
    assert step_seconds(Trace(at=at)) == 0.5
    assert step_seconds(Trace()) == 0.0


# ---------------------------------------------------------------- what is shown


def moment(step: int, *news: str) -> Moment:
    return Moment(
        title="disturbed",
        step=step,
        total=300,
        seconds=step / 10,
        phase="running",
        losses=[3.0, 2.0],
        ranks=[(0, "computing", 11), (1, "hanging", 12)],
        spares=2,
        news=news,
    )


def test_without_a_terminal_each_piece_of_news_is_told_once() -> None:
    out = io.StringIO()
    display = display_on(Console(file=out, width=200))
    assert isinstance(display, Lines)
    with display:
        for step in range(60):
            display.show(moment(step, *(["strike at step 7"] if step >= 7 else [])))
    told = out.getvalue().splitlines()
    assert told.count("[disturbed] strike at step 7") == 1
    assert [line.split()[2] for line in told if " of 300" in line] == ["0", "25", "50"]


def test_on_a_terminal_the_ranks_and_their_states_are_to_be_seen() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    display = display_on(console)
    assert isinstance(display, Picture)
    console.print(display.draw(moment(8, "strike at step 7: stop rank 1")))
    told = out.getvalue()
    assert all(word in told for word in ("step 8 of 300", "hanging", "computing", "spares 2", "strike at step 7"))


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [([], 5, ""), ([1.0], 5, "▁"), ([0.0, 7.0], 5, "▁█"), ([0, 0, 4, 4, 8, 8], 3, "▁▅█"), ([1.0, 1.0], 2, "▁▁")],
)
def test_a_sparkline_spans_its_values(values: list[float], width: int, line: str) -> None:
    assert sparkline(values, width) == line


def test_the_tail_of_a_file_comes_line_by_line(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "rank-0.jsonl")
    assert tail.read() == []
    (tmp_path / "rank-0.jsonl").write_text('{"a": 1}\n{"a"')
    assert tail.read() == [{"a": 1}]
    (tmp_path / "rank-0.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    assert tail.read() == [{"a": 2}]
    assert tail.read() == []


def seen(*processes: str, phase: str = "running") -> Seen:
    ranks = [
        {
            "rank": rank,
            "state": "computing",
            "process": process,
            "pid": 50 + rank,
            "worker": f"w{rank}",
            "node": "node-0",
            "slot": rank,
        }
        for rank, process in enumerate(processes)
    ]
    status = {"phase": phase, "step": 3, "world_size": 2, "spares": {"warm": 1}}
    return Seen(status, [*ranks, {"rank": None, "state": "warm", "process": "S", "pid": 99}], [])


@pytest.mark.parametrize(
    ("job", "training"),
    [(seen("S", "R"), True), (seen("S", "T"), False), (seen("S"), False), (seen("S", "R", phase="agreeing"), False)],
)
def test_a_job_trains_when_every_rank_does(job: Seen, training: bool) -> None:
    facts = job.facts()
    assert facts.training is training
    assert facts.pids[0] == 50
    assert facts.places[0] == "node-0/0"
    assert facts.spares == 1


# ---------------------------------------------------------------- the report


def line_of_ledger(name: str, ranks: Sequence[int], at: str, resolution: str = "clean") -> dict[str, Any]:
    return {
        "id": name,
        "kind": "unplanned",
        "cause": "SIGKILL",
        "detector": "agent: process exit",
        "ranks": ranks,
        "at": at,
        "verdict": "redo the step after 7",
        "resolution": resolution,
        "steps_lost": 0,
        "phases": {"detect": 3},
    }


def test_strikes_and_incidents_find_each_other() -> None:
    kill = Struck(Strike(Fault.KILL, (1,)), 7, 1000.0, (1,))
    pair = Struck(Strike(Fault.KILL, (0, 1)), 20, 1010.0, (0, 1))
    lines = [
        line_of_ledger("I-1", [1, 2], "1970-01-01T00:16:40.010+00:00"),
        line_of_ledger("I-2", [0, 1], "1970-01-01T00:16:50.010+00:00"),
        line_of_ledger("I-3", [1], "1970-01-01T00:16:55.010+00:00"),
    ]
    found = match(lines, [kill, pair], Trace(at={(0, 7): 999.9, (0, 8): 1000.5}), 0.1)
    assert [(one.name, one.step, one.fault) for one in found] == [
        ("I-1", 7, "kill"),
        ("I-2", 20, "kill"),
        ("I-3", 0, ""),
    ]
    assert found[0].pause_s == pytest.approx(0.4)


def incident(**changes: Any) -> IncidentLine:
    plain: dict[str, Any] = {
        "name": "I-1", "fault": "kill", "kind": "unplanned", "cause": "SIGKILL", "detector": "agent", "ranks": (2,),
        "verdict": "redo", "resolution": "clean", "steps_lost": 0, "phases_ms": {"detect": 3.0}, "pause_s": 0.4,
        "step": 3, "struck": 100.31,
    }  # fmt: skip
    return IncidentLine(**{**plain, **changes})


def told(strikes: int) -> Story:
    """A story of so many kills, and an order that no incident follows, told to its end."""
    kills = [Strike(Fault.KILL, (1,))] * strikes
    return Story((*kills, Strike(Act.ORCHESTRATOR, ())), told=strikes + 1)


def test_the_demonstration_fails_for_every_reason_there_is(tmp_path: Path) -> None:
    good = compare(trace_of(tmp_path / "a"), trace_of(tmp_path / "b"))
    assert shortfalls(good, [incident()], told(1), (0, 0)) == []
    assert shortfalls(good, [incident()], told(2), (0, 0)) == ["2 strikes, but only 1 of them are in the ledger"]
    assert shortfalls(good, [incident()], told(1), (0, 91)) == ["a run ended with 91"]
    unfinished = Story(told(2).strikes, told=1)
    assert shortfalls(good, [incident()], unfinished, (0, 0)) == [], "what has not come is in no ledger"
    assert shortfalls(good, [incident(resolution="fell back")], told(1), (0, 0)) == [
        "I-1 was not resolved clean: fell back"
    ]
    assert shortfalls(compare(Trace(), Trace()), [], told(0), (0, 0)) == ["there was nothing to compare"]


def test_a_story_that_is_not_told_to_its_end_is_told_once_more_with_more_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[tuple[str, int]] = []

    def perform(run: demo.Run, args: argparse.Namespace, _: Console) -> tuple[int, list[IncidentLine]]:
        begun.append((run.title, args.epochs))
        trace_of(run.digests.parent)
        run.story.told = 1 if args.epochs < 20 else len(run.story.strikes)
        return 0, [incident()] * run.story.told

    monkeypatch.setattr(demo, "perform", perform)
    monkeypatch.setattr(demo, "shortfalls", lambda *_: [])
    monkeypatch.setattr(demo, "draw", lambda *_: None)
    folders = ["--out", str(tmp_path), "--runs", str(tmp_path / "runs")]
    for epochs, expected, code in ((10, [10, 20], 0), (5, [5, 10], demo.UNTOLD)):
        begun.clear()
        monkeypatch.setattr(sys, "argv", ["demo", "--epochs", str(epochs), *folders])
        assert demo.main() == code
        assert [number for title, number in begun if title == "disturbed"] == expected
    assert "once more, with 20 epochs" in capsys.readouterr().out


def test_the_report_and_the_picture_are_written(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "a")
    comparison = compare(trace, trace)
    write(tmp_path / "demo-report.json", comparison, [incident()], seconds=3)
    told = json.loads((tmp_path / "demo-report.json").read_text())
    assert told["bit_equal"] is True
    assert told["steps_lost"] == 0
    assert told["incidents"][0]["phases_ms"] == {"detect": 3.0}
    assert told["machine"]["torch"]
    draw(tmp_path / "demo-report.png", trace, trace, [incident()], comparison.bit_equal)
    assert (tmp_path / "demo-report.png").read_bytes().startswith(b"\x89PNG")
    out = io.StringIO()
    Console(file=out, width=160).print(*tables_of([incident(cause="cut [/gloo/pair.cc:537]")]))
    assert "detect" in out.getvalue()
    assert "0.40" in out.getvalue()
    assert "[/gloo/pair.cc:537]" in out.getvalue(), "causes are text, not markup"


def test_the_story_of_the_demonstration_has_distinct_faults_and_leaves_time_to_recover() -> None:
    strikes = parse(STORY.read_text()).strikes
    faults = {strike.fault for strike in strikes}
    assert {Fault.KILL, Fault.STOP, *Act} <= faults
    assert any(len(strike.ranks) > 1 for strike in strikes)
    assert [strike.step for strike in strikes] == sorted(strike.step for strike in strikes)
    assert strikes[-1].step <= 440, "of 500 steps"


@pytest.mark.parametrize("within", ["backward", ""])
def test_a_strike_that_comes_too_early_is_due_again_and_another_refusal_is_told(
    within: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> str:
        raise OrderRefused("the worker has no page yet")

    monkeypatch.setattr(demo, "carry_out", refuse)
    run = demo.Run("disturbed", tmp_path, Story(()), spare_nodes=1)
    due = Strike(Fault.KILL, (2,), within=within) if within else Strike(Act.ORCHESTRATOR, ())
    facts = Facts(step=7, phase="running", training=True, moving=False, places={}, spares=1, pids={2: 99})
    job: Any = SimpleNamespace(run_dir=tmp_path / "run")
    if within:
        assert not run.strike(due, facts, job)
    else:
        with pytest.raises(OrderRefused):
            run.strike(due, facts, job)
    assert (run.struck, run.news) == ([], [])
