"""The guarantee: what counts, what is left out and why, how sure the share is, and whether a target is shown."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from tests.support.cli_views import torchrelay
from tests.support.guarantee import NOW, excluded, line
from torchrelay.api.shown import Exclusion
from torchrelay.cli.view.guarantee import each_once, guarantee_page, moment_in
from torchrelay.cli.view.report import report_page
from torchrelay.client.ledger_file import jsonl
from torchrelay.client.runs import NotPossible
from torchrelay.economics.published.claims import proven_share
from torchrelay.goodput.ledger import Entry, Line, RatioPart, Verdict, clean_ones_to_come, group_of, guarantee, wilson
from torchrelay.protocol.messages.ids import JobId, Rank
from torchrelay.protocol.model.incident import Resolution


def entries(*lines: Line, live: bool = False) -> list[Entry]:
    return [Entry(one, "a file", live) for one in lines]


class TestWilson:
    """The figures that were worked out by hand."""

    @pytest.mark.parametrize(
        ("clean", "counted", "low"),
        [(10, 10, 0.722), (34, 34, 0.898), (35, 35, 0.901), (133, 140, 0.9004), (46, 49, 0.835)],
    )
    def test_the_lower_bound(self, clean: int, counted: int, low: float) -> None:
        found = wilson(clean, counted)
        assert found is not None
        assert found.low == pytest.approx(low, abs=0.0005)

    def test_both_bounds(self) -> None:
        found = wilson(46, 49)
        assert found is not None
        assert (round(found.low, 3), round(found.high, 3)) == (0.835, 0.979)

    @pytest.mark.parametrize(
        ("clean", "counted", "met"),
        [(34, 34, False), (35, 35, True), (133, 140, True), (128, 135, False), (142, 150, False)],
    )
    def test_where_ninety_percent_is_shown(self, clean: int, counted: int, met: bool) -> None:
        lines = [line(number, "clean" if number < clean else "ended") for number in range(counted)]
        found = guarantee(entries(*lines), 0.9)
        assert (found.clean, found.counted) == (clean, counted)
        assert (found.verdict is Verdict.MET) is met
        assert (found.more == 0) is met


class TestMore:
    @pytest.mark.parametrize(("clean", "counted", "more"), [(0, 0, 35), (10, 10, 25), (34, 34, 1), (35, 35, 0)])
    def test_clean_ones_in_a_row(self, clean: int, counted: int, more: int) -> None:
        assert clean_ones_to_come(clean, counted, 0.9) == more

    @pytest.mark.parametrize(("clean", "counted"), [(0, 3), (20, 40), (89, 90), (128, 135)])
    @pytest.mark.parametrize("target", [0.5, 0.9, 0.99])
    def test_it_is_the_smallest_number_that_is_enough(self, clean: int, counted: int, target: float) -> None:
        more = clean_ones_to_come(clean, counted, target)
        enough = wilson(clean + more, counted + more)
        assert enough is not None
        assert enough.low >= target
        if more:
            less = wilson(clean + more - 1, counted + more - 1)
            assert less is not None
            assert less.low < target


class TestWhatCounts:
    def test_an_exclusion_is_listed_with_its_reason_and_not_counted(self) -> None:
        stop = excluded(2, Exclusion.OPERATOR, "the job ended with 130: Ctrl-C")
        found = guarantee(entries(line(1), stop))
        assert (found.counted, found.clean) == (1, 1)
        (one,) = found.those(RatioPart.EXCLUDED)
        assert (one.id, one.reason, one.why) == ("I-2", "operator stop", "the job ended with 130: Ctrl-C")

    def test_at_worst_all_exclusions_were_lost_but_no_move_that_did_not_take_place(self) -> None:
        some = [excluded(2, Exclusion.OPERATOR, "x"), excluded(3, Exclusion.CALLED_OFF, "y", "called off")]
        found = guarantee(entries(line(1), *some))
        assert found.worst == wilson(1, 2)

    @pytest.mark.parametrize("resolution", ["restarted", "rolled back", "fell back", "ended"])
    def test_whatever_is_not_clean_is_counted_with_what_was_lost(self, resolution: str) -> None:
        found = guarantee(entries(line(1, resolution)))
        (one,) = found.those(RatioPart.NOT_CLEAN)
        assert one.lost
        assert (found.counted, found.clean) == (1, 0)

    def test_a_clean_line_with_lost_steps_is_not_believed(self) -> None:
        (one,) = guarantee(entries(line(1, steps_lost=3))).those(RatioPart.NOT_CLEAN)
        assert one.lost == "3 steps"

    def test_one_that_is_open_waits_if_its_run_lives_and_is_lost_if_not(self) -> None:
        assert guarantee(entries(line(1, "open"), live=True)).those(RatioPart.PENDING)
        found = guarantee(entries(line(1, "open")))
        assert (found.counted, found.clean) == (1, 0)
        assert found.those(RatioPart.NOT_CLEAN)[0].lost == "never seen to end"

    @pytest.mark.parametrize(
        ("resolution", "story", "why"),
        [
            ("fell back", ("falls back to the script's own checkpoint: no replica", "x"), "falls back to"),
            ("ended", ("a", "ends with 90: no spare for rank 1", "resolved: ended"), "ends with 90"),
            ("rolled back", ("all go back to the snapshots of 40: rank 1 has no replica", "x"), "all go back"),
            ("restarted", ("all workers start again: too early", "x"), "all workers start again"),
            ("open", ("rank 1 waits", ""), ""),
        ],
    )
    def test_the_decision_that_lost_it_is_quoted(self, resolution: str, story: tuple[str, ...], why: str) -> None:
        (one,) = guarantee(entries(line(1, resolution, story=story))).those(RatioPart.NOT_CLEAN)
        assert one.why.startswith(why)

    def test_kinds_and_causes_are_counted_apart(self) -> None:
        move = line(3, kind="planned", detector="move M-1", cause="node-1 is drained")
        hang = line(4, detector="hang", cause="stopped for 2.0 s")
        found = guarantee(entries(line(1), line(2, "ended"), move, hang))
        assert [(part.name, part.counted, part.clean) for part in found.kinds] == [
            ("unplanned", 3, 2),
            ("planned", 1, 1),
        ]
        assert [(part.name, part.counted, part.clean) for part in found.causes] == [
            ("process killed by a signal", 2, 1),
            ("hang", 1, 1),
            ("planned move", 1, 1),
        ]

    @pytest.mark.parametrize(
        ("detector", "cause", "group"),
        [
            ("agent: process exit", "exited with 7", "process ended by itself"),
            ("report deadline", "it does not come out", "too slow in a recovery"),
            ("heartbeat", "its node is lost", "node lost"),
            ("collective", "its collective failed", "broken collective"),
            ("restore", "it cannot be restored", "restore"),
            ("", "", "not told"),
        ],
    )
    def test_a_cause_is_named_by_who_told_of_it(self, detector: str, cause: str, group: str) -> None:
        assert group_of(line(1, detector=detector, cause=cause)) == group

    def test_they_are_in_the_order_of_time_whatever_the_offset(self) -> None:
        late, early = line(1, at="2026-10-01T12:00:00.000+02:00"), line(2, at="2026-10-01T09:00:00.000+00:00")
        assert [one.id for one in guarantee(entries(late, early)).findings] == ["I-2", "I-1"]

    @pytest.mark.parametrize("target", [0.0, 1.0, -0.5, 90.0])
    def test_a_target_is_a_share(self, target: float) -> None:
        with pytest.raises(ValueError, match="between 0 and 1"):
            guarantee([], target)


class TestPage:
    def test_it_says_that_the_target_is_met(self) -> None:
        told = guarantee_page(guarantee(entries(*(line(number) for number in range(40)))))
        assert "40 counted, 40 of them resolved clean: 100 % (91.2 % to 100 %)" in told
        assert "target 90 %: met\n" in told
        assert "^ target" in told

    @pytest.mark.parametrize(("target", "text"), [(0.9, "90 %"), (0.9999, "99.99 %"), (0.855, "85.5 %")])
    def test_a_target_is_shown_as_it_was_given(self, target: float, text: str) -> None:
        assert f"target {text}: " in guarantee_page(guarantee(entries(line(1)), target))

    def test_it_says_how_many_would_show_it(self) -> None:
        told = guarantee_page(guarantee(entries(*(line(number) for number in range(10)))))
        assert "target 90 %: not shown yet, as the lower bound is 72.2 %; 25 more clean ones in a row" in told

    def test_it_says_that_the_target_is_missed_and_lists_what_was_lost(self) -> None:
        lost = line(7, "ended", story=("ends with 90: no spare for rank 1", "resolved: ended"))
        told = guarantee_page(guarantee(entries(line(1), lost)))
        assert "target 90 %: missed, with a share below it, though by too few to be sure" in told
        assert "the job ended" in told
        assert "ends with 90: no spare for rank 1" in told

    def test_it_quotes_the_evidence_of_an_exclusion_in_full(self) -> None:
        evidence = "the script's own error, on ranks 0 and 1: " + "x" * 200
        told = guarantee_page(guarantee(entries(excluded(3, Exclusion.USER_BUG, evidence))))
        assert evidence in told
        assert "as nothing counts; 35 more clean ones in a row" in told
        assert "if every exclusion but moves called off were counted, and lost: 0 % (0 % to 79.4 %)" in told

    def test_it_says_what_the_exclusions_would_make_of_it(self) -> None:
        told = guarantee_page(guarantee(entries(line(1), excluded(3, Exclusion.OPERATOR, "Ctrl-C"))))
        assert "if every exclusion but moves called off were counted, and lost: 50 %" in told

    @pytest.mark.parametrize(("share", "text"), [(0.8997, "89.9 %"), (0.9, "90 %"), (0.90045, "90 %"), (1.0, "100 %")])
    def test_a_share_is_not_rounded_to_what_it_does_not_reach(self, share: float, text: str) -> None:
        assert proven_share(share) == text

    def test_the_ledger_shows_the_same_bounds(self) -> None:
        assert "1 resolved clean: 100 % (20.6 % to 100 %), with 95 % confidence" in report_page([line(1)])
        assert "100 % (20.6 % to 100 %)" in guarantee_page(guarantee(entries(line(1))))


# ---------------------------------------------------------------- the command line


class Asked:
    """`report --guarantee` about files, where no run is at hand."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        return torchrelay(self.capsys, "report", "--guarantee", *words)

    def file(self, name: str, *lines: Line) -> str:
        path = self.folder / name
        path.write_text(jsonl(lines))
        return str(path)

    def refused(self, *words: str) -> str:
        code, _, told = self(*words)
        assert code == 2
        return told


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Asked:
    monkeypatch.chdir(tmp_path)
    return Asked(tmp_path, capsys)


