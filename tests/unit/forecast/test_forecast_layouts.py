"""Forecast, layouts and phases: which node holds what, and how long a recovery takes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.ledger_lines import line
from torchrelay.economics.formulas.rates import Unreasonable
from torchrelay.forecast.inputs.layouts import layout_of
from torchrelay.forecast.inputs.phases import Phases, Span, phases_of_ledger
from torchrelay.protocol.model.incident import Resolution


@pytest.mark.parametrize(
    ("text", "gpus", "replicas"),
    [
        ("ddp", 1024, 128),
        ("fsdp", 1024, 1),
        ("hsdp=4", 1024, 4),
        ("hsdp=128", 1024, 128),
        ("tp=8", 1024, 128),
        ("tp=8,pp=4", 1024, 32),
        ("tp=8,pp=4,hsdp=2", 1024, 2),
        ("tp=8,pp=16,fsdp", 1024, 1),
        ("tp=16", 1024, 64),
    ],
)
def test_copies_are_counted_by_node(text: str, gpus: int, replicas: int) -> None:
    assert layout_of(text, gpus).replicas == replicas


@pytest.mark.parametrize(
    ("text", "gpus", "said"),
    [
        ("ddp", 1023, "gpus is 1023"),
        ("ddp", 0, "gpus is 0"),
        ("dpp", 64, "'dpp' is not known"),
        ("hsdp", 64, "'hsdp' is not known"),
        ("fsdp=2", 64, "'fsdp=2' is not known"),
        ("hsdp=3", 64, "cannot be split into 3"),
        ("tp=7", 64, "a group takes 7 GPUs"),
        ("tp=8,cp=7", 1024, "a group takes 56 GPUs"),
        ("tp=8,tp=2", 64, "tp is there twice"),
        ("ddp,fsdp", 64, "exclude one another"),
        ("pp=0", 64, "'pp=0' is not known"),
    ],
)
def test_an_impossible_layout_is_refused_and_named(text: str, gpus: int, said: str) -> None:
    with pytest.raises(Unreasonable, match=said):
        layout_of(text, gpus)


@given(replicas=st.sampled_from([1, 2, 4, 8, 16]), lost=st.sets(st.integers(0, 15), min_size=1, max_size=6))
def test_a_layout_covers_a_loss_if_each_part_is_left_somewhere(replicas: int, lost: set[int]) -> None:
    layout = layout_of(f"hsdp={replicas}", 128)
    left = {layout.part(node) for node in range(16) if node not in lost}
    assert layout.covered(lost) == (left == set(range(layout.parts)))
    assert all(len(layout.peers(node)) == replicas for node in range(16))


# ---------------------------------------------------------------- phases


def test_given_phases_have_their_mean_and_spread() -> None:
    phases, chance = Phases({"restore": Span(60, 0.5)}), np.random.default_rng(0)
    spans = [phases.draw(chance)["restore"] for _ in range(20_000)]
    assert np.mean(spans) == pytest.approx(60, rel=0.02)
    assert np.std(spans) == pytest.approx(30, rel=0.05)
    assert phases.pause_s() == pytest.approx(120 - 40 + 60)


def test_an_unknown_phase_is_refused() -> None:
    with pytest.raises(Unreasonable, match="'rest' is not known; there are: detect"):
        Phases({"rest": Span(1)})


def test_phases_of_a_ledger_are_drawn_together(tmp_path: Path) -> None:
    short = msgspec.structs.replace(line(Resolution.CLEAN), phases={"detect": 100, "restore": 200})
    long = msgspec.structs.replace(line(Resolution.CLEAN), phases={"detect": 1000, "restore": 2000})
    ended = msgspec.structs.replace(line(Resolution.ENDED), phases={"detect": 9})
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"\n".join(msgspec.json.encode(one) for one in (short, long, ended)))
    phases, chance = phases_of_ledger(path, {"resume": Span(3, 0)}), np.random.default_rng(0)
    drawn = {
        (found["detect"], found["restore"], found["resume"], found["reconfigure"])
        for found in (phases.draw(chance) for _ in range(50))
    }
    assert drawn == {(0.1, 0.2, 3, 0), (1.0, 2.0, 3, 0)}
    assert "2 incidents" in phases.source


def test_phases_of_moves_are_of_moves(tmp_path: Path) -> None:
    """A failure has no cutover, so none may be drawn from it: it is assumed, until a move was measured."""
    failed = msgspec.structs.replace(line(Resolution.CLEAN), phases={"detect": 100, "reconfigure": 200})
    moved = msgspec.structs.replace(
        line(Resolution.CLEAN), kind="planned", phases={"stand": 7_000, "cutover": 8_000, "reconfigure": 900}
    )
    path, chance = tmp_path / "ledger.jsonl", np.random.default_rng(0)
    path.write_bytes(msgspec.json.encode(failed))
    phases = phases_of_ledger(path, {})
    drawn = [phases.draw(chance, move=True) for _ in range(2_000)]
    assert np.mean([one["stand"] for one in drawn]) == pytest.approx(5, rel=0.05)
    assert {one["reconfigure"] for one in drawn} == {0.2}
    assert "moves are assumed" in phases.source
    path.write_bytes(msgspec.json.encode(failed) + b"\n" + msgspec.json.encode(moved))
    phases = phases_of_ledger(path, {})
    found = phases.draw(chance, move=True)
    assert (found["stand"], found["cutover"], found["reconfigure"], found["detect"]) == (7, 8, 0.9, 0)
    assert phases.draw(chance)["reconfigure"] == 0.2
    assert "1 incidents as they were measured, 1 moves" in phases.source


@pytest.mark.parametrize(("text", "said"), [("", "nothing to draw from"), ("{}\n", "line 1"), ("x", "line 1")])
def test_a_bad_ledger_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        phases_of_ledger(path, {})
    with pytest.raises(ValueError, match=r"none: No such file or directory$"):
        phases_of_ledger(tmp_path / "none", {})
