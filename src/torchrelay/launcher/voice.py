"""Voice: what `torchrelay run` prints. The ranks' lines go to stdout with a prefix, our own words to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from torchrelay.api.shown import JobStatus, Lines
from torchrelay.orchestrator.views.story import Kind, Moment, Note
from torchrelay.protocol.messages.events import JobSpec
from torchrelay.protocol.recovery.ending import NO_SPARE, NO_STATE, PARKED
from torchrelay.terminal.show import milliseconds
from torchrelay.wire.files.tails import plain

# Colours that are told apart on light and on dark ground.
UNHEARD = (
    "{} ended with 0: the script has ended with 0 on every rank, without an orchestrator. The ledger ends where the "
    "orchestrator did: what happened afterwards stands in no report"
)
RANK_COLOURS = (36, 32, 33, 35, 34, 31, 96, 92)

HOW_TO_JOIN = """To protect it, add

    run = torchrelay.protect(model=model, optimizer=optimizer)     # after both are built
    @run.step                                                   # above the function that does one optimizer update
    for epoch in run.epochs(EPOCHS):                            # in place of range(EPOCHS)
        for batch in run.batches(loader):                       # in place of the loader
    metrics = run.atomic(evaluate)                             # around other code in which ranks communicate"""
NOT_JOINED = f"the script has not called torchrelay.protect(): it runs unprotected. {HOW_TO_JOIN}"
NEVER_JOINED = "the script never called torchrelay.protect(): it ran unprotected"


class Voice:
    """Prints, in colour on a terminal only (and not if NO_COLOR is set), as wide as the largest rank needs."""

    def __init__(self, *, quiet: bool, world_size: int) -> None:
        self.quiet = quiet
        self._width = len(str(world_size - 1))
        plain = "NO_COLOR" in os.environ
        self._colour_lines = sys.stdout.isatty() and not plain
        self._colour_words = sys.stderr.isatty() and not plain

    def line(self, rank: int, text: str) -> None:
        """A line that a rank printed."""
        if self.quiet:
            return
        prefix = f"[{rank:>{self._width}}]"
        if self._colour_lines:
            prefix = f"\x1b[{RANK_COLOURS[rank % len(RANK_COLOURS)]}m{prefix}\x1b[0m"
        self._heard(lambda: sys.stdout.write(f"{prefix} {text}\n"))

    def far_lines(self, found: Lines) -> None:
        """Lines that came over the network: what a terminal would obey is not printed."""
        for line in found.lines:
            self.line(found.rank, plain(line))
        self.flush()

    def flush(self) -> None:
        self._heard(sys.stdout.flush)

    def _heard(self, speak: Callable[[], object]) -> None:
        """Speak; if nobody listens any more (`| head`), be silent: that must not end training."""
        try:
            speak()
        except BrokenPipeError:
            self.quiet = True
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # or Python complains at its end

    def notice(self, text: str) -> None:
        """What happens, in our own words; not if quiet."""
        if not self.quiet:
            self.say(text)

    def say(self, text: str) -> None:
        """What must be said even if quiet. It may quote others: what a terminal would obey is not printed."""
        self.flush()
        head = "\x1b[1mtorchrelay:\x1b[0m" if self._colour_words else "torchrelay:"
        text = "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)
        print(f"{head} {text}", file=sys.stderr, flush=True)

    def tell(self, moment: Moment) -> None:
        """What an event changed, as far as it matters to who watches."""
        for note in moment.notes:
            text = words_of(note)
            if text:
                self.notice(text)


def words_of(note: Note) -> str:
    """A note as a notice; empty if it is not worth one."""
    match note.kind:
        case Kind.OPENED:
            return f"{note.incident}: {note.text}"
        case Kind.FAULT:
            return f"{note.incident}: also {note.text}"
        case Kind.RESOLVED | Kind.WAITING | Kind.MOVE | Kind.PLACE:
            return note.text
        case Kind.NODE:
            return note.text if "lost" in note.text else ""
        case Kind.SUBMITTED | Kind.PHASE | Kind.DECIDED | Kind.SYMPTOM | Kind.ENDED:
            return ""


def remedy(code: int, spec: JobSpec) -> str:
    """What helps the next time, if a run has ended with this code; empty if nothing is to be said."""
    if code == NO_SPARE and spec.ranks_per_slot == 1:
        return "next time: more --spares, or --oversubscribe 2 to go on in fewer places"
    if code == NO_STATE and not spec.max_restarts:
        return (
            "next time: with --max-restarts N all ranks start again from the checkpoint that the script loads; "
            "`torchrelay doctor --layout` shows which losses lead to this"
        )
    return ""


def summary(job: JobStatus, run_dir: str) -> str:
    """The last line of a run."""
    outcome = job.outcome
    how = "ended with 0"
    if outcome is None:
        how = "had not ended when its orchestrator was last heard of"
    elif outcome.code != 0:
        how = f"ended with {outcome.code}: {outcome.reason}"
    tally = job.incidents
    incidents = "no incident" if tally.total == 0 else f"{tally.total} incidents, {tally.clean} resolved clean"
    if tally.total > tally.eligible and tally.total > 1:
        incidents += f" of the {tally.eligible} that count" if tally.eligible else "; none of them counts"
    if tally.total == 1:
        how_resolved = "resolved clean" if tally.clean else "not resolved clean" if tally.eligible else "not counted"
        incidents = f"1 incident, {how_resolved}"
    # Where a job was parked is told with the reason; what beats told of its steps may be older.
    parked = outcome is not None and outcome.code == PARKED
    steps = f" after {job.step} steps" if job.step is not None and not parked else ""
    pace = f" of {milliseconds(job.step_ms)}" if job.step_ms is not None and job.step is not None else ""
    return f"{job.job} {how}{steps}{pace}; {incidents}; ledger: torchrelay report --run-dir {run_dir}"
