"""Hostlists: Slurm's short form of many node names, `n[1-3,07-09]x`, expanded and compressed. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

MOST = 100_000  # names in one list; a list that means more is damaged
_PART = re.compile(r"([^\[\],]*)(?:\[([^\[\]]*)\])?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NUMBER = re.compile(r"(.*?)(\d+)(\D*)", re.DOTALL)


def expand(text: str) -> tuple[str, ...]:
    """All names that a hostlist means, in its order, each once. Raises ValueError, with the place, if it is none."""
    if text.strip() in ("", "(null)", "None", "N/A"):
        return ()
    names: dict[str, None] = {}
    for word in _words(text.strip()):
        for name in _expand_word(word, text):
            names[name] = None
            if len(names) > MOST:
                raise ValueError(f"the hostlist {text[:60]!r} means more than {MOST} nodes")
    return tuple(names)


def _words(text: str) -> Iterator[str]:
    """What stands between the commas outside of brackets."""
    depth, begin = 0, 0
    for place, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"the hostlist {text[:60]!r} has brackets that do not match")
        if letter == "," and depth == 0:
            yield text[begin:place]
            begin = place + 1
    if depth:
        raise ValueError(f"the hostlist {text[:60]!r} is cut off inside brackets")
    yield text[begin:]


def _expand_word(word: str, text: str) -> Iterator[str]:
    """The names of one word, which may have several brackets: `r[1-2]n[01-18]`."""
    if not word or re.search(r"\s", word):
        raise ValueError(f"the hostlist {text[:60]!r} has an empty name or a space")
    parts = [found for found in _PART.finditer(word) if found.group(0)]
    names = [""]
    for part in parts:
        endings = [""] if part.group(2) is None else list(_numbers(part.group(2), text))
        if len(names) * len(endings) > MOST:
            raise ValueError(f"the hostlist {text[:60]!r} means more than {MOST} nodes")
        names = [f"{name}{part.group(1)}{ending}" for name in names for ending in endings]
    yield from names


def _numbers(inside: str, text: str) -> Iterator[str]:
    """`1-3,07-09`: the numbers, with their leading zeros."""
    for one in inside.split(","):
        found = _RANGE.fullmatch(one)
        if found is None:
            raise ValueError(f"the hostlist {text[:60]!r} has {one!r} where a number or a range is due")
        first, last = found.group(1), found.group(2) or found.group(1)
        if int(last) - int(first) >= MOST:
            raise ValueError(f"the hostlist {text[:60]!r} means more than {MOST} nodes")
        yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))


def compress(names: Iterable[str]) -> str:
    """The short form of these names; `expand` gives them back, in another order."""
    alone, families = list[str](), dict[tuple[str, str, int], list[int]]()
    for name in sorted(set(names)):
        found = _NUMBER.fullmatch(name)
        if found is None:
            alone.append(name)
            continue
        before, digits, after = found.groups()
        # Without leading zeros 9 and 10 are one family; with them, only numbers of one width are.
        width = len(digits) if digits.startswith("0") and len(digits) > 1 else 0
        families.setdefault((before, after, width), []).append(int(digits))
    return ",".join([*alone, *(_family(*key, sorted(numbers)) for key, numbers in sorted(families.items()))])


def _family(before: str, after: str, width: int, numbers: list[int]) -> str:
    shown = ",".join(
        f"{first:0{width}d}" if first == last else f"{first:0{width}d}-{last:0{width}d}"
        for first, last in ranges(numbers, width)
    )
    return f"{before}{shown}{after}" if len(numbers) == 1 else f"{before}[{shown}]{after}"


def ranges(numbers: Iterable[int], width: int = 0) -> list[tuple[int, int]]:
    """Sorted numbers as runs (first, last). With a width, no run reaches beyond what so many digits can say."""
    runs = list[tuple[int, int]]()
    for number in numbers:
        if runs and number == runs[-1][1] + 1 and (not width or len(str(number)) <= width):
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