def test_files_of_many_runs_are_put_together_and_the_same_interruption_counts_once(ask: Asked) -> None:
    first, second = ask.file("a.jsonl", line(1), line(2)), ask.file("b.jsonl", line(2), line(3, hours_ago=2))
    code, out, _ = ask("--ledger", first, second, "-o", "json")
    assert code == 0
    assert json.loads(out)["counted"] == 3


def test_one_that_was_open_when_it_was_written_may_be_over_in_another_file(ask: Asked) -> None:
    opened, over = line(1, "open"), line(1)
    for files in ((opened, over), (over, opened)):
        paths = [ask.file(f"{number}.jsonl", one) for number, one in enumerate(files)]
        found = json.loads(ask("--ledger", *paths, "-o", "json")[1])
        assert (found["counted"], found["clean"]) == (1, 1)


def test_it_is_the_same_if_a_clock_was_corrected_and_another_if_its_story_is(ask: Asked) -> None:
    later = (NOW - timedelta(hours=1) + timedelta(milliseconds=40)).isoformat(timespec="milliseconds")
    first, told = ask.file("a.jsonl", line(1)), ask.file("b.jsonl", line(1, at=later))
    assert json.loads(ask("--ledger", first, told, "-o", "json")[1])["counted"] == 1
    other = ask.file("c.jsonl", line(1, at=later, story=("rank 3 moves to a spare", "resolved: clean")))
    assert json.loads(ask("--ledger", first, other, "-o", "json")[1])["counted"] == 2


