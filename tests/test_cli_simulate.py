"""`torchrelay simulate`: what it prints, what it refuses and how, and the plots."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tests.test_ledger import line
from torchrelay.cli.main import main
from torchrelay.forecast.buckets import Bucket
from torchrelay.forecast.presets import COLUMNS, TABLE, cells, exact, simple
from torchrelay.protocol.incident import Resolution

SHORT = ("--gpus", "64", "--days", "5", "--rate", "30", "--repair", "5h,20h", "--runs", "2")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of the command."""
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *words])
    out, err = capsys.readouterr()
    code = ended.value.code
    assert isinstance(code, int)
    return code, out, err


def test_a_table_shows_each_strategy_and_where_the_time_goes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, *SHORT)
    assert (code, err) == (0, "")
    for word in ("restart", "tuned", "hot-spare", "torchft", "migration", "±", "productive", "checkpoint save", "clean",
                 "decided by the protocol core; phases: assumed", "95 % confidence"):  # fmt: skip
        assert word in out


def test_json_has_every_figure_with_its_interval(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, *SHORT, "-o", "json", "--strategy", "migration,restart")
    found = json.loads(out)
    assert code == 0
    assert [one["strategy"] for one in found] == ["migration", "restart"]
    for one in found:
        shares = [one["means"]["ettr"]["mean"], *(one["buckets"][bucket]["mean"] for bucket in Bucket)]
        assert sum(shares) == pytest.approx(1)
        assert one["means"]["ettr"]["low"] <= one["means"]["ettr"]["mean"] <= one["means"]["ettr"]["high"]
        assert len(one["outcomes"]) == one["runs"] == 2


def test_the_same_words_give_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, *SHORT, "--seed", "3") == said(capsys, *SHORT, "--seed", "3")
    assert said(capsys, *SHORT, "--seed", "3") != said(capsys, *SHORT, "--seed", "4")


@pytest.mark.slow
def test_a_sweep_has_a_row_for_each_value(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "spares.png"
    code, out, _ = said(
        capsys, *SHORT, "--strategy", "restart,migration", "--sweep", "spares=0,1,4", "--plot", str(plot)
    )
    assert code == 0
    assert [row.split()[0] for row in out.splitlines()[1:]] == ["0", "1", "4"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("sweep", ["gpus=64,128", "rate=1,10", "interval=10,60", "floating=0,2"])
def test_all_that_can_be_swept_is(capsys: pytest.CaptureFixture[str], sweep: str) -> None:
    code, out, _ = said(capsys, *SHORT, "--strategy", "tuned", "--sweep", sweep, "-o", "json")
    found = json.loads(out)
    assert code == 0
    assert [one["value"] for one in found] == [float(value) for value in sweep.partition("=")[2].split(",")]
    ettrs = [one["forecasts"][0]["means"]["ettr"]["mean"] for one in found]
    assert ettrs[0] != ettrs[1]


def test_a_trace_is_described_and_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "faults.csv"
    path.write_text("start,end,node,cause\n1,2,a,GPU\n30,40,b,NIC\n50,51,a,GPU\n")
    code, out, _ = said(capsys, "--trace", str(path), "--describe", "--trace-nodes", "8")
    assert code == 0
    assert "3 on 8 nodes" in out
    assert "6 nodes never failed" in out
    code, out, _ = said(
        capsys, "--trace", str(path), "--gpus", "64", "--days", "4", "--strategy", "migration", "-o", "json"
    )
    assert code == 0
    assert json.loads(out)[0]["means"]["faults"]["mean"] == 3


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--rate", "3"), "--rate means nothing with --trace"),
        (("--foreseen", "0.5"), "--foreseen means nothing with --trace"),
        (("--sweep", "rate=1,2"), "--sweep rate"),
        (("--describe", "--sweep", "spares=1,2"), "leave --sweep"),
    ],
)
def test_what_a_trace_says_itself_is_refused_beside_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], named: str
) -> None:
    path = tmp_path / "faults.csv"
    path.write_text("start,end,node,cause\n1,2,a,GPU\n30,40,b,NIC\n")
    code, out, err = said(capsys, "--trace", str(path), *words)
    assert (code, out) == (2, "")
    assert named in err


