"""`torchrelay report --guarantee`: the clean ratio over what counts, whether a target is met, and what was left out."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median

import msgspec
from msgspec import Struct

from torchrelay.api.shown import Exclusion
from torchrelay.client.client import Client
from torchrelay.client.ledger_file import FILE, ledger
from torchrelay.client.runs import NotPossible, find_source, time_in
from torchrelay.economics.published.claims import proven_share
from torchrelay.goodput.ledger import (
    TARGET,
    Entry,
    Finding,
    Guarantee,
    Interval,
    Line,
    Part,
    RatioPart,
    Verdict,
    guarantee,
)
from torchrelay.protocol.model.incident import UNSETTLED as UNDER_WAY
from torchrelay.protocol.model.incident import Resolution
from torchrelay.terminal.show import Output, clip, milliseconds, remark, show_json, table

DECLARED = {"user-bug": Exclusion.USER_BUG, "operator-stop": Exclusion.OPERATOR, "storage-outage": Exclusion.STORAGE}
UNTOLD = ("", Exclusion.UNTOLD)  # by an older version, or while the job had not ended
# What is told of one that is over may still change in these only: clocks are corrected, and that it does not count may
# show later. All else is settled when it is resolved.
UNSETTLED = ("at", "eligible", "excluded", "evidence")
CORRECTED_S = 5.0  # by how much clocks may have been corrected since a line was written
WIDTH = 50  # of the picture of the interval, in characters


def show_guarantee(given: argparse.Namespace) -> int:
    """Print it. Returns the exit code: 1 if `--check` is given and the target is not shown to be met, else 0."""
    if given.write:
        raise NotPossible("--write with --guarantee: write the ledger with `torchrelay report --write` alone", 2)
    target = share_in(given.target)
    begin = moment_in(given.since, datetime.now().astimezone())
    entries, missing = entries_of(given, begin)
    dated = [entry for entry in entries if begin is None or is_since(entry, begin)]
    dated = exclude(dated, given.exclude or [])
    since = "" if begin is None else begin.isoformat(timespec="seconds")
    found = guarantee(dated, target, since=since, missing=missing)
    if given.output is Output.JSONL:
        for one in found.findings:
            print(msgspec.json.encode(one).decode())
    elif given.output is Output.JSON:
        print(show_json(found))
    else:
        print(guarantee_page(found))
    return 1 if given.check and found.verdict is not Verdict.MET else 0


# ---------------------------------------------------------------- what was asked for


def share_in(text: str | None) -> float:
    """A share: 0.9, or 90%. Raises `NotPossible`."""
    if text is None:
        return TARGET
    found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)(%?)", text)
    share = float(found[1]) / (100 if found[2] else 1) if found is not None else 0.0
    if not 0 < share <= 0.9999:
        raise NotPossible(f"--target {text!r}: give a share between 0 and 0.9999, as 0.9 or 90%", 2)
    return share


def moment_in(text: str | None, now: datetime) -> datetime | None:
    """From when on: so long ago (30d, 12h, 90m), or a date (2026-10-01), local time. Raises `NotPossible`."""
    if text is None:
        return None
    if re.fullmatch(r"-.*|0+[smhd]", text):
        raise NotPossible(f"--since {text}: it must be above 0, as in 30d, 12h, 90m, or a date (2026-10-01)", 2)
    if re.fullmatch(r"\d+[smhd]", text):
        return now - timedelta(milliseconds=time_in(text))
    try:
        begin = datetime.fromisoformat(text).astimezone() if re.match(r"\d{4}-\d\d-\d\d", text) else None
    except (ValueError, OverflowError) as error:  # the latter: of a year that some time zone has not
        raise NotPossible(f"--since {text!r}: {error}; give a date as 2026-10-01 or 2026-10-01T14:30", 2) from error
    if begin is None:
        raise NotPossible(f"--since {text!r}: give how long ago (30d, 12h, 90m) or a date (2026-10-01)", 2)
    if begin > now:
        raise NotPossible(f"--since {text!r} lies in the future: it is {now:%Y-%m-%d %H:%M} here", 2)
    return begin


def is_since(entry: Entry, begin: datetime) -> bool:
    """Whether it began then or later. One whose time is not known is not left out for that."""
    at = time_of(entry.line)
    return at is None or at >= begin


def time_of(line: Line) -> datetime | None:
    return datetime.fromisoformat(line.at).astimezone(UTC) if line.at else None


# ---------------------------------------------------------------- where the lines are from


def entries_of(given: argparse.Namespace, begin: datetime | None) -> tuple[list[Entry], list[str]]:
    """The interruptions of the run at hand and of the files that were named, each once; and what the files skip."""
    files = {path: read_ledger(path) for path in given.ledger or ()}
    found = [entry for some in files.values() for entry in some]
    try:
        source, note = find_source(given.run_dir)
    except NotPossible:
        if given.run_dir is not None or not given.ledger:
            raise
    else:
        remark(note)
        # A job that is named may be in the files only.
        job = None if given.ledger else given.job
        lines = ledger(source.view_incidents(job))
        found += [Entry(line, "this run", isinstance(source, Client)) for line in lines]
    if given.job is not None:
        found = [entry for entry in found if entry.line.job == given.job]
    skipped = [
        f"{gap.job}/I-{gap.number}, which {path} skips"
        for path, some in files.items()
        for gap in gaps(some)
        if given.job in (None, gap.job) and (begin is None or gap.until >= begin) and not gap.is_filled(found)
    ]
    return each_once(found), list(dict.fromkeys(skipped))


class Gap(Struct, frozen=True):
    """A number between 1 and the last one of a job that a ledger skips: a job numbers its incidents without one.

    It lay between these two times.
    """

    job: str
    number: int
    since: datetime
    until: datetime

    def is_filled(self, entries: Iterable[Entry]) -> bool:
        """Whether another place tells of it."""
        slack = timedelta(seconds=CORRECTED_S)
        return any(
            (entry.line.job, entry.line.id) == (self.job, f"I-{self.number}")
            and ((at := time_of(entry.line)) is None or self.since - slack <= at <= self.until + slack)
            for entry in entries
        )


def gaps(entries: Sequence[Entry]) -> list[Gap]:
    """What one ledger skips."""
    known: dict[str, dict[int, datetime | None]] = {}
    for entry in entries:
        if numbered := re.fullmatch(r"I-(\d{1,9})", entry.line.id):
            known.setdefault(entry.line.job, {})[int(numbered[1])] = time_of(entry.line)
    found = []
    for job, times in known.items():
        before, last = datetime.min.replace(tzinfo=UTC) + timedelta(days=1), 0
        for number, at in sorted(times.items()):
            until = at or datetime.max.replace(tzinfo=UTC) - timedelta(days=1)
            found += [Gap(job, absent, before, until) for absent in range(last + 1, number)]
            before, last = at or before, number
    return found


def read_ledger(path: Path) -> list[Entry]:
    """A file written by `report --write`, or the folder of a run with one. Raises `NotPossible`, naming the line."""
    file = path / FILE if path.is_dir() else path
    try:
        raw = file.read_bytes()
    except OSError as error:
        remedy = "write it with `torchrelay report --write --run-dir RUN`"
        raise NotPossible(f"--ledger {file}: {error.strerror}; {remedy}", 2) from error
    entries = []
    for number, text in enumerate(raw.splitlines(), start=1):
        if not text.strip():
            continue
        origin = f"{file}:{number}"
        try:
            line = msgspec.json.decode(text, type=Line)
            Resolution(line.resolution)
            time_of(line)
        except (ValueError, OverflowError, msgspec.DecodeError) as error:
            what = f"{error}; remove the line, or write the ledger again with `torchrelay report --write`"
            raise NotPossible(f"{origin} is no line of a ledger: {what}", 2) from error
        entries.append(Entry(line, origin))
    return entries


def each_once(entries: Iterable[Entry]) -> list[Entry]:
    """The same interruption read twice counts once. One that was open when a file was written may be over by now.

    Nor was it known, when a file was written, what a later interruption showed of this one: that it does not count.
    Raises `NotPossible` if two places tell of it differently.
    """
    kept: dict[tuple[str, str, int], list[Entry]] = {}
    for entry in entries:
        line = entry.line
        known = kept.setdefault((line.job, line.id, line.generation), [])
        place = next((at for at, one in enumerate(known) if is_same(one.line, line)), None)
        if place is None:
            known.append(entry)
        elif known[place].line.resolution in UNDER_WAY:
            known[place] = entry
        elif line.resolution not in UNDER_WAY:
            first = known[place]
            check_same(first, entry)
            later = not line.eligible and (first.line.eligible or first.line.excluded in UNTOLD)
            known[place] = entry if later else first
    return [entry for some in kept.values() for entry in some]


def check_same(first: Entry, second: Entry) -> None:
    """Whether two places tell the same of one that is over. Raises `NotPossible`, naming what differs."""
    one, other = first.line, second.line
    named = ["resolution", *(name for name in Line.__struct_fields__ if name not in UNSETTLED)]
    if not any(line.eligible or line.excluded in UNTOLD for line in (one, other)):
        named += ["excluded", "evidence"]
    for name in named:
        here, there = getattr(one, name), getattr(other, name)
        if here != there:
            told = f"{name} is {shown(there)} in {second.origin}, {shown(here)} in {first.origin}"
            raise NotPossible(f"{other.id} of {other.job} at {other.at}: {told}: leave one of them out", 2)


def shown(value: object) -> str:
    """A value of a line as the ledger has it."""
    return clip(str(value) if isinstance(value, str) else msgspec.json.encode(value).decode(), 80)


def is_same(one: Line, other: Line) -> bool:
    """Whether two lines of the same name are of one interruption, and not of two runs whose jobs have the same name.

    As clocks are corrected the same moment is told differently by some ms; then the stories tell.
    """
    if one.at == other.at:
        return True
    first, second = time_of(one), time_of(other)
    if first is None or second is None or abs((first - second).total_seconds()) > CORRECTED_S:
        return False
    both = min(len(one.story), len(other.story))
    return one.story[:both] == other.story[:both]


def exclude(entries: Sequence[Entry], declared: Sequence[Sequence[str]]) -> list[Entry]:
    """With what somebody declares not to count; their word stands beside it. Raises `NotPossible`."""
    found = list(entries)
    for name, reason, evidence in declared:
        if reason not in DECLARED:
            raise NotPossible(f"--exclude {name}: {reason!r} is none of {', '.join(DECLARED)}", 2)
        if not evidence.strip():
            raise NotPossible(
                f"--exclude {name}: say what shows it, as 'NFS server away 14:02 to 14:20, ticket 4711'", 2
            )
        at = [place for place, one in enumerate(found) if name in (one.line.id, f"{one.line.job}/{one.line.id}")]
        if len(at) != 1:
            there = "there is none" if not at else f"there are {len(at)}: write JOB/{name}, or leave out a ledger"
            raise NotPossible(f"--exclude {name}: {there}", 2)
        line = found[at[0]].line
        if not line.eligible:
            raise NotPossible(f"--exclude {name}: it is not counted anyway ({line.excluded})", 2)
        words = f"declared with --exclude, not seen by torchrelay: {evidence.strip()}"
        line = msgspec.structs.replace(line, eligible=False, excluded=DECLARED[reason], evidence=words)
        found[at[0]] = msgspec.structs.replace(found[at[0]], line=line)
    return found


# ---------------------------------------------------------------- the page


def share_text(ratio: Interval | None) -> str:
    """A share and its interval: 97.1 % (85.4 % to 99.5 %)."""
    if ratio is None:
        return "-"
    return f"{proven_share(ratio.share)} ({proven_share(ratio.low)} to {proven_share(ratio.high, up=True)})"


def guarantee_page(found: Guarantee) -> str:
    """The result, then every interruption that speaks against it or was left out, then kinds and causes."""
    lost, excluded = found.those(RatioPart.NOT_CLEAN), found.those(RatioPart.EXCLUDED)
    blocks = [head(found)]
    if lost:
        rows = [(*name_of(one), clip(one.cause, 40), one.lost, clip(one.why, 80)) for one in lost]
        blocks.append(f"not clean\n{table(('id', 'job', 'at', 'cause', 'lost', 'why'), rows)}")
    if excluded:
        # In full: whoever is asked to believe an exclusion must be able to read what it rests on.
        rows = [(*name_of(one), clip(one.cause, 40), one.reason, one.why or "none was kept") for one in excluded]
        blocks.append(f"not counted\n{table(('id', 'job', 'at', 'cause', 'reason', 'evidence'), rows)}")
    if found.missing:
        blocks.append("missing, as lines were taken out of a ledger:\n" + "\n".join(found.missing))
    if pending := found.those(RatioPart.PENDING):
        names = ", ".join(f"{one.job}/{one.id}" for one in pending)
        blocks.append(f"under way, counted when {'they are' if len(pending) > 1 else 'it is'} over: {names}")
    if found.counted:
        blocks += [part_table("kind", found.kinds), part_table("cause", found.causes)]
    return "\n\n".join(blocks)


def name_of(one: Finding) -> tuple[str, str, str]:
    """With its time here: ledgers of several places are dated by several clocks."""
    at = f"{datetime.fromisoformat(one.at).astimezone():%Y-%m-%d %H:%M:%S}" if one.at else "?"
    return one.id, one.job, at


def part_table(name: str, parts: Iterable[Part]) -> str:
    rows = [(part.name, part.counted, part.clean, share_text(part.ratio)) for part in parts]
    return table((name, "counted", "clean", "share, 95 % confidence"), rows)


def head(found: Guarantee) -> str:
    """What was looked at, what it comes to, and whether that meets the target."""
    excluded = len(found.those(RatioPart.EXCLUDED))
    since = f"since {found.since[:16].replace('T', ' ')}" if found.since else "in all"
    counted = f"{found.counted} counted, {found.clean} of them resolved clean"
    lines = [f"{len(found.findings)} interruptions {since}, {excluded} not counted", counted]
    if found.ratio is not None:
        lines[-1] += f": {share_text(found.ratio)}"
        lines += [picture(found.ratio, found.target)]
    lines.append(f"target {100 * found.target:.6g} %: {found.verdict}{because(found)}")
    if found.worst is not None and found.worst != found.ratio:
        besides = ", and what is missing," if found.missing else ""
        text = f"if every exclusion but moves called off{besides} were counted, and lost"
        lines.append(f"{text}: {share_text(found.worst)}")
    pauses = [one.pause_ms for one in found.findings if one.pause_ms is not None]
    if pauses:
        lines.append(f"pause: median {milliseconds(median(pauses))}, longest {milliseconds(max(pauses))}")
    return "\n".join(lines)


def because(found: Guarantee) -> str:
    """Why a target is met or not, and what would show it."""
    if found.verdict is Verdict.MET:
        return ""
    ahead = f"{found.more} more clean one{'s' if found.more > 1 else ''} in a row would show it"
    if found.ratio is None:
        return f", as nothing counts; {ahead}"
    if found.verdict is Verdict.NOT_YET:
        return f", as the lower bound is {proven_share(found.ratio.low)}; {ahead}"
    sure = "and the whole interval below it" if found.ratio.high < found.target else "though by too few to be sure"
    return f", with a share below it, {sure}; {ahead}"


def picture(ratio: Interval, target: float) -> str:
    """The interval on a line, the share in it, and the target below it."""
    begin = math.floor(min(ratio.low, target) * 10) / 10
    begin = min(begin, 0.9)

    def place(share: float) -> int:
        return min(WIDTH - 1, int((share - begin) / (1 - begin) * WIDTH))

    marks = [" "] * WIDTH
    marks[place(ratio.low) : place(ratio.high) + 1] = "-" * (place(ratio.high) + 1 - place(ratio.low))
    marks[place(ratio.low)], marks[place(ratio.high)] = "[", "]"
    marks[place(ratio.share)] = "o"
    left = f"{proven_share(begin):>6} |"
    return f"{left}{''.join(marks)}| 100 %\n{' ' * (len(left) + place(target))}^ target"
