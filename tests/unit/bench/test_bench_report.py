"""The report of the bench `compare`, and its flat figures: what they say must be true of whatever came out."""

from __future__ import annotations

import msgspec
import pytest

from compare_figures import figures
from compare_report import words_of
from compare_results import Outcome, flat_of, over_bound, record, spent
from tests.support.bench_compare import PLAIN, RANKS, dated, fewer, left, restarted, with_ledger
from tests.support.bench_report import outcome_of, run_of


def test_the_bound_is_a_second_for_each_fault_beyond_the_mean_of_both_undisturbed_runs() -> None:
    ours = outcome_of("torchrelay-spares", restarted())
    run = run_of(ours)
    assert run.undisturbed_s == pytest.approx(4.0)
    assert over_bound(run, ours) == pytest.approx(7.3 / 5.0)
    assert flat_of(run)["gpt_torchrelay_spares_over_bound"] == over_bound(run, ours)
    assert "**not held**" in words_of([run], {"cpu": "some"}, "", {"gpt": []})


def test_the_time_beyond_is_split_without_a_remainder() -> None:
    ours = outcome_of("restart-naive", restarted())
    parts = spent(run_of(ours), ours)
    assert parts is not None
    beyond = parts.pop("beyond the undisturbed")
    assert beyond == pytest.approx(3.3) == pytest.approx(sum(parts.values()))
    assert parts["stood"] == pytest.approx(3.0)
    assert parts["steps done again"] == pytest.approx(0.4)


def test_a_refused_step_is_in_the_pause_alone() -> None:
    one = outcome_of("torchft-b", fewer())
    parts = spent(run_of(one), one)
    assert parts is not None
    assert parts["stood"] == pytest.approx(1.0)
    assert parts["steps done again"] == 0


def test_what_is_said_of_plain_pytorch_is_what_it_did() -> None:
    run = run_of()
    row = "| plain PyTorch, no faults | 4.0 | 4.0 | 100 % | 0 | 0 | 100.00 % | 0.00 % | "
    assert run.again is not None
    other = msgspec.structs.replace(run, again=msgspec.structs.replace(run.again, digest="other"))
    assert f"{row}yes |" in words_of([run], {"cpu": "some"}, "", {"gpt": []})
    assert f"{row}no |" in words_of([other], {"cpu": "some"}, "", {"gpt": []})
    once = msgspec.structs.replace(run, again=None)
    page = words_of([once], {"cpu": "some"}, "", {"gpt": []})
    assert "3.9 s first, it did not come to its end a second time" in page
    assert flat_of(once)["gpt_drift"] is None


def test_who_was_left_out_and_who_met_other_faults_is_named() -> None:
    world = restarted()
    world.struck[0] = msgspec.structs.replace(world.struck[0], ranks=(3,))
    run = msgspec.structs.replace(run_of(outcome_of("nvrx-tuned", world)), left_out=["TorchFT, timeouts C"])
    page = words_of([run], {"cpu": "some"}, "--only nvrx-tuned", {"gpt": []})
    assert "- TorchFT, timeouts C: left out by the flags above" in page
    assert "- nvrx-tuned: the kill at step 20 hit 3" in page


def test_a_rival_that_cannot_run_says_why_and_the_rest_is_reported() -> None:
    gone = Outcome(name="nvrx-tuned", title="NVRx", reason="no wheel for this Python")
    ours = outcome_of("torchrelay-spares", restarted())
    run = run_of(gone, ours)
    assert flat_of(run)["gpt_nvrx_tuned_reason"] == "no wheel for this Python"
    assert flat_of(run)["gpt_torchrelay_spares_lost_steps"] == 4
    page = words_of([run], {"cpu": "some"}, "--quick", {"gpt": []})
    assert "- NVRx: no wheel for this Python" in page
    assert 'make bench NAME=compare ARGS="--quick"' in page


