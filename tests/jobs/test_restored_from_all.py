"""On real processes: a killed rank's large state comes from all its replicas, and leaves no trace in the bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, differences, run_job, torchrelay
from tests.support.twins import undisturbed

pytestmark = pytest.mark.timeout(300)

STEPS = 8
KILLS = [
    {"id": "one", "ranks": [1], "step": 2, "phase": "backward", "how": "kill"},
    {"id": "two", "ranks": [2], "step": 5, "phase": "gate", "how": "kill"},  # whose sources include a restored one
    {"id": "three", "ranks": [3], "step": 6, "phase": "backward", "how": "kill"},
]


def test_a_large_state_comes_from_several_replicas_and_leaves_no_trace(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(KILLS))
    script = [str(SCRIPTS / "faulty.py"), "--steps", str(STEPS), "--ballast", "96"]
    flags, sent = ["--nproc-per-node", "4"], {"TORCHRELAY_NEIGHBOURS": "0"}
    calm = undisturbed(script)
    marks = ["--plan", str(plan), "--marks", str(tmp_path)]
    done = run_job(tmp_path / "disturbed", [*script, *marks], [*flags, "--spares", "3"], sent)
    assert done.code == 0, done.output[-2000:]
    assert differences(done, calm) == []
    lines = done.incidents()
    assert [line["resolution"] for line in lines] == ["clean"] * 3
    # Once a source may be so late that another one brings it all; not whenever one of them was restored itself.
    assert any(len(line["shares"]) > 1 for line in lines[1:])
    for line, killed in zip(lines, (1, 2, 3), strict=True):
        shares = {int(rank): share for rank, share in line["shares"].items()}
        assert killed not in shares
        assert sum(shares.values()) > 96 << 20
        told = torchrelay("explain", line["id"], "--run-dir", str(done.run_dir)).stdout
        assert all(f"{rank} ({share / sum(shares.values()):.0%})" in told for rank, share in shares.items()), told
