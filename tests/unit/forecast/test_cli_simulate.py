"""`torchrelay simulate`: what it prints, what it refuses and how, and the plots."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tests.support.cli_simulate import SHORT, said
from tests.support.ledger_lines import line
from torchrelay.forecast.play.buckets import Bucket
from torchrelay.forecast.presets import exact, simple
from torchrelay.protocol.model.incident import Resolution
from torchrelay.terminal.show import milliseconds


def test_a_table_shows_each_strategy_and_where_the_time_goes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, *SHORT)
    assert (code, err) == (0, "")
    for word in (
        "restart",
        "tuned",
        "hot-spare",
        "torchft",
        "migration",
        "±",
        "productive",
        "checkpoint save",
        "clean",
        "decided by the protocol core; phases: assumed",
        "95 % confidence",
    ):
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


# ---------------------------------------------------------------- what is said below the tables


def test_that_spares_ran_out_is_said_with_how_many_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """The plain call: two spares are too few, and with as many as it names nobody waits."""
    out = said(capsys)[1]
    (remark,) = (row for row in out.splitlines() if row.startswith("Spares ran out"))
    assert "restart, tuned, hot-spare and migration stood still for 28.7 to 29.0 % of the time" in remark
    assert "there were 2 dedicated spares: try --spares 8." in remark
    enough = said(capsys, "--spares", "8")
    assert "Spares ran out" not in enough[1]
    found = json.loads(said(capsys, "--spares", "8", "-o", "json")[1])
    assert all(one["means"]["waited_h"]["mean"] < 1 for one in found)


def test_floating_spares_count_as_spares(capsys: pytest.CaptureFixture[str]) -> None:
    (remark,) = (row for row in said(capsys, "--floating", "1")[1].splitlines() if row.startswith("Spares ran out"))
    assert "2 dedicated spares and 1 floating ones: try --spares " in remark
    wanted = int(remark.rpartition("--spares ")[2].rstrip("."))
    assert f"Up to {wanted + 1} nodes were down at once" in remark


def test_what_a_few_runs_cannot_tell_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, *SHORT)[1]
    assert "The interval of ETTR of restart, tuned, hot-spare and migration reaches beyond 0 to 1" in out
    assert "restart from tuned, hot-spare, torchft and migration; " in out
    assert "with --runs 8 intervals are about half as wide" in out


def test_strategies_whose_intervals_overlap_are_compared_run_by_run(capsys: pytest.CaptureFixture[str]) -> None:
    """All meet the same faults: the shorter bring-up is better in each run, whatever the runs have in common."""
    out = said(capsys, *SHORT, "--days", "60", "--spares", "20", "--runs", "4", "--strategy", "tuned,hot-spare")[1]
    assert "Intervals overlap, as one run has more faults than another; run by run all strategies differ." in out
    assert "More runs help" not in out


@pytest.mark.parametrize("words", [("--rate", "0"), ("--runs", "1"), ("--strategy", "tuned", "--repair", "1m")])
def test_where_there_is_no_doubt_nothing_is_said(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    out = said(capsys, "--gpus", "64", "--days", "60", *words)[1]
    assert "told apart" not in out
    assert "overlap" not in out
    assert "Spares ran out" not in out


def test_a_published_rate_goes_by_its_name_and_the_default_says_whose_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpus", "64", "--days", "5", "--runs", "2", "--strategy", "tuned")
    plain, named = said(capsys, *words)[1], said(capsys, *words, "--rate", "meta")[1]
    assert "No --rate was given: it is 6.5 failures per 1,000 node-days, Meta's" in plain
    assert "`torchrelay cost` starts from 23.73" in plain
    assert plain.startswith(named.rstrip())
    assert "No --rate" in said(capsys, *words, "--sweep", "spares=0,1")[1]
    swept = said(capsys, *words, "--sweep", "rate=meta,llama3")[1]
    assert [row.split()[0] for row in swept.splitlines()[1:]] == ["6.5", "3.79"]


def test_spans_are_in_days_hours_and_minutes_and_no_faults_are_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys)[1]
    assert "5 d 3 h" in out
    assert "4 h 54 min" in out
    assert "1 h 30 min" in out
    assert "30.42 days, a fault every 28.85 h (wall time)" in out
    quiet = said(capsys, "--rate", "0", "--strategy", "tuned")[1]
    assert "30.42 days, no faults, 2 dedicated spares" in quiet
    assert "inf" not in quiet
    assert " ms" not in quiet, "nothing stood, so there is no pause"


@pytest.mark.parametrize(
    ("span", "told"),
    [
        (59_990, "59.99 s"), (59_996, "1 min"), (117_340, "1 min 57 s"), (3_599_000, "59 min 59 s"),
        (3_599_600, "1 h"), (17_650_000, "4 h 54 min"), (86_369_999, "23 h 59 min"), (86_390_000, "1 d"),
        (442_945_000, "5 d 3 h"),
    ],
)  # fmt: skip
def test_long_spans_are_in_two_units(span: float, told: str) -> None:
    assert milliseconds(span) == told


def test_phases_come_from_a_ledger(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    slow = msgspec.structs.replace(line(Resolution.CLEAN), kind="unplanned", phases={"detect": 900_000})
    path.write_bytes(msgspec.json.encode(slow) + b"\n")
    code, out, _ = said(capsys, *SHORT, "--strategy", "migration", "--ledger", str(path), "-o", "json")
    assert code == 0
    assert json.loads(out)[0]["means"]["pause_p50_s"]["mean"] == pytest.approx(900, abs=0.001)
    assert (
        "1 incidents as they were measured" in said(capsys, *SHORT, "--strategy", "migration", "--ledger", str(path))[1]
    )


def test_the_table_is_of_its_own_simplifications() -> None:
    assert exact(simple(1024, 23.7, 4)) == pytest.approx(0.9937, abs=1e-4)
    assert simple(16384, 6.5, 0).spares is None


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
        (("--gpus", "12"), "--gpus 12: nodes have 8 GPUs"),
        (("--gpus", "0"), "--gpus 0: it must be 1 or more"),
        (("--gpus-per-node", "0"), "--gpus-per-node 0: it must be 1 or more"),
        (("--gpus-per-node", "3"), "--gpus 1024 (the default): nodes have 3 GPUs"),
        (("--rate", "-1"), "--rate -1: it must be 0 or more"),
        (("--rate", "nan"), "--rate nan: "),
        (("--rate", "inf"), "--rate inf: it must be a finite number"),
        (("--shape", "0.005"), "--shape 0.005: it must be 0.1 or more"),
        (("--shape", "inf"), "--shape inf: "),
        (("--lemons", "0.5", "--lemon-times", "inf"), "--lemon-times inf: "),
        (("--price", "inf"), "--price inf: "),
        (("--spread", "inf"), "--spread inf: "),
        (("--floating", "99999999999"), "at most 1,000,000 are simulated"),
        (("--refail", "0.5,1"), "--refail 0.5,1: a node that always fails again"),
        (("--refail", "0.5,0.1"), "--refail 0.5,0.1: the share within a week comes second"),
        (("--refail", "a,b"), "--refail a,b: 'a' is no number"),
        (("--switch", "0.9", "--path", "0.2"), "--switch, --process and --path are shares"),
        (("--layout", "tp=8,cp=7"), "--layout tp=8,cp=7: a group takes 56 GPUs"),
        (("--layout", ""), "--layout '': '' is not known"),
        (("--days", "-1"), "--days -1: it must be above 0"),
        (("--days", "-3.0"), "--days -3.0: it must be above 0"),
        (("--mttf", "-5h"), "--mttf -5h: it must be above 0"),
        (("--mttf=-5h",), "--mttf -5h: it must be above 0"),
        (("--work", "-3d"), "--work -3d: it must be above 0"),
        (("--save", "-3s"), "--save -3s: it must be 0 or more"),
        (("--lead", "-.5m"), "--lead -.5m: no time"),
        (("--repair", "-3h,1h"), "--repair -3h,1h: it must be 0 or more"),
        (("--mttf", "5"), "--mttf 5: without a unit; give 5s, 5m, 5h or 5d"),
        (("--bring-up", "10,5m,5m"), "--bring-up 10,5m,5m: 10 is without a unit"),
        (("--mttf", "5s"), "525,600 faults or warnings are to be expected"),
        (("--foreseen", "0.5", "--counting", "running"), "--foreseen"),
        (("--preset", "llama3", "--strategy", "covered"), "--strategy covered"),
        (("--preset", "benchmark-64", "--strategy", "tuned"), "leave --strategy out"),
        (("--preset", "ettr-table", "--plot", "x.png"), "--plot"),
        (("--rate", "3", "--mttf", "2h"), "--rate and --mttf"),
        (("--mttf", "0s"), "--mttf 0s: it must be above 0"),
        (("--days", "0"), "--days 0: it must be above 0"),
        (("--layout", "dpp"), "'dpp' is not known"),
        (("--layout", "hsdp=5"), "hsdp=5"),
        (("--strategy", "hope"), "--strategy hope"),
        (("--strategy", "migration", "--spares", "unlimited"), "--spares unlimited: the protocol core"),
        (("--spares", "-3"), "--spares"),
        (("--spares", "many"), "--spares many"),
        (("--sweep", "luck=1"), "--sweep luck=1"),
        (("--sweep", "gpus=64,x"), "--sweep gpus=64,x: 'x' is no number"),
        (("--sweep", "gpus=64,100.5"), "--sweep gpus=64,100.5: gpus=100.5: give a whole number"),
        (("--sweep", "rate=meta,-1"), "--sweep rate=meta,-1: rate=-1: it must be 0 or more"),
        (("--sweep", "spares=a,b"), "--sweep spares=a,b: 'a' is no number"),
        (("--sweep", "spares=meta"), "--sweep spares=meta: 'meta' is no number"),
        (("--sweep", ""), "--sweep '': give NAME"),
        (("--policy", "ranks_per_slot"), "KEY=VALUE"),
        (("--policy", "luck=1"), "--policy luck=1: 'luck' is not known"),
        (("--policy", "world_size=3"), "'world_size' is not known"),
        (("--policy", "ranks_per_slot=-1"), "--policy ranks_per_slot=-1: it must be 1 or more"),
        (("--policy", "ranks_per_slot=0"), "--policy ranks_per_slot=0: it must be 1 or more"),
        (("--policy", "restore_ms=-5"), "--policy restore_ms=-5: it must be 1 or more"),
        (("--policy", "spare_wait_ms=-5"), "--policy spare_wait_ms=-5: it must be 0 or more"),
        (("--policy", "refill=maybe"), "true or false"),
        (("--policy", "slot_faults=few"), "a whole number"),
        (("--phase", "detect"), "--phase detect"),
        (("--phase", "rest=3s"), "--phase rest=3s: 'rest' is not known"),
        (("--phase", "restore=-3s"), "--phase restore=-3s: it must be 0 or more"),
        (("--interval", "soon"), "--interval soon"),
        (("--bring-up", "1m,2m"), "--bring-up 1m,2m"),
        (("--repair", "3h,1h"), "--repair 3h,1h: the p90 comes second"),
        (("--refail", "2"), "--refail 2: it is a share"),
        (("--shape", "2", "--gap", "uniform"), "--shape"),
        (("--precision", "0"), "--precision 0: it must be above 0"),
        (("--retry", "1"), "--retry 1: from 0 to less than 1"),
        (("--runs", "0"), "--runs 0"),
        (("--seed", "-1"), "--seed -1"),
        (("--describe",), "--trace FILE"),
        (("--trace-nodes", "3"), "--trace-nodes"),
        (("--quick",), "--quick"),
        (("--trace", "no/such.csv"), "torchrelay: --trace no/such.csv: No such file or directory\n"),
        (("--ledger", "no/such.jsonl"), "torchrelay: --ledger no/such.jsonl: No such file or directory\n"),
        (("--plot", "x.txt"), ".png"),
        (("--plot", "no/such/x.png"), "no folder"),
        (("--preset", "llama3", "--gpus", "64"), "leave --gpus out"),
        (("--displaced", "3"), "--displaced 3: it is a share"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else words,
)
def test_bad_input_is_named_in_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str) -> None:
    code, out, err = said(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("torchrelay: ")
    assert err.count("\n") == 1
    assert named in err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--rate", "mta"), "'mta' is no number and no published rate: did you mean 'meta'?"),
        (("--gpus", "10.5"), "'10.5' is no whole number"),
        (("--days", "-3d"), "'-3d' is no number: give days, as in 1.5"),
        (("--luck", "-5h"), "unrecognized arguments"),
    ],
)
def test_what_is_no_number_is_quoted(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str) -> None:
    code, out, err = said(capsys, *words)
    assert (code, out) == (2, "")
    assert named in err


@pytest.mark.parametrize("words", [("--policy", "moves_per_hour=-1"), ("--save", "0"), ("--lead", "0.5m")])
def test_what_looks_odd_and_makes_sense_is_taken(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert said(capsys, *SHORT, "--strategy", "migration", *words)[0] == 0


def test_a_bad_trace_is_named_with_its_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "faults.csv"
    path.write_text("start,end,node,cause\n1,9,a,GPU\n3,4,a,GPU\n")
    code, _, err = said(capsys, "--trace", str(path))
    assert code == 2
    assert f"--trace {path}, line 3: a fails while the repair that began in line 2 is not over" in err