def test_a_trace_is_replayed_to_its_end_and_what_is_beyond_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A trace of 100 days, whose last fault comes long after a month."""
    path = tmp_path / "faults.csv"
    path.write_text("start,end,node,cause\n1,2,a,GPU\n2390,2400,b,NIC\n")
    words = ("--trace", str(path), "--gpus", "64", "--strategy", "restart")
    (found,) = json.loads(said(capsys, *words, "-o", "json")[1])
    assert found["outcomes"][0]["faults"] == 2
    assert found["hours"] == pytest.approx(2400)
    assert "nothing fails after that" not in said(capsys, *words)[1]
    assert "the trace ends after 100 days: nothing fails after that" in said(capsys, *words, "--days", "200")[1]


def test_json_has_what_the_table_says_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = json.loads(said(capsys, *SHORT, "--strategy", "tuned", "--floating", "1", "-o", "json")[1])
    assert (found["gpus"], found["nodes"], found["hours"], found["counting"]) == (64, 8, 120, "wall")
    assert (found["spares"], found["floating"], found["layout"], found["copies"]) == (2, 1, "ddp", 8)
    assert found["phases"].startswith("assumed")


def test_phases_come_from_a_ledger(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    slow = msgspec.structs.replace(line(Resolution.CLEAN), kind="unplanned", phases={"detect": 900_000})
    path.write_bytes(msgspec.json.encode(slow) + b"\n")
    code, out, _ = said(capsys, *SHORT, "--strategy", "migration", "--ledger", str(path), "-o", "json")
    assert code == 0
    assert json.loads(out)[0]["means"]["pause_p50_s"]["mean"] == pytest.approx(900, rel=0.02)
    assert "1 incidents as they were measured" in said(
        capsys, *SHORT, "--strategy", "migration", "--ledger", str(path))[1]  # fmt: skip


# ---------------------------------------------------------------- published cases


@pytest.mark.soak
def test_the_published_table_is_met_as_far_as_a_sample_can_be() -> None:
    """Each cell by 0.01, or by less than the error of the sample that was published; and ours by renewal theory."""
    found = cells(runs=100)
    assert len(found) == len(TABLE) * len(COLUMNS) == 45
    assert sum(one.within for one in found) >= 40
    for one in found:
        assert one.within or abs(one.difference) <= 1.96 * one.published_error + 0.005, one
        # Runs of 60 mean times end with work that nothing has taken yet: up to half an interval more.
        assert one.exact - 0.015 <= one.ours <= one.exact + 0.025, one


def test_the_table_is_of_its_own_simplifications() -> None:
    assert exact(simple(1024, 23.7, 4)) == pytest.approx(0.9937, abs=1e-4)
    assert simple(16384, 6.5, 0).spares is None


@pytest.mark.slow
def test_the_page_of_the_published_table_says_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "--preset", "ettr-table", "--quick", "--runs", "20")
    assert code == 0
    assert out.count("migration 2 min, 90 %") == 9
    assert "cells within 0.01" in out
    assert "renewal theory" in out


def test_the_benchmark_is_in_its_order(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "--preset", "benchmark-64", "--runs", "3")
    assert code == 0
    assert "order: migration < restart < torchft" in out


def test_llama_3_with_plain_strategies(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "--preset", "llama3", "--strategy", "tuned,hot-spare", "--runs", "1")
    assert code == 0
    assert "16,384 GPUs (2,048 nodes), 54 days" in out
    assert "one run: no confidence interval" in out


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--gpus", "12"), "gpus is 12"),
        (("--gpus", "0"), "gpus is 0"),
        (("--gpus-per-node", "0"), "gpus_per_node is 0"),
        (("--rate", "-1"), "rate is -1"),
        (("--rate", "nan"), "rate is nan"),
        (("--rate", "inf"), "--rate: rate is inf"),
        (("--shape", "0.005"), "--shape: shape is 0.005"),
        (("--shape", "inf"), "shape is inf"),
        (("--lemons", "0.5", "--lemon-times", "inf"), "lemon_times is inf"),
        (("--price", "inf"), "price is inf"),
        (("--spread", "inf"), "spread is inf"),
        (("--floating", "99999999999"), "at most 1,000,000 are simulated"),
        (("--refail", "0.5,1"), "--refail: refail_week is 1"),
        (("--layout", "tp=8,cp=7"), "a group takes 56 GPUs"),
        (("--days", "-1"), "--days: hours is -24"),
        (("--foreseen", "0.5", "--counting", "running"), "--foreseen"),
        (("--preset", "llama3", "--strategy", "covered"), "--strategy covered"),
        (("--preset", "benchmark-64", "--strategy", "tuned"), "leave --strategy out"),
        (("--preset", "ettr-table", "--plot", "x.png"), "--plot"),
        (("--rate", "3", "--mttf", "2h"), "--rate and --mttf"),
        (("--mttf", "0s"), "gap_h is 0"),
        (("--days", "0"), "hours is 0"),
        (("--layout", "dpp"), "'dpp' is not known"),
        (("--layout", "hsdp=5"), "hsdp=5"),
        (("--strategy", "hope"), "--strategy hope"),
        (("--strategy", "migration", "--spares", "unlimited"), "unlimited"),
        (("--spares", "-3"), "--spares"),
        (("--spares", "many"), "--spares many"),
        (("--sweep", "luck=1"), "--sweep luck=1"),
        (("--sweep", "gpus=64,x"), "--sweep x"),
        (("--sweep", "gpus=100.5"), "gpus is 100.5"),
        (("--policy", "ranks_per_slot"), "KEY=VALUE"),
        (("--policy", "luck=1"), "'luck' is not known"),
        (("--policy", "refill=maybe"), "true or false"),
        (("--policy", "slot_faults=few"), "a whole number"),
        (("--phase", "detect"), "--phase detect"),
        (("--phase", "rest=3s"), "'rest' is not known"),
        (("--interval", "soon"), "--interval soon"),
        (("--bring-up", "1m,2m"), "--bring-up 1m,2m"),
        (("--repair", "3h,1h"), "repair_p90_h is 1"),
        (("--refail", "2"), "refail_day is 2"),
        (("--shape", "2", "--gap", "uniform"), "--shape"),
        (("--precision", "0"), "precision is 0"),
        (("--retry", "1"), "retry is 1"),
        (("--runs", "0"), "--runs 0"),
        (("--seed", "-1"), "--seed -1"),
        (("--describe",), "--trace FILE"),
        (("--trace-nodes", "3"), "--trace-nodes"),
        (("--quick",), "--quick"),
        (("--trace", "no/such.csv"), "no/such.csv"),
        (("--ledger", "no/such.jsonl"), "no/such.jsonl"),
        (("--plot", "x.txt"), ".png"),
        (("--plot", "no/such/x.png"), "no folder"),
        (("--preset", "llama3", "--gpus", "64"), "leave --gpus out"),
        (("--displaced", "3"), "displaced is 3"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else words,
)
def test_bad_input_is_named_in_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str) -> None:
    code, out, err = said(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("torchrelay: ")
    assert err.count("\n") == 1
    assert named in err


def test_a_bad_trace_is_named_with_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "faults.csv"
    path.write_text("start,end,node,cause\n1,9,a,GPU\n3,4,a,GPU\n")
    code, _, err = said(capsys, "--trace", str(path))
    assert code == 2
    assert "line 3: a fails while the repair that began in line 2 is not over" in err
