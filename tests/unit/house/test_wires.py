"""The pretended machines themselves, and how a time line is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import wires as module
from tests.support.streams import BIN_S, Timeline
from tests.support.wires import obstacle


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for tool in ("unshare", "nsenter", "ip", "tc", "ss"):
        (tmp_path / tool).symlink_to("/bin/true")
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    module.obstacle.cache_clear()
    try:
        assert obstacle() == "`nft` is not here: install nftables"
    finally:
        module.obstacle.cache_clear()


# ---------------------------------------------------------------- the time line


def timeline(path: Path, *lines: dict[str, Any]) -> Timeline:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Timeline(path).refresh()


def steady(begin: float, bins: int, each: int) -> list[dict[str, Any]]:
    return [{"what": "rate", "t": begin + one * BIN_S, "bytes": each} for one in range(bins)]


def test_a_rate_counts_the_bins_without_a_line(tmp_path: Path) -> None:
    line = timeline(tmp_path / "line", *steady(10.0, 20, 6_250_000), *steady(12.0, 20, 6_250_000))
    assert line.gbps(10.0, 11.0) == pytest.approx(1.0)
    assert line.gbps(11.0, 12.0) == 0.0
    assert line.gbps(10.0, 13.0) == pytest.approx(2 / 3)
    assert line.seconds() == pytest.approx(3.0)


def test_a_stall_is_the_longest_gap_that_touches_the_time(tmp_path: Path) -> None:
    gaps = [{"what": "gap", "from": 1.0, "to": 1.5}, {"what": "gap", "from": 3.0, "to": 3.2}]
    line = timeline(tmp_path / "line", *steady(0.0, 100, 1), *gaps)
    assert line.stall_ms(1.4, 4.0) == 500.0
    assert line.stall_ms(2.0, 4.0) == 200.0
    assert line.stall_ms(4.0, 5.0) == 10.0
    assert line.resumed(3.1) == pytest.approx(0.1)
    assert line.resumed(2.0) == 0.0


def test_full_again_waits_for_a_rate_that_holds(tmp_path: Path) -> None:
    path = tmp_path / "line"
    line = timeline(path, *steady(0.0, 4, 100), *steady(0.3, 1, 6_250_000), *steady(0.6, 5, 6_250_000))
    assert line.full_again(0.2, 0.99) is None
    with path.open("a") as file:
        file.write("".join(json.dumps(one) + "\n" for one in steady(0.85, 10, 6_250_000)))
    assert line.refresh().full_again(0.2, 0.99) == pytest.approx(0.4)


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    path = tmp_path / "line"
    path.write_text('{"what": "error", "te')
    line = Timeline(path).refresh()
    assert line.errors == []
    with path.open("a") as file:
        file.write('xt": "broken"}\n')
    assert line.refresh().errors == ["broken"]