def test_jobs_of_one_name_at_other_times_are_others(ask: Asked) -> None:
    paths = [ask.file(f"{hours}.jsonl", line(1, hours_ago=hours)) for hours in (1, 2)]
    assert json.loads(ask("--ledger", *paths, "-o", "json")[1])["counted"] == 2


def test_two_files_that_tell_of_one_interruption_differently_are_refused(ask: Asked) -> None:
    told = ask.refused("--ledger", ask.file("a.jsonl", line(1)), ask.file("b.jsonl", line(1, "ended")))
    assert "resolution is ended in " in told
    assert "b.jsonl:1, clean in " in told


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"pause_ms": 81}, "pause_ms is 81 in "), ({"ranks": (Rank(2),)}, "ranks is [2] in "),
        ({"phases": {"detect": 3}}, 'phases is {"detect":3} in '), ({"kind": "planned"}, "kind is planned in "),
        ({"steps_lost": 2}, "steps_lost is 2 in "), ({"cause": "SIGTERM"}, "cause is SIGTERM in "),
        ({"story": ("rank 3 moves",)}, 'story is ["rank 3 moves"] in '),
    ],
)  # fmt: skip
def test_all_that_two_files_tell_of_one_is_compared(ask: Asked, more: dict[str, object], told: str) -> None:
    other: Line = replace(line(1), **more)
    refused = ask.refused("--ledger", ask.file("a.jsonl", line(1)), ask.file("b.jsonl", other))
    assert told in refused
    assert "b.jsonl:1" in refused


