"""`torchrelay chaos`: what it plans, what it expects, whom it refuses, and that what it does is what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.jobs import SCRIPTS, end_job, start_job, torchrelay, wait_until
from torchrelay.client.client import Away, Client, Denied

# ---------------------------------------------------------------- a whole run


@pytest.mark.timeout(240)
def test_a_job_gets_over_what_its_owner_does_to_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    script = [str(SCRIPTS / "faulty.py"), "--steps", "250", "--pace", "0.1"]
    process = start_job(run_dir, script, ["--nproc-per-node", "2", "--spares", "1", "--slot-faults", "0"])

    def training() -> bool:
        try:
            job = Client.of(run_dir).job()
        except (Away, Denied):
            return False
        return (job.step or 0) >= 5 and job.spares.warm == 1

    def chaos(*words: str) -> tuple[int, str, str]:
        done = torchrelay("chaos", *words, "--run-dir", str(run_dir), timeout_s=120)
        return done.returncode, done.stdout, done.stderr

    wait_until("steps and a spare", training, deadline_s=60)
    code, out, _ = chaos("kill", "--rank", "1", "--dry-run")
    assert code == 0
    assert "expected: rank 1 goes to a warm spare" in out
    code, _, err = chaos("kill", "--rank", "1")
    assert (code, "add --yes" in err) == (2, True)
    assert not Client.of(run_dir).incidents()
    code, out, _ = chaos("kill", "--rank", "1", "--phase", "gate", "--yes", "-o", "json")
    told = json.loads(out)
    assert (code, told["resolved"], told["incidents"][0]["resolution"]) == (0, True, "clean"), out
    assert "in phase gate" in told["did"]
    wait_until("a spare", training, deadline_s=60)
    code, out, _ = chaos("any", "--repeat", "2", "--every", "1s", "--seed", "3", "--yes")
    assert code == 0, out
    code, out, _ = chaos("partition", "--node", "node-0", "--for", "1s", "--yes", "--no-wait")
    assert code == 0, out
    code, out, _ = chaos("orchestrator", "--yes")
    assert code == 0, out
    audit = torchrelay("audit", "--run-dir", str(run_dir), "-o", "json").stdout
    assert audit.count("chaos orchestrator") == 1, audit
    lines = [json.loads(line) for line in (run_dir / "chaos.jsonl").read_text().splitlines()]
    assert [line["deed"] for line in lines][0::3] == ["kill", "partition"]
    done = end_job(process, run_dir, timeout_s=120)
    assert done.code == 0, done.output[-3000:]
    assert all(row["resolution"] == "clean" for row in done.incidents())
    code, _, err = chaos("kill", "--rank", "0", "--yes")
    assert (code, "has ended" in err) == (2, True)
