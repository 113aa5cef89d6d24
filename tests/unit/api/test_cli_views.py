"""status, ranks, incidents, explain, report: the same answers from a living orchestrator and from its journal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.brain import listening, spec, start_process
from tests.support.cli_views import (
    journal_of_a_recovery,  # noqa: F401  a fixture
    torchrelay,
)
from torchrelay.api.endpoint import Endpoint, write_endpoint
from torchrelay.api.shown import size_text
from torchrelay.client.client import Client
from torchrelay.client.runs import NotPossible, find_run, find_source
from torchrelay.terminal.show import milliseconds, table


class Asked:
    """The command line, about one run."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys

    def __call__(self, *words: str) -> str:
        code, out, _ = torchrelay(self.capsys, *words, "--run-dir", str(self.folder))
        assert code == 0
        return out


@pytest.fixture
def ask(journal_of_a_recovery: Path, capsys: pytest.CaptureFixture[str]) -> Asked:
    return Asked(journal_of_a_recovery, capsys)


class TestFromTheJournal:
    """The orchestrator is away."""

    def test_that_it_is_away_is_said_with_the_journals_age(self, ask: Asked) -> None:
        _, _, told = torchrelay(ask.capsys, "status", "--run-dir", str(ask.folder))
        assert "the orchestrator is away; its journal ends at 20" in told
        assert "s ago" in told

    def test_status_tells_the_phase_and_why(self, ask: Asked) -> None:
        told = ask("status")
        assert "preparing: redo the step after 7: step 7 is committed on rank 0" in told
        assert "generation  2" in told
        assert "incidents   1 (0 of 1 clean, 1 open)" in told

    def test_status_as_json_is_the_apis(self, ask: Asked) -> None:
        found = json.loads(ask("status", "-o", "json"))
        assert (found["job"], found["phase"], found["generation"]) == ("job", "preparing", 2)

    def test_ranks_are_listed_with_their_workers(self, ask: Asked) -> None:
        lines = ask("ranks").splitlines()
        assert lines[0].split()[:3] == ["rank", "worker", "node"]
        assert lines[1].split()[:2] == ["0", "node-0.0.0"]
        assert lines[2].split()[:2] == ["1", "node-0.2.2"]
        assert "(replacement)" in lines[2]

    def test_one_rank_can_be_asked_for(self, ask: Asked) -> None:
        (row,) = json.loads(ask("ranks", "--rank", "1", "-o", "json"))["ranks"]
        assert row["worker"] == "node-0.2.2"
        code, _, told = torchrelay(ask.capsys, "ranks", "--rank", "9", "--run-dir", str(ask.folder))
        assert code == 2
        assert "no rank 9: the job has ranks 0 to 1" in told

    def test_incidents_are_one_line_each(self, ask: Asked) -> None:
        told = ask("incidents")
        assert "I-1" in told
        assert "SIGKILL" in told
        assert "redo the step after 7" in told
        assert "open" in told

    @pytest.mark.parametrize("name", ["I-1", "1"])
    def test_explain_tells_cause_evidence_and_every_decision(self, ask: Asked, name: str) -> None:
        told = ask("explain", name)
        for part in (
            "rank 1, worker node-0.1.1 on node-0: SIGKILL",
            "told by: agent: process exit",
            "rank 1 moves to warm spare node-0.2.2",
            "step 7 is committed on rank 0: no rank goes back behind it",
            "verdict      redo the step after 7",
            "interrupt",
        ):
            assert part in told

    def test_an_unknown_incident_is_answered_with_the_known_ones(self, ask: Asked) -> None:
        code, _, told = torchrelay(ask.capsys, "explain", "I-9", "--run-dir", str(ask.folder))
        assert code == 2
        assert "there are: I-1" in told

    def test_an_unknown_job_is_told(self, ask: Asked) -> None:
        code, _, told = torchrelay(ask.capsys, "status", "--job", "jub", "--run-dir", str(ask.folder))
        assert code == 2
        assert "no job named 'jub'; known: job" in told

    def test_the_report_is_one_object_a_line(self, ask: Asked) -> None:
        (line,) = [json.loads(line) for line in ask("report", "-o", "jsonl").splitlines()]
        assert (line["id"], line["cause"], line["resolution"], line["eligible"]) == ("I-1", "SIGKILL", "open", True)
        assert any("moves to" in text for text in line["story"])

    def test_the_report_has_lines_and_totals(self, ask: Asked) -> None:
        found = json.loads(ask("report", "-o", "json"))
        assert len(found["lines"]) == 1
        assert found["totals"]["incidents"] == 1
        assert "1 incident, 1 of them eligible, 0 resolved clean" in ask("report")  # open, in a run that is gone

    def test_an_interruption_that_was_never_seen_to_end_is_held_against_us(self, ask: Asked) -> None:
        told = ask("report", "--guarantee")
        assert "1 counted, 0 of them resolved clean" in told
        assert "never seen to end" in told
        code, *_ = torchrelay(ask.capsys, "report", "--guarantee", "--check", "--run-dir", str(ask.folder))
        assert code == 1

    def test_the_run_at_hand_and_its_own_file_are_one(self, ask: Asked) -> None:
        ask("report", "--write")
        found = json.loads(ask("report", "--guarantee", "--ledger", str(ask.folder), "-o", "json"))
        assert found["counted"] == 1

    def test_the_ledger_is_written_when_asked_for(self, ask: Asked) -> None:
        ask("report", "--write")
        assert json.loads((ask.folder / "ledger.jsonl").read_text())["id"] == "I-1"