def test_a_run_at_hand_tells_in_the_words_of_a_file() -> None:
    told = [Entry(line(1, Resolution.CLEAN), "this run"), Entry(line(1, "ended"), "a.jsonl:1")]
    with pytest.raises(NotPossible, match=r": resolution is ended in a\.jsonl:1, clean in this run: leave one"):
        each_once(told)


def test_two_reasons_for_not_counting_one_are_refused_and_the_one_that_is_told_is_kept(ask: Asked) -> None:
    stop = excluded(1, Exclusion.OPERATOR, "Ctrl-C")
    bug, old = replace(stop, excluded=Exclusion.USER_BUG), replace(stop, excluded=Exclusion.UNTOLD, evidence="")
    assert "excluded is user bug in " in ask.refused("--ledger", ask.file("a.jsonl", stop), ask.file("b.jsonl", bug))
    for files in ((stop, old), (old, stop)):
        paths = [ask.file(f"{number}.jsonl", one) for number, one in enumerate(files)]
        (one,) = json.loads(ask("--ledger", *paths, "-o", "json")[1])["findings"]
        assert (one["reason"], one["why"]) == ("operator stop", "Ctrl-C")


def test_what_a_later_interruption_showed_of_one_holds_in_whichever_order_the_files_are_read(ask: Asked) -> None:
    early, late = line(1), excluded(1, Exclusion.USER_BUG, "rank 2 raised it, too", "clean")
    late = replace(late, steps_lost=0)
    for files in ((early, late), (late, early)):
        paths = [ask.file(f"{number}.jsonl", one) for number, one in enumerate(files)]
        (one,) = json.loads(ask("--ledger", *paths, "-o", "json")[1])["findings"]
        assert (one["standing"], one["why"]) == ("excluded", "rank 2 raised it, too")


def test_a_line_that_was_taken_out_is_missed_and_counts_at_worst(ask: Asked) -> None:
    path = ask.file("a.jsonl", line(1, hours_ago=50), line(2, hours_ago=3), line(4))
    found = json.loads(ask("--ledger", path, "-o", "json")[1])
    assert found["missing"] == [f"train/I-3, which {path} skips"]
    assert (found["counted"], found["worst"]["share"]) == (3, 0.75)
    page = ask("--ledger", path)[1]
    assert f"missing, as lines were taken out of a ledger:\ntrain/I-3, which {path} skips" in page
    assert "if every exclusion but moves called off, and what is missing, were counted, and lost: 75 %" in page


