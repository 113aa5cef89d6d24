"""`torchrelay cost`: what it prints, in tables and in JSON; what it makes of a ledger; what it refuses, and how."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli_cost import Capsys, refused
from tests.support.cli_views import journal_of_a_recovery, torchrelay  # noqa: F401
from tests.support.ledger_lines import line, view
from torchrelay.api.shown import Incidents
from torchrelay.cli.forecasts.cost_words import parser
from torchrelay.client.client import Client
from torchrelay.client.ledger_file import jsonl
from torchrelay.economics.assumptions import ASSUMPTIONS
from torchrelay.economics.published.field import RATES
from torchrelay.economics.published.published import all_claims
from torchrelay.goodput.ledger import Line
from torchrelay.protocol.messages.ids import JobId
from torchrelay.protocol.model.incident import Resolution


def told(capsys: Capsys, *words: str) -> str:
    code, out, err = torchrelay(capsys, "cost", *words)
    assert (code, err) == (0, "")
    return out


def found(capsys: Capsys, *words: str) -> Any:
    return json.loads(told(capsys, *words, "-o", "json"))


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """41 failures, 38 of them clean, one never seen to end; and what does not count."""
    lines = [line() for _ in range(38)]
    lines += [line(Resolution.ROLLED_BACK), line(Resolution.FELL_BACK)]
    lines += [line(Resolution.ENDED, eligible=False), line(Resolution.OPEN)]
    path = tmp_path / "ledger.jsonl"
    path.write_text(jsonl(lines))
    return path


class TestPresets:
    def test_all_of_them_show_the_figures_and_what_makes_them_fail(self, capsys: Capsys) -> None:
        page = told(capsys, "--preset", "all")
        for figure in ("$307,524 a month", "3.04 h a day", "9.11 min a day", "95.0 %", "$6.35 M a year"):
            assert figure in page
        for otherwise in ("$84,221 a month", "3.29 h a day", "27.95 min a day", "87.2 %", "$12.94 M a year"):
            assert otherwise in page
        assert page.count("fails if") == page.count("  source    ") == len(all_claims())

    def test_one_shows_its_formula_with_the_numbers(self, capsys: Capsys) -> None:
        page = told(capsys, "--preset", "month-cost")
        assert "730 h / 7.9 h = 92.41 failures x (0.75 h + 0.3333 h) x 1,024 GPUs x $3 = $307,524 a month" in page
        assert re.search(r"6\.5 failures per 1,000 node-days .* +\$84,221 a month", page)
        assert "TorchPass" in page

    def test_the_list_has_a_line_for_each(self, capsys: Capsys) -> None:
        lines = told(capsys, "--list").splitlines()
        assert [row.split()[0] for row in lines[1:]] == [each.name for each in all_claims()]

    def test_as_json(self, capsys: Capsys) -> None:
        (one,) = found(capsys, "--preset", "month-cost")
        assert round(one["figures"][0]["value"]) == 307_524
        assert {each["name"] for each in found(capsys, "--list")} == {each.name for each in all_claims()}
        assert all(each["fails"] for each in found(capsys, "--preset", "all"))


class TestAnswer:
    def test_it_is_never_one_number(self, capsys: Capsys) -> None:
        page = told(capsys)
        rows = [row for row in page.splitlines() if row.startswith(("as published", "renewal", "tuned", "promised"))]
        assert len(rows) == 4
        assert "$307,524" in rows[0]
        assert "net of spares" in page
        assert "92.41 x 1.083 h x 1,024 GPUs x $3 = $307,524" in page
        assert "nothing was measured" in page

    def test_every_input_is_shown_with_its_source(self, capsys: Capsys) -> None:
        page = told(capsys, "--gpus", "512")
        assert all(each.flag in page for each in ASSUMPTIONS)
        assert re.search(r"--gpus +512 GPUs +given", page)
        assert re.search(r"--price-per-gpu-hour +\$3 +Clockwork", page)

    def test_every_published_rate_is_shown_beside(self, capsys: Capsys) -> None:
        page = told(capsys)
        assert all(re.search(rf"^{each.name} +{each.per_1000_node_days:.2f} ", page, re.MULTILINE) for each in RATES)

    def test_a_rate_can_be_named(self, capsys: Capsys) -> None:
        assert found(capsys, "--rate", "meta")["answer"]["cluster"]["mttf_h"] == pytest.approx(28.85, abs=0.005)

    def test_it_is_said_that_nobody_gave_the_rate_and_that_simulate_has_another(self, capsys: Capsys) -> None:
        told_of = "no rate was given: it is 23.73 per 1,000 node-days"
        page = " ".join(told(capsys).split())
        assert told_of in page
        assert "torchrelay simulate starts from Meta's, 6.5: give both your own --rate" in page
        for words in (("--rate", "meta"), ("--mttf-h", "5")):
            assert told_of not in " ".join(told(capsys, *words).split())

    def test_assumptions_as_a_table_and_as_json(self, capsys: Capsys) -> None:
        page = told(capsys, "--assumptions", "--mttf-h", "5")
        assert re.search(r"--mttf-h +5 h +24,000 / \(rate \* nodes\) +you", page)
        used = found(capsys, "--assumptions", "--mttf-h", "5")
        assert [each["flag"] for each in used] == [each.flag for each in ASSUMPTIONS]
        assert [each["flag"] for each in used if each["given"] == "you"] == ["--mttf-h"]

    def test_help_names_every_flag_with_its_default_and_source(self) -> None:
        text = " ".join(parser().format_help().split())
        for each in ASSUMPTIONS:
            assert each.flag in text
            assert each.source in text

    def test_the_help_of_all_verbs_has_it(self, capsys: Capsys) -> None:
        code, out, _ = torchrelay(capsys, "--help")
        assert code == 0
        assert "what failures cost" in out

    def test_every_input_can_be_changed(self, capsys: Capsys) -> None:
        """Each flag alters the answer; those of what was measured do so with a measurement."""
        measured = ("--clean", "9", "--eligible", "10")
        plain = {"": found(capsys)["answer"]["views"], "m": found(capsys, *measured)["answer"]["views"]}
        values = {"counting": "running", "gpus_per_node": "4", "longest_interval_h": "0.5", "mttf_h": "5",
                  "gpus": "512"}  # fmt: skip
        for each in ASSUMPTIONS:
            needs = "m" if each.field in ("slowest_s", "new_interval_h") else ""
            value = values.get(each.field, "0.5" if "share" in each.unit else "999")
            views = found(capsys, each.flag, value, *(measured if needs else ()))["answer"]["views"]
            assert views != plain[needs], each.flag


class TestMeasured:
    def test_a_ledger_gives_coverage_and_recovery(self, capsys: Capsys, ledger: Path) -> None:
        answer = found(capsys, "--ledger", str(ledger))["answer"]
        measured = answer["measured"]
        assert (measured["clean"], measured["eligible"]) == (38, 41)
        assert measured["ratio"]["low"] == pytest.approx(0.806, abs=0.001)
        assert measured["recovery_p50_s"] == pytest.approx(0.09)
        assert (measured["not_counted"], measured["not_counted_to_checkpoint"]) == (1, 1)
        names = [view["name"] for view in answer["views"]]
        assert names[-2:] == ["measured", "measured, low"]
        assert answer["views"][-2]["migration"]["coverage"] == pytest.approx(38 / 41)

    def test_a_planned_move_is_no_recovery_from_a_failure(self, capsys: Capsys, tmp_path: Path) -> None:
        planned = {**json.loads(jsonl([line()])), "kind": "planned", "pause_ms": 1}
        path = tmp_path / "ledger.jsonl"
        path.write_text(jsonl([line()]) + json.dumps(planned) + "\n\n")
        measured = found(capsys, "--ledger", str(path))["answer"]["measured"]
        assert (measured["eligible"], measured["planned"], measured["recovery_p50_s"]) == (1, 1, 0.09)

    def test_a_long_recovery_counts_by_its_length(self, capsys: Capsys, tmp_path: Path) -> None:
        """What is lost adds up, so it is the mean that is reckoned with: nine of 1 s and one of 91 s are 10 s each."""
        path = tmp_path / "ledger.jsonl"
        plain = json.loads(jsonl([line()]))
        rows = [{**plain, "pause_ms": 1_000}] * 9 + [{**plain, "pause_ms": 91_000}]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        views = {view["name"]: view for view in found(capsys, "--ledger", str(path))["answer"]["views"]}
        assert views["measured"]["migration"]["downtime_h"] == pytest.approx(10 / 3600)

    def test_a_run_gives_the_same_as_its_ledger(self, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
        class Told:
            def view_incidents(self, job: str | None) -> Incidents:
                return Incidents(job=JobId(job or "job"), incidents=(view(), view(Resolution.ROLLED_BACK)))

        monkeypatch.setattr("torchrelay.cli.forecasts.cost.find_source", lambda _: (Told(), ""))
        measured = found(capsys, "--run-dir", "runs/1", "--job", "a")["answer"]["measured"]
        assert (measured["clean"], measured["eligible"], measured["source"]) == (1, 2, "runs/1")

    def test_a_failure_that_a_run_has_died_in_is_held_against_it(
        self,
        capsys: Capsys,
        journal_of_a_recovery: Path,
    ) -> None:
        _, out, _ = torchrelay(capsys, "cost", "--run-dir", str(journal_of_a_recovery), "-o", "json")
        measured = json.loads(out)["answer"]["measured"]
        assert (measured["clean"], measured["eligible"]) == (0, 1), "as torchrelay report has it"

    def test_a_run_without_a_closed_failure_has_measured_nothing(
        self, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Told(Client):
            def __init__(self) -> None:
                pass

            def view_incidents(self, job: str | None = None) -> Incidents:
                return Incidents(job=JobId(job or "job"), incidents=(view(Resolution.OPEN),))

        monkeypatch.setattr("torchrelay.cli.forecasts.cost.find_source", lambda _: (Told(), ""))
        code, _, err = torchrelay(capsys, "cost", "--run-dir", "runs/1")
        assert code == 2
        assert "no failure in its 1 lines that counts" in err

    def test_moves_are_no_failures_that_were_got_over(self, capsys: Capsys, tmp_path: Path) -> None:
        """One failure that went back to a checkpoint, and nine moves for warnings, which may have been false."""
        path = tmp_path / "ledger.jsonl"
        move = {**json.loads(jsonl([line()])), "kind": "pre-emptive", "pause_ms": 1}
        path.write_text(jsonl([line(Resolution.FELL_BACK)]) + "\n".join([json.dumps(move)] * 9))
        measured = found(capsys, "--ledger", str(path))["answer"]["measured"]
        assert (measured["clean"], measured["eligible"], measured["planned"]) == (0, 1, 9)

    @pytest.mark.parametrize("words", [("--plot", "x.png"), ("--clean", "1", "--eligible", "2"), ("--ledger", "x")])
    def test_what_the_assumptions_do_not_show_is_refused(self, capsys: Capsys, words: tuple[str, ...]) -> None:
        code, _, err = torchrelay(capsys, "cost", "--assumptions", *words)
        assert code == 2
        assert f"{words[0]} means nothing with --assumptions" in err

    def test_a_rate_of_next_to_nothing_is_no_crash(self, capsys: Capsys) -> None:
        code, _, err = torchrelay(capsys, "cost", "--rate", "1e-323", "--gpus", "8")
        assert code == 0, err

    def test_the_advice_has_its_numbers_and_its_risk(self, capsys: Capsys, ledger: Path) -> None:
        page = told(capsys, "--advise", "--ledger", str(ledger))
        assert page.startswith("save every ")
        assert "38 of 41 failures were resolved clean" in page
        assert "sqrt(2 * s * M / (1 - c))" in page
        assert "at the lower bound" in page
        assert "risk\n- a failure that does go back loses" in page
        (advised,) = (row for row in page.splitlines() if row.startswith(">"))
        assert "best at the lower bound" in advised

    def test_bounds_are_rounded_as_in_the_report(self, capsys: Capsys, tmp_path: Path) -> None:
        path = tmp_path / "ledger.jsonl"
        path.write_text(jsonl([line()]))
        assert "20.6 % covered" in told(capsys, "--ledger", str(path))
        advice = told(capsys, "--advise", "--ledger", str(path))
        assert "100 %, with 95 % confidence 20.6 % to 100 %" in advice
        assert "20.7 %" not in advice

    def test_the_advice_as_json(self, capsys: Capsys, ledger: Path) -> None:
        advice = found(capsys, "--advise", "--ledger", str(ledger))
        assert advice["coverage"] == pytest.approx(38 / 42), "a user's error needed the checkpoint, too"
        assert sum(option["advised"] for option in advice["options"]) == 1


class TestRefused:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--rate", "-1"], "--rate -1: it must be above 0"),
            (["--rate", "0"], "--rate 0: it must be above 0"),
            (["--gpus", "0"], "--gpus 0: it must be above 0"),
            (["--coverage", "1.2"], "--coverage 1.2: it must be a share, from 0 to 1"),
            (["--retry-share", "1"], "--retry-share 1"),
            (["--mttf-h", "nan"], "--mttf-h nan: it must be a finite number"),
            (["--spare-nodes", "-1"], "--spare-nodes -1: it must be 0 or more"),
            (["--preset", "month-cots"], "no preset is called 'month-cots': did you mean 'month-cost'?"),
            (["--rate", "lama3"], "'lama3' is no number and no published rate: did you mean 'llama3'?"),
            (["--rate", "3", "--mttf-h", "4"], "--rate and --mttf-h say the same thing"),
            (["--preset", "all", "--gpus", "8"], "--gpus means nothing with --preset"),
            (["--list", "--plot", "x.png"], "--plot means nothing with --list"),
            (["--advise"], "--advise needs what was measured"),
            (["--clean", "3"], "--clean and --eligible go together"),
            (["--eligible", "3"], "--clean and --eligible go together"),
            (["--clean", "5", "--eligible", "3"], "--clean 5 --eligible 3"),
            (["--clean", "0", "--eligible", "0"], "at least one"),
            (["--job", "a"], "--job means nothing without --run-dir"),
            (["--ledger", "no-such-file"], "--ledger no-such-file: No such file or directory"),
            (["--run-dir", "no-such-folder"], "no-such-folder is not a run's folder"),
            (["--gpus", "many"], "argument --gpus: 'many' is no whole number"),
            (["--gpus", "10.5"], "argument --gpus: '10.5' is no whole number"),
            (["--gpus", "12"], "--gpus 12: nodes have 8 GPUs and are replaced as a whole, so give a multiple"),
            (["--gpus-per-node", "3"], "--gpus 1024 (the default): nodes have 3 GPUs"),
            (["--mttf-h", "-5"], "--mttf-h -5: it must be above 0"),
            (["--mttf-h", "-5h"], "argument --mttf-h: '-5h' is no number: give hours, as in 1.5"),
            (["--horizon-h", "-7.50"], "--horizon-h -7.50: it must be above 0"),
            (["--plot", "x.txt"], "the name must end in .png, .svg, .pdf"),
        ],
    )
    def test_bad_input_is_named(self, capsys: Capsys, words: list[str], message: str) -> None:
        assert message in refused(capsys, *words)

    @pytest.mark.parametrize(
        "broken",
        [b"{", b'{"id": "I-1"}', b"\xff\xfe", b"[]", b'{"id": 7}'],
        ids=["cut", "short", "bytes", "list", "type"],
    )
    def test_a_broken_line_of_a_ledger_is_named(self, capsys: Capsys, tmp_path: Path, broken: bytes) -> None:
        path = tmp_path / "ledger.jsonl"
        path.write_bytes(jsonl([line(), line()]).encode() + broken + b"\n")
        assert f"{path}, line 3: " in refused(capsys, "--ledger", str(path))

    @pytest.mark.parametrize("lines", [[], [line(Resolution.ENDED, eligible=False)]])
    def test_a_ledger_without_a_failure_has_measured_nothing(
        self, capsys: Capsys, tmp_path: Path, lines: list[Line]
    ) -> None:
        path = tmp_path / "ledger.jsonl"
        path.write_text(jsonl(lines))
        assert "nothing was measured yet" in refused(capsys, "--ledger", str(path))
