"""What tests of sharing for real share."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.jobs import SCRIPTS, start_job, torchrelay, wait_until
from tests.support.twins import undisturbed
from torchrelay.api.shown import JobStatus, RankStatus
from torchrelay.client.client import Away, Client, Denied

FLAGS = ["--nodes", "2", "--nproc-per-node", "2", "--oversubscribe", "2", "--slot-faults", "0"]


class Job:
    """A job of 4 ranks on 2 nodes of 2 slots, without a spare."""

    def __init__(self, folder: Path, layout: str, steps: int) -> None:
        script = [str(SCRIPTS / "faulty.py"), "--layout", layout, "--steps", str(steps)]
        self.calm = undisturbed(script)
        self.run_dir = folder / "run"
        self.process: subprocess.Popen[str] = start_job(self.run_dir, [*script, "--pace", "0.1"], FLAGS)

    def look(self) -> JobStatus | None:
        assert self.process.poll() is None, (self.run_dir.parent / "run.out").read_text()[-3000:]
        try:
            return Client.of(self.run_dir).job()
        except (Away, Denied):
            return None

    def until(self, sharing: int, steps: int = 5) -> JobStatus:
        """Wait until so many ranks share slots, and have trained together for some steps."""
        seen: list[JobStatus] = []

        def holds() -> bool:
            job = self.look()
            if job is None or job.phase != "running" or job.move is not None or len(job.sharing) != sharing:
                seen.clear()
                return False
            seen.append(job)
            return (job.step or 0) >= (seen[0].step or 0) + steps

        wait_until(f"{sharing} that share slots", holds, deadline_s=120)
        return seen[-1]

    def ranks(self) -> dict[int, RankStatus]:
        return {row.rank: row for row in Client.of(self.run_dir).view_ranks().ranks if row.rank is not None}

    def say(self, *words: str) -> None:
        done = torchrelay(*words, "--yes", "--run-dir", str(self.run_dir))
        assert done.returncode == 0, done.stderr