def test_each_try_that_came_to_no_end_is_told() -> None:
    whole = msgspec.structs.replace(outcome_of("nvrx-default", restarted()), title="A, second try", before="code 1")
    gone = Outcome(name="nvrx-tuned", title="B, second try", reason="code 3", before="code 2")
    run = run_of(whole, gone)
    page = words_of([run], {"cpu": "some"}, "", {"gpt": []})
    assert "- A, second try: came to its end; its figures are of this try. The first: code 1" in page
    assert "- B, second try: code 3; its figures are of this try. The first: code 2" in page
    assert "| A, second try | 7.3 |" in page
    assert flat_of(run)["gpt_nvrx_default_reason_before"] == "code 1"
    assert record(run)["outcomes"][0]["before"] == "code 1"


def test_the_report_says_where_another_is_better() -> None:
    ours, other = outcome_of("torchrelay-spares", restarted()), outcome_of("torchft-b", fewer(), "other")
    page = words_of([run_of(other, ours)], {"cpu": "some"}, "", {"gpt": []})
    lost = page.partition("### Where torchrelay loses")[2].partition("###")[0]
    assert "steps lost: torchrelay-spares 4 steps; torchft-b 1" in lost
    assert "time to the last step: torchrelay-spares 7.30 s; torchft-b 4.90" in lost
    assert "pause after an unplanned fault, median: torchrelay-spares 3.00 s; torchft-b 1.00" in lost
    alone = words_of([run_of(ours)], {"cpu": "some"}, "", {"gpt": []})
    assert "- in none of what is measured here" in alone


def test_who_was_ended_has_not_done_the_job_whatever_its_fastest_rank_did() -> None:
    seen = msgspec.structs.replace(restarted().seen(), reason="ended with code 90 after step 40 of 40")
    found = figures(seen, PLAIN)
    assert found.jct_s is found.jct_samples_s is found.ettr is found.once_share is None
    page = words_of(
        [run_of(Outcome(name="torchrelay-spares", title="ours", reason=seen.reason, seen=seen, figures=found))],
        {"cpu": "some"},
        "",
        {"gpt": []},
    )
    assert "- ours: **not held**: not to the end: ended with code 90" in page
    lost = page.partition("### Where torchrelay loses")[2].partition("###")[0]
    assert "- ours: not to the end: ended with code 90" in lost


def test_a_rank_that_was_asked_to_leave_and_stayed_is_no_fault_that_was_survived() -> None:
    seen = left().seen()
    kill = dated(seen.struck[1].at_ns, detect=3)
    found = figures(with_ledger(seen, kill), PLAIN)
    assert (found.faults, found.idle_faults, found.planned_pause_p50_s) == (1, 1, None)
    both = figures(with_ledger(seen, dated(seen.struck[0].at_ns + 10**8, stand=3), kill), PLAIN)
    assert (both.faults, both.idle_faults) == (2, 0)
    assert both.planned_pause_p50_s == pytest.approx(0.5)
    assert figures(seen, PLAIN).idle_faults == 0, "who keeps no ledger is not judged by one"
    ours = Outcome(name="torchrelay-shrink", title="ours", seen=with_ledger(seen, kill), figures=found)
    run = run_of(ours)
    assert over_bound(run, ours) == pytest.approx(found.jct_s / 5.0 if found.jct_s else 0)
    page = words_of([run], {"cpu": "some"}, "", {"gpt": []})
    assert "- ours: 1 x a rank was asked to leave and stayed" in page
    assert "- leave, ours, 0 of 1: not known" in page


def test_the_record_has_each_pause_and_the_phases_of_each_kind_of_fault() -> None:
    one = outcome_of("restart-naive", restarted())
    (kept,) = msgspec.json.decode(msgspec.json.encode(record(run_of(one))))["outcomes"]
    assert kept["pauses_s"] == [pytest.approx(3.0)]
    assert kept["digests"] == ["same"] * RANKS
    assert kept["phases_p50"]["kill"]["start and import"] == kept["phases_max"]["kill"]["start and import"] == 2.0
    assert kept["phases_p50"]["stop"] == {}


def test_what_is_not_known_is_not_shown_as_a_number() -> None:
    world = restarted()
    world.lines = {
        rank: [msgspec.structs.replace(row, together=3) for row in rows] for rank, rows in world.lines.items()
    }
    assert "nan" not in words_of([run_of(outcome_of("torchft-b", world))], {"cpu": "some"}, "", {"gpt": []})