class TestFromTheOrchestrator:
    @pytest.fixture
    def living(self, tmp_path: Path) -> Iterator[Path]:
        """A run's folder with an orchestrator that has a job."""
        process = start_process(tmp_path)
        try:
            listening(process, tmp_path)
            Client.of(tmp_path).submit(spec())
            yield tmp_path
        finally:
            process.kill()
            process.communicate()

    def test_it_is_asked_and_nothing_is_remarked(self, living: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for verb in ("status", "ranks", "incidents", "report"):
            code, out, err = torchrelay(capsys, verb, "--run-dir", str(living))
            assert (code, err) == (0, "")
            assert out

    def test_a_wrong_token_is_told_with_the_remedy(self, living: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (living / "token").write_text("trt_some-other-token\n")
        code, _, told = torchrelay(capsys, "status", "--run-dir", str(living))
        assert code == 1
        assert "wrong or missing token" in told

    def test_a_missing_token_is_told_with_the_remedy(self, living: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (living / "token").unlink()
        code, _, told = torchrelay(capsys, "status", "--run-dir", str(living))
        assert code == 2
        assert "no token at" in told

    def test_it_answers_without_torch_and_much_else(self, living: Path) -> None:
        """What it imports is what it waits for; `make bench NAME=status` measures that."""
        words = [sys.executable, "-X", "importtime", "-m", "torchrelay.cli.main", "status", "--run-dir", str(living)]
        done = subprocess.run(words, check=True, capture_output=True, timeout=60, text=True)
        imported = {
            line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time")
        }
        assert any(name.startswith("torchrelay.cli.") for name in imported)
        assert not {"torch", "numpy", "asyncio", "rich", "aiohttp"} & imported
        assert len(imported) < 400
        code = "import sys; import torchrelay.cli.view.status; print('torch' in sys.modules, 'aiohttp' in sys.modules)"
        loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=30)
        assert loaded.stdout.split() == ["False", "False"]

    def test_watching_shows_it_again(self, living: Path) -> None:
        words = [sys.executable, "-m", "torchrelay.cli.main", "status", "--watch", "--run-dir", str(living)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            seen = 0
            until = time.monotonic() + 20
            while seen < 2 and time.monotonic() < until:
                seen += process.stdout.readline().startswith("generation")
            process.send_signal(2)
            assert process.wait(20) == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""
        assert seen == 2


class TestFindingTheRun:
    def test_the_newest_is_meant_if_none_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for age, name in ((20, "newer"), (90, "older")):
            run = tmp_path / "torchrelay-runs" / name
            run.mkdir(parents=True)
            for file in ("journal.db", "job.json"):
                (run / file).write_text("")
                os.utime(run / file, (time.time() - age, time.time() - age))
        assert find_run(None).name == "newer"
        # Whoever reads a journal touches its files.
        for file in ("journal.db", "journal.db-wal"):
            (tmp_path / "torchrelay-runs" / "older" / file).write_text("")
        assert find_run(None).name == "newer"

    def test_without_a_run_it_is_said_how_to_start_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(NotPossible, match="torchrelay run") as caught:
            find_run(None)
        assert caught.value.code == 2

    def test_a_folder_without_a_run_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(NotPossible, match="not a run's folder"):
            find_run(tmp_path)

    def test_an_address_where_nobody_answers_means_away(self, journal_of_a_recovery: Path, tmp_path: Path) -> None:
        (tmp_path / "journal.db").write_bytes((journal_of_a_recovery / "journal.db").read_bytes())
        (tmp_path / "token").touch(0o600)
        (tmp_path / "token").write_text("trt_a-token-of-some-length\n")
        write_endpoint(tmp_path, Endpoint(url="http://127.0.0.1:9", pid=1))
        _, note = find_source(tmp_path)
        assert "away" in note

    def test_a_damaged_journal_is_told(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "journal.db").write_text("Dear diary" * 999)
        code, _, told = torchrelay(capsys, "status", "--run-dir", str(tmp_path))
        assert code == 1
        assert "damaged or not a journal" in told


class TestShowing:
    def test_a_table_is_as_wide_as_it_must_be_with_numbers_to_the_right(self) -> None:
        told = table(("id", "step"), [("I-1", 7), ("I-10", 1234), ("I-2", None)])
        assert told.splitlines() == ["id    step", "I-1      7", "I-10  1234", "I-2      -"]

    @pytest.mark.parametrize(
        ("span", "told"),
        [(None, "-"), (0.44, "0.4 ms"), (35.2, "35 ms"), (1_240, "1.24 s"), (185_000, "3 min 5 s")],
    )
    def test_spans_are_for_people(self, span: float | None, told: str) -> None:
        assert milliseconds(span) == told

    @pytest.mark.parametrize(("amount", "told"), [(12, "12 B"), (4_000_000, "4.0 MB"), (1_200_000_000, "1.2 GB")])
    def test_sizes_are_for_people(self, amount: int, told: str) -> None:
        assert size_text(amount) == told
