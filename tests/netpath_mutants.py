"""Mutants of the network protocol: proto.c and silence.c of native/netpath/core with one rule broken.

Their tests have to notice.

python -m tests.netpath_mutants                 all; survivors are shown, and fail
python -m tests.netpath_mutants --jobs 2        two at a time
python -m tests.netpath_mutants --only "no ACK" those with this in their name
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.support.netpath_changes import CHANGES, EQUIVALENT, Change

NATIVE = Path(__file__).parent.parent / "native" / "netpath"
PROTOCOL = (NATIVE / "core" / "proto.c", NATIVE / "core" / "silence.c")
INCLUDES = (f"-I{NATIVE / 'core'}", f"-I{NATIVE}")
PLAIN = ("-std=c11", "-O1", "-w", *INCLUDES)
SANITIZED = ("-std=c11", "-O1", "-w", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *INCLUDES)
PROGRAMS = {
    "stories": ("proto_stories.c", "sending_stories.c", "hearing_stories.c", "two_sides.c"),
    "exhaustive": ("proto_exhaustive.c", "small_moves.c", "small_states.c"),
    "world": ("proto_world.c", "world.c", "world_ways.c", "world_bytes.c", "world_ends.c", "judge.c"),
    "frames": ("fuzz_frames.c",),
}
# The fastest come first.
KILLERS: tuple[tuple[str, ...], ...] = (
    ("stories",),
    ("exhaustive", "1", "0"),
    ("world", "0", "1500"),
    ("exhaustive", "2", "0"),
    ("frames", "1", "2"),
    ("world", "1500", "15000"),
)
CPU_S = 60  # a mutant that does not end is killed; a busy machine kills nobody


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant; `killer` is empty if it lives."""

    change: Change
    killer: str
    said: str


def sources() -> dict[str, str]:
    """The protocol's texts, by file."""
    return {path.name: path.read_text() for path in PROTOCOL}


def mutated(change: Change, texts: dict[str, str]) -> dict[str, str]:
    """The protocol's texts with the change. Raises ValueError if its place is not there just once in all of them."""
    found = {name: text.count(change.old) for name, text in texts.items()}
    if sum(found.values()) != 1:
        raise ValueError(f"{change.name}: its text is there {sum(found.values())} times, not once: {found}")
    return {name: text.replace(change.old, change.new) for name, text in texts.items()}


def flags_of(program: str) -> tuple[str, ...]:
    """Hostile frames are seen to do harm by the sanitizers only."""
    return SANITIZED if program == "frames" else PLAIN


def compile_parts(folder: Path) -> None:
    """What all mutants are linked with."""
    for program, files in PROGRAMS.items():
        for name in files:
            target = folder / f"{program}-{name}.o"
            command = ["cc", *flags_of(program), "-c", "-o", str(target), str(NATIVE / "tests" / name)]
            subprocess.run(command, check=True)


def link(program: str, parts: Path, folder: Path) -> Path:
    """A test program with the protocol of the folder."""
    objects = [str(parts / f"{program}-{name}.o") for name in PROGRAMS[program]]
    target = folder / program
    command = ["cc", *flags_of(program), "-o", str(target), *objects, *(str(folder / path.name) for path in PROTOCOL)]
    subprocess.run(command, check=True)
    return target


def killer_of(parts: Path, folder: Path) -> tuple[str, str]:
    """Who notices, and what it says first; two empty texts if nobody does."""
    made: dict[str, Path] = {}
    for killer in KILLERS:
        if killer[0] not in made:
            made[killer[0]] = link(killer[0], parts, folder)
        limited = ["sh", "-c", f'ulimit -t {CPU_S}; exec "$@"', "sh", str(made[killer[0]]), *killer[1:]]
        done = subprocess.run(limited, capture_output=True, text=True, errors="replace")
        if done.returncode < 0:
            return " ".join(killer), f"ended by signal {-done.returncode}"
        if done.returncode:
            said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip("= ")]
            return " ".join(killer), said[0] if said else f"exit status {done.returncode}"
    return "", ""


def meet(change: Change | None, parts: Path) -> Verdict:
    """Compile one mutant (None: the protocol as it is) in a folder of its own, and let all tests meet it."""
    change = change or Change("the protocol as it is", "", "")
    texts = mutated(change, sources()) if change.old else sources()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in texts.items():
            (folder / file).write_text(text)
        killer, said = killer_of(parts, folder)
    return Verdict(change, killer, said)


def meet_all(changes: list[Change], parts: Path, jobs: int) -> Iterator[Verdict]:
    """Verdicts, in order."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda change: meet(change, parts), changes)


def judge(verdicts: list[Verdict]) -> int:
    """Say who survived, and which equivalents are none."""
    killers = Counter(verdict.killer for verdict in verdicts if verdict.killer)
    for killer, times in killers.most_common():
        print(f"{times:6} killed by {killer}")
    alive = [verdict.change.name for verdict in verdicts if not verdict.killer]
    wrong = [name for name in alive if name not in EQUIVALENT]
    stale = [verdict.change.name for verdict in verdicts if verdict.killer and verdict.change.name in EQUIVALENT]
    for name in wrong:
        print(f"SURVIVED: {name}")
    for name in stale:
        print(f"listed as equivalent, and it is not: {name}")
    listed = len(alive) - len(wrong)
    print(f"{len(verdicts)} mutants: {sum(killers.values())} killed, {listed} equivalent, {len(wrong)} survived")
    return 1 if wrong or stale else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="compilers and tests at a time (default 1)")
    parser.add_argument("--only", metavar="TEXT", default="", help="mutants with this in their name")
    options = parser.parse_args()
    verdicts = []
    with tempfile.TemporaryDirectory() as name:
        parts = Path(name)
        compile_parts(parts)
        sound = meet(None, parts)
        if sound.killer:
            print(f"the protocol as it is does not pass {sound.killer}: {sound.said}", file=sys.stderr)
            return 2
        for verdict in meet_all([change for change in CHANGES if options.only in change.name], parts, options.jobs):
            verdicts.append(verdict)
            print(f"{verdict.killer or 'LIVES':22} {verdict.change.name}: {verdict.said}", flush=True)
    return judge(verdicts)


if __name__ == "__main__":
    sys.exit(main())