def test_what_another_place_tells_of_or_lies_before_is_not_missing(ask: Asked) -> None:
    path = ask.file("a.jsonl", line(1, hours_ago=90), line(3, hours_ago=60), line(5))
    between = ask.file("b.jsonl", line(2, hours_ago=70), line(4, hours_ago=30))
    another = ask.file(
        "c.jsonl", line(1, hours_ago=400), line(2, hours_ago=300), line(3, hours_ago=290), line(4, hours_ago=280)
    )
    cases: list[tuple[tuple[str, ...], list[str]]] = [
        ((between,), []), ((another,), ["I-2", "I-4"]), (("--since", "50h"), ["I-4"]),
    ]  # fmt: skip
    for words, skipped in cases:
        found = json.loads(ask("--ledger", path, *words, "-o", "json")[1])
        named = [text.removeprefix("train/").partition(",")[0] for text in found["missing"] if path in text]
        assert named == skipped


def test_an_interruption_is_dated_by_the_clock_here(ask: Asked) -> None:
    at = "2026-01-02T03:04:05.000+14:00"
    here = datetime.fromisoformat(at).astimezone()
    page = ask("--ledger", ask.file("a.jsonl", line(1, "ended", at=at)))[1]
    assert f"{here:%Y-%m-%d %H:%M:%S}" in page


def test_a_folder_of_a_run_stands_for_its_ledger(ask: Asked) -> None:
    (ask.folder / "run").mkdir()
    ask.file("run/ledger.jsonl", line(1))
    assert "1 counted" in ask("--ledger", str(ask.folder / "run"))[1]


def test_a_line_that_is_none_is_named(ask: Asked) -> None:
    path = ask.file("a.jsonl", line(1))
    bad_times = [jsonl([line(2, at=at)]) for at in ("noon", "0001-01-01T00:00:00.000+14:00")]
    for bad in ('{"id": 1}', "no json", jsonl([line(2, "burnt")]), *bad_times):
        Path(path).write_text(jsonl([line(1)]) + bad + "\n")
        assert "a.jsonl:2 is no line of a ledger" in ask.refused("--ledger", path)


def test_a_ledger_of_an_older_version_is_read(ask: Asked) -> None:
    old = msgspec.to_builtins(line(1, "ended", eligible=False))
    del old["excluded"], old["evidence"]
    (ask.folder / "old.jsonl").write_text(json.dumps(old) + "\n")
    (one,) = json.loads(ask("--ledger", "old.jsonl", "-o", "json")[1])["findings"]
    assert (one["standing"], one["reason"]) == ("excluded", "not told")


def test_a_file_that_is_not_there_is_named_with_the_remedy(ask: Asked) -> None:
    told = ask.refused("--ledger", "nowhere.jsonl")
    assert "nowhere.jsonl: No such file" in told
    assert "report --write" in told


def test_without_a_run_and_without_a_file_there_is_nothing_to_judge(ask: Asked) -> None:
    assert "no run under" in ask.refused()


def test_since_leaves_out_what_is_older(ask: Asked) -> None:
    path = ask.file("a.jsonl", line(1), line(2, hours_ago=30), line(3, hours_ago=24 * 40), line(4, at=""))
    for since, count in (("2h", 2), ("2d", 3), ("60d", 4)):
        assert json.loads(ask("--ledger", path, "--since", since, "-o", "json")[1])["counted"] == count


@pytest.mark.parametrize(
    "text",
    [
        "soon",
        "30",
        "30w",
        "2026-13-01",
        "-3d",
        "2999-01-01",
        "20261001",
        "0001-01-01",
        "0001-01-01T00:00+14:00",
        "9999-12-31T23:59-14:00",
    ],
)
def test_a_time_that_is_none_is_refused(ask: Asked, text: str) -> None:
    assert "--since" in ask.refused("--ledger", ask.file("a.jsonl", line(1)), f"--since={text}")


@pytest.mark.parametrize("words", [["--since", "-3d"], ["--since=-3d"], ["--since", "0d"]])
def test_so_long_ago_is_above_nothing(ask: Asked, words: list[str]) -> None:
    assert f"--since {words[-1][-3:].lstrip('=')}: it must be above 0" in ask.refused("--ledger", "x", *words)


