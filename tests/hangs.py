"""One rank hangs in a layout of several groups, on real processes: who is found, after how long, and the bits.

python -m tests.hangs --layout tp-hsdp --ranks 8 --how spin

A main thread that spins may be compiling, and is given two minutes: too long for `make test`, which lets one sleep.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.support.jobs import SCRIPTS, differences, run_job

PATIENCE_S = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="hsdp", help="of tests/scripts/layouts.py")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", type=int, default=2, help="which of them hangs")
    parser.add_argument("--how", choices=("spin", "stick"), default="spin")
    parser.add_argument("--phase", choices=("forward", "backward"), default="forward")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="torchrelay-hang-") as folder:
        work = Path(folder)
        plan = work / "plan.json"
        fault = {"id": "one", "ranks": [options.rank], "step": 4, "phase": options.phase, "how": options.how}
        plan.write_text(json.dumps([fault]))
        script = [str(SCRIPTS / "faulty.py"), "--layout", options.layout, "--steps", "9", "--marks", folder]
        flags = ["--nproc-per-node", str(options.ranks)]
        calm = run_job(work / "calm", script, flags)
        done = run_job(work / "run", [*script, "--plan", str(plan)], [*flags, "--spares", "1"], timeout_s=PATIENCE_S)
        incidents, wrong = done.incidents(), differences(done, calm)
    for row in incidents:
        print(f"ranks {row['ranks']}, {row['resolution']}, {row['pause_ms'] / 1000:.1f} s: {row['cause']}")
    print("\n".join(wrong[:10]) or f"bit-equal at {len(calm.digests)} points", f"exit code {done.code}", sep=", ")
    fine = done.code == 0 and not wrong and [row["ranks"] for row in incidents] == [[options.rank]]
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
