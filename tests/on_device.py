"""What scripts keep on an accelerator, with ranks killed and moved: a job for each kind of `tests/cases/on-device`.

python -m tests.on_device                       all kinds, on the GPU if there is one, else on the CPU
python -m tests.on_device --kinds total,window --jobs 4 --out FOLDER

Each job is compared with plain PyTorch's ranks on the same device, to the bit. Exit code 1: some job has
failed, hung, or come to other bits. With --out what each job printed is kept there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.cases import running
from torchrelay.terminal.show import table

SCRIPT = running.CASES / "on-device" / "train.py"
STRIKES = "grad:12:1,after:20:0"
SAID = 110  # characters of a reason in the table


def kinds() -> list[str]:
    """As the script has them."""
    listed = re.search(r"^KINDS = \{(.*?)^\}", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    assert listed, f"{SCRIPT} has no KINDS"
    return re.findall(r'"([a-z]+)":', listed[1])


def run(kind: str) -> tuple[str, str, int | None, float, str, str]:
    """One job: its kind, what became of it, its exit code, seconds, the reason, and all that it printed."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torchrelay-device-") as folder:
        try:
            verdict = running.disturbed(Path(folder), "on-device", mode=kind, strike=STRIKES)
        except AssertionError as error:
            return kind, "NOT RUN", None, time.monotonic() - begun, str(error).splitlines()[0], str(error)
    took = time.monotonic() - begun
    why = verdict.why if verdict.fate is not running.Fate.EQUAL else ""
    return kind, str(verdict.fate), verdict.ran.code, took, why, f"{verdict}\n{verdict.ran.output[-12_000:]}"


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(kinds()), help="of the script's KINDS, by commas (all)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at a time (1)")
    parser.add_argument("--out", type=Path, help="where KIND.log and device.json go")
    options = parser.parse_args(words)
    asked = options.kinds.split(",")
    if unknown := set(asked) - set(kinds()):
        parser.error(f"--kinds: there is no {', '.join(sorted(unknown))}: name some of {', '.join(kinds())}")
    with ProcessPoolExecutor(options.jobs) as pool:
        rows = []
        for row in pool.map(run, asked):
            rows.append(row)
            print(f"{row[0]:10} {row[1]:12} {row[3]:6.1f} s  {row[4][:SAID]}", file=sys.stderr, flush=True)
    named = [dict(zip(("kind", "fate", "code", "seconds", "why"), row[:5], strict=True)) for row in rows]
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "device.json").write_text(json.dumps(named, indent=1))
        (options.out / "device.log").write_text("\n".join(f"==== {row[0]}\n{row[5]}" for row in rows))
    print(table(["kind", "fate", "reason"], [[row[0], row[1], row[4][:SAID]] for row in rows]))
    good = {*map(str, running.GOOD)}
    return 0 if all(row[1] in good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
