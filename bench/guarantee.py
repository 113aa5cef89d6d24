"""Guarantee: at least 140 incidents of mixed kinds in one soak of real processes, and the clean ratio by the ledger.

    make bench NAME=guarantee
    make bench NAME=guarantee ARGS="--seed 7 --incidents 300 --out soak"

4 ranks on two virtual nodes, a node of two warm spares; jobs one after the other, layouts in turn. Killed in each
phase of a step, stopped, raising, out of memory; a second fault during a recovery or a move; a node lost; taints, moves
and drains; ranks killed while the orchestrator or their agent is away. Each job is then compared with the same training
undisturbed, in the bits of all that it depends on, at every point, on every rank.

incidents         interruptions in the ledgers; eligible: those that count; clean: of these
clean_ratio_low   Wilson's lower bound at 95 % confidence; clean_ratio_worst_low: with every exclusion counted as lost
steps_lost        committed steps that were made again
pause_p50_ms, pause_max_ms   from the fault until all trained again, or of a move from the first rank that stood
kinds             by what was dealt: how many count, how many are clean
bit_equal         1: no job differs from its twin anywhere
samples_once      1: no rank stood at a point twice with different positions, counts of samples, or random states
violations        whatever else was not as it must be; without_interruption: agents and orchestrators killed in vain

Exit code 1: the lower bound is not above --target, or something was wrong. Ledgers are kept in --out, for
`torchrelay report --guarantee --ledger OUT/*.jsonl`.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from figures import finish, progress

sys.path.append(str(Path(__file__).parent.parent))  # the jobs, the strikes and the twins are the tests'

from tests.support.live import Twin
from tests.support.mixed import LAYOUTS, Chapter, by_kind, compare, deal, repeated, run_chapter
from torchrelay.cli.view.guarantee import guarantee_page
from torchrelay.goodput.ledger import Guarantee, RatioPart, guarantee

PER_JOB = 70  # interruptions: a job of twice as many steps would need a twin of twice as many
MOST_BROKEN = 3  # jobs that did not come to their end, after which no further one is begun


def soak(work: Path, options: argparse.Namespace) -> list[Chapter]:
    """Jobs one after the other until enough interruptions count."""
    cards = deal(options.seed)
    chapters: list[Chapter] = []
    begin = time.monotonic()
    while (counted := count(chapters)) < options.incidents:
        if sum(chapter.done is None for chapter in chapters) >= MOST_BROKEN:
            break
        layout = options.layout[len(chapters) % len(options.layout)]

        def tell(text: str, counted: int = counted) -> None:
            minutes = (time.monotonic() - begin) / 60
            progress(f"{minutes:4.1f} min, {counted} counted in earlier jobs; {text}")

        wanted = min(options.per_job, options.incidents - counted)
        chapters.append(run_chapter(work, len(chapters), layout, cards, wanted, tell))
        for text in chapters[-1].wrong:
            print(f"\n{text}", file=sys.stderr)
    return chapters


def count(chapters: list[Chapter]) -> int:
    return sum(counted for counted, _ in by_kind(chapters).values())


def figures_of(chapters: list[Chapter], found: Guarantee, differ: list[str]) -> dict[str, object]:
    pauses = [one.pause_ms for one in found.findings if one.pause_ms is not None]
    done = [chapter.done for chapter in chapters]
    twice = [text for one in done if one is not None for text in repeated(one)]
    acts = sum(sum(chapter.acts.values()) for chapter in chapters)
    vain = sum(chapter.acts[name] for chapter in chapters for name in ("agent killed", "orchestrator killed"))
    return {
        "incidents": len(found.findings),
        "eligible": found.counted,
        "clean": found.clean,
        "clean_ratio": None if found.ratio is None else found.ratio.share,
        "clean_ratio_low": None if found.ratio is None else found.ratio.low,
        "clean_ratio_worst_low": None if found.worst is None else found.worst.low,
        "excluded": len(found.those(RatioPart.EXCLUDED)),
        "steps_lost": sum(one.steps_lost or 0 for one in found.findings),
        "steps_lost_unknown": sum(one.steps_lost is None for one in found.findings),
        "pause_p50_ms": median(pauses) if pauses else None,
        "pause_max_ms": max(pauses, default=None),
        "acts": acts,
        "without_interruption": vain,
        "jobs": len(chapters),
        "steps": sum(chapter.steps for chapter in chapters),
        "points_compared": sum(len(one.digests) for one in done if one is not None),
        "bit_equal": int(not differ),
        "samples_once": int(not twice and not differ),
        "violations": len(differ) + sum(len(chapter.wrong) for chapter in chapters),
        "kinds": by_kind(chapters),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--incidents", type=int, default=140, help="interruptions that count, at least (140)")
    parser.add_argument("--per-job", type=int, default=PER_JOB, help=f"of these in one job ({PER_JOB})")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule (1)")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="this one alone; may be given again")
    parser.add_argument("--target", type=float, default=0.9, help="what the lower bound is to be above (0.9)")
    parser.add_argument("--out", type=Path, help="a folder for the ledgers (they are not kept)")
    options = parser.parse_args()
    options.layout = options.layout or list(LAYOUTS)
    if options.incidents < 1 or options.per_job < 1:
        parser.error("--incidents and --per-job: at least 1")
    if not 0 < options.target < 1:
        parser.error("--target: a share between 0 and 1")
    return options


def main() -> int:
    options = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # jobs do not outlive us
    work = Path(tempfile.mkdtemp(prefix="torchrelay-bench-"))
    fine = False
    try:
        begin = time.monotonic()
        chapters = soak(work, options)
        found = guarantee([entry for chapter in chapters for entry in chapter.entries], options.target)
        soaked_s = time.monotonic() - begin
        progress("the undisturbed twins")
        twins = {layout: Twin(layout) for layout in options.layout}
        differ = compare(chapters, twins)
        keep_ledgers(chapters, options.out)
        print(f"\n{guarantee_page(found)}\n")
        wrong = [text for chapter in chapters for text in chapter.wrong] + differ
        print("".join(f"wrong: {text[:500]}\n" for text in wrong), end="")
        figures = figures_of(chapters, found, differ) | {"soak_s": round(soaked_s, 1)}
        finish("guarantee", figures, seed=options.seed, layouts=options.layout, target=options.target)
        fine = not wrong and found.ratio is not None and found.ratio.low > options.target
    finally:
        if fine:
            shutil.rmtree(work, ignore_errors=True)
        else:
            print(f"what the jobs have left is in {work}", file=sys.stderr)
    return 0 if fine else 1


def keep_ledgers(chapters: list[Chapter], out: Path | None) -> None:
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    for chapter in chapters:
        for path in chapter.run_dir.parent.glob("ledger-*.jsonl"):
            shutil.copy(path, out)


if __name__ == "__main__":
    sys.exit(main())
