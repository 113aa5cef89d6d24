"""Forecast, traces: read, refused with the line, described, replayed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from torchrelay.economics.formulas.rates import Unreasonable
from torchrelay.forecast.inputs.describe import describe
from torchrelay.forecast.inputs.faults import Cause
from torchrelay.forecast.inputs.settings import Settings, Strategy
from torchrelay.forecast.inputs.trace import BadTrace, read_trace, replay
from torchrelay.forecast.results import simulate

HEAD = "start,end,node,cause\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "faults.csv"
    path.write_text(text)
    return path


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, HEAD + "5,8,b,NIC\n1,2.5,a,GPU\n\n9,,a,GPU\n"))
    assert [(one.start_h, one.node, one.line) for one in trace.entries] == [(1, "a", 3), (5, "b", 2), (9, "a", 5)]
    assert trace.nodes == ("a", "b")
    assert trace.span_h == 9
    assert trace.entries[2].end_h == float("inf")


def test_dates_count_from_the_first_fault_and_columns_have_any_order(tmp_path: Path) -> None:
    first, second = "GPU,a,2026-03-01T13:00:00,2026-03-01T12:00:00", "GPU,b,2026-03-01 18:00,2026-03-01T15:00:00Z"
    text = f"cause,node,end,start\n{first}\n{second}\n"
    trace = read_trace(written(tmp_path, text))
    assert [(one.start_h, one.end_h) for one in trace.entries] == [(0, 1), (3, 6)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        (HEAD, "no fault in it"),
        ("start,end,node,reason\n1,2,a,x\n", "line 1: unknown column 'reason'"),
        ("start,end,node\n1,2,a\n", "line 1: no column 'cause'"),
        ("start,end,node,cause,cause\n1,2,a,x,x\n", "line 1: a column twice"),
        (HEAD + "1,2,a,x\n3,4,a\n", "line 3: has 3 cells"),
        (HEAD + "1,2,a,x\nsoon,4,a,x\n", "line 3: start 'soon' is no time"),
        (HEAD + "nan,4,a,x\n", "line 2: start 'nan' is no time"),
        (HEAD + "1,inf,a,x\n", "line 2: end 'inf' is no time"),
        (HEAD + "5,4,a,x\n", "line 2: the repair of a ends"),
        (HEAD + "1,2,,x\n", "line 2: names no node"),
        (HEAD + "2026-01-01,2026-01-01,a,x\n", "line 2: this and all other faults"),
        (HEAD + "1,9,a,x\n2,3,b,x\n4,5,a,x\n", "line 4: a fails while the repair that began in line 2"),
        (HEAD + "1,,a,x\n4,5,a,x\n", "line 3: a fails while the repair that began in line 2"),
        (HEAD + "-5,4,a,x\n", "line 2: start '-5' lies before the beginning"),
        (HEAD + "1,2,a,x\n1,-2,b,x\n", "line 3: end '-2' lies before the beginning"),
        ("start;end;node;cause\n1;2;a;x\n", "line 1: 'start;end;node;cause' is one column: commas must be"),
        (HEAD + "1,2,a,x\n2026-01-01,2026-01-02,a,x\n", "line 2: counts hours, and line 3 has a date"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(BadTrace, match=r"faults\.csv") as error:
        read_trace(written(tmp_path, text))
    assert said in str(error.value)


def test_a_trace_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match=r"none\.csv: No such file or directory$"):
        read_trace(tmp_path / "none.csv")
    for binary in (b"\xff\xfe\x00start", b"start,end\x00\x01"):
        (tmp_path / "faults.csv").write_bytes(binary)
        with pytest.raises(BadTrace, match=r"faults\.csv: is no text file: give a CSV"):
            read_trace(tmp_path / "faults.csv")


def test_what_a_trace_says_is_counted(tmp_path: Path) -> None:
    text = HEAD + "0,10,a,GPU\n0.02,30,b,GPU\n20,40,a,NIC\n600,601,c,GPU\n"
    found = describe(read_trace(written(tmp_path, text)), 10)
    assert (found.faults, found.nodes, found.never_failed, found.worst_node) == (4, 10, 7, 2)
    assert found.rate == pytest.approx(4 / (10 * 601 / 24) * 1000)
    assert found.in_burst == pytest.approx(0.25)
    assert found.largest_burst == 2
    # Three repairs were watched for a week; a failed again after 10 hours.
    assert found.refail_day == pytest.approx(1 / 3)
    assert found.causes == {"GPU": 3, "NIC": 1}
    # Two are down from 0.02 to 10 and from 20 to 30: for 3.3 % of the time.
    assert (found.down_p50, found.down_p95, found.down_p99) == (0, 1, 2)
    assert found.spares_99 == pytest.approx(0.2)
    assert found.weibull_shape is None, "three gaps say nothing"


def test_fewer_nodes_than_are_named_are_refused(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, HEAD + "1,2,a,x\n1,2,b,x\n"))
    with pytest.raises(Unreasonable, match="names 2"):
        describe(trace, 1)
    with pytest.raises(BadTrace, match="names 2 nodes, and the cluster has 1"):
        list(replay(trace, 1, Path("faults.csv")))


@pytest.mark.parametrize("shape", [0.62, 1.0])
def test_a_made_up_trace_has_the_parameters_it_was_made_with(tmp_path: Path, shape: float) -> None:
    chance = np.random.default_rng(2)
    starts = np.cumsum(chance.weibull(shape, 3000) * 4)
    repairs = np.exp(np.log(2) + chance.standard_normal(3000) * 0.5)
    free, rows = dict.fromkeys(range(400), 0.0), []
    for start, repair in zip(starts, repairs, strict=True):
        node = int(chance.integers(400))
        if start >= free[node]:
            free[node] = start + repair
            rows.append(f"{start},{start + repair},n{node},x")
    found = describe(read_trace(written(tmp_path, HEAD + "\n".join(rows))))
    assert found.weibull_shape == pytest.approx(shape, abs=0.04)
    assert found.repair_median_h == pytest.approx(2, rel=0.05)
    assert found.dispersion == pytest.approx(1, abs=0.25), "all nodes are alike"


def test_a_replayed_trace_strikes_as_it_says(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD + "10,20,a,GPU\n30,31,a,process\n50,51,b,switch\n")
    trace = read_trace(path)
    assert [fault.cause for fault in replay(trace, 4, path)] == [Cause.NODE, Cause.PROCESS, Cause.SWITCH]
    for strategy in (Strategy.RESTART, Strategy.MIGRATION):
        got = simulate(Settings(gpus=32, hours=100, trace=trace, strategy=strategy), 0)
        # When a fails again it is a spare.
        assert (got.faults, got.interruptions) == (3, 2), strategy