def test_times_are_read() -> None:
    now = datetime.fromisoformat("2026-10-31T12:00:00+00:00")
    assert moment_in(None, now) is None
    assert moment_in("30d", now) == datetime.fromisoformat("2026-10-01T12:00:00+00:00")
    day = moment_in("2026-10-01", now)
    assert day is not None
    assert (day.day, day.hour, day.tzinfo is not None) == (1, 0, True)
    with pytest.raises(NotPossible, match="lies in the future"):
        moment_in("2026-11-01T12:00:00+00:00", now)


def test_the_exit_code_tells_only_if_it_is_asked(ask: Asked) -> None:
    few, many = ask.file("a.jsonl", line(1, "ended")), ask.file("b.jsonl", *(line(number) for number in range(35)))
    assert ask("--ledger", few)[0] == 0
    assert ask("--ledger", few, "--check")[0] == 1
    assert ask("--ledger", many, "--check")[0] == 0
    assert ask("--ledger", many, "--check", "--target", "95%")[0] == 1
    assert ask("--ledger", ask.file("c.jsonl"), "--check")[0] == 1, "nothing shows nothing"


@pytest.mark.parametrize("text", ["90", "0", "1", "x", "-0.5", "150%"])
def test_a_target_that_is_no_share_is_refused(ask: Asked, text: str) -> None:
    assert "--target" in ask.refused("--ledger", ask.file("a.jsonl", line(1)), f"--target={text}")


def test_jsonl_is_one_interruption_a_line(ask: Asked) -> None:
    path = ask.file("a.jsonl", line(1), excluded(2, Exclusion.STORAGE, "[Errno 28] No space"))
    rows = [json.loads(text) for text in ask("--ledger", path, "-o", "jsonl")[1].splitlines()]
    assert {(row["id"], row["standing"]) for row in rows} == {("I-1", "clean"), ("I-2", "excluded")}


class TestDeclared:
    def test_what_somebody_declares_stands_there_as_their_word(self, ask: Asked) -> None:
        path = ask.file("a.jsonl", line(1), line(2, "ended"))
        words = ["--exclude", "I-2", "storage-outage", "NFS away, ticket 4711", "-o", "json"]
        found = json.loads(ask("--ledger", path, *words)[1])
        (one,) = [each for each in found["findings"] if each["standing"] == "excluded"]
        assert (one["reason"], found["counted"]) == ("storage outage", 1)
        assert "declared with --exclude" in one["why"]
        assert "NFS away, ticket 4711" in one["why"]

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (("I-9", "user-bug", "x"), "there is none"),
            (("I-1", "bad-luck", "x"), "'bad-luck' is none of"),
            (("I-1", "user-bug", " "), "say what shows it"),
            (("I-2", "user-bug", "x"), "not counted anyway"),
            (("I-3", "user-bug", "x"), "there are 2: write JOB/I-3"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, ask: Asked, words: tuple[str, ...], told: str) -> None:
        other = replace(line(3), job=JobId("other"))
        path = ask.file("a.jsonl", line(1), excluded(2, Exclusion.OPERATOR, "Ctrl-C"), line(3), other)
        assert told in ask.refused("--ledger", path, "--exclude", *words)


def test_a_job_is_picked_out_of_the_files(ask: Asked) -> None:
    path = ask.file("a.jsonl", line(1), replace(line(2), job=JobId("other")))
    assert "1 counted" in ask("--ledger", path, "--job", "other")[1]


@pytest.mark.parametrize("flag", [["--check"], ["--since", "3d"], ["--ledger", "x"], ["--target", "0.9"]])
def test_its_flags_mean_nothing_without_it(capsys: pytest.CaptureFixture[str], flag: list[str]) -> None:
    code, _, told = torchrelay(capsys, "report", *flag)
    assert code == 2
    assert f"{flag[0]} means nothing without --guarantee" in told


def test_every_resolution_has_words() -> None:
    for resolution in Resolution:
        assert guarantee(entries(line(1, resolution))).findings
