"""Consumers: what a script goes through a tracked loop by, and where that is.

    for number, batch in enumerate(to_device(run.batches(loader))):

Python keeps enumerate(), zip() and the like on the stack, where nobody sees them. When a loop gives its first item, the
garbage collector knows who holds the loop's iterator, and so on outwards: between two functions lie iterators that are
written in C, and generators of the script. Those that count are recorded with each item (see `alongside`). One that
keeps something else from item to item is refused, as a replacement would begin it anew.

It costs milliseconds, so a place of the script where there is nothing of the kind is not looked at again.
"""

from __future__ import annotations

import gc
import inspect
import itertools
import sys
import warnings
from builtins import enumerate as plain_enumerate
from builtins import map as plain_map
from builtins import zip as plain_zip
from collections.abc import Iterator
from itertools import islice as plain_islice
from types import CodeType, FrameType, FunctionType, GeneratorType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torchrelay.worker.data.alongside import Along, Position
from torchrelay.worker.source import flow
from torchrelay.worker.source.lines import is_library

# What shows how far a loop is, and hands on each item.
PROGRESS = frozenset({"tqdm", "rich", "alive_progress", "progressbar", "click", "fastprogress"})
# They keep nothing from item to item. What chain() has given before is given again, and is over then.
_FREE: tuple[type, ...] = (
    filter, itertools.filterfalse, itertools.starmap, itertools.takewhile, itertools.chain,
)  # fmt: skip
_ONE_EACH = (itertools.starmap, itertools.takewhile)  # an item for an item
_IN_TUPLES = (plain_zip, plain_map, itertools.zip_longest)  # they hold what they go through in a tuple
_TEE: Any = getattr(itertools, "_tee_dataobject", None)
_LISTS: tuple[type, ...] = (type(iter([])), type(iter(())))  # they tell where they are
_OWN_WAYS = PROGRESS | {"torchrelay"}
_ENTRIES = 4096
_REMEDIES = {
    "batched": "write run.batches(loader, micro_batches=n)",
    "accumulate": "add up in a variable of the loop's body",
    "pairwise": "let each item have all that a step needs: a dataset whose items are pairs",
    "zip_longest": "write zip(), and let the others be as long as the loop",
    "compress": "write `if` in the loop's body",
    "dropwhile": "write `if` in the loop's body",
    "tee": "go through the loop once",
}
_BODY = "write `for` over the loop itself, and the rest into its body, or into a generator function with such a loop"


class Unknown(NamedTuple):
    """Why a replacement could not go on with what lies around a loop."""

    reason: str
    remedy: str


class Counting(NamedTuple):
    """One that counts."""

    kind: str
    first: int  # where it would have been when the loop gave its first item


class Chain(NamedTuple):
    """What a loop is gone through by, as far as it counts, innermost first.

    None of it is held: who breaks out of a loop leaves it at once, and not when garbage is collected.
    """

    counting: list[Counting]

    def positions(self, count: int) -> list[Position]:
        """When so many items of the loop were given, and the next one is fetched."""
        return [(each.kind, each.first + count) for each in self.counting]


_in_c: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
NOTHING = Chain([])
# By place, of what classes these were.
_shapes: dict[tuple[int, ...], tuple[list[type], list[CodeType]]] = {}
_plain_places: dict[tuple[int, ...], list[CodeType]] = {}  # with the codes, so that no other one gets the id


def place_of(frame: FrameType | None) -> tuple[int, ...]:
    """Where the script is, its callers included."""
    return tuple(number for each in _outwards(frame) for number in (id(each.f_code), each.f_lasti))


def consumers_of(walk: Any, caller: FrameType | None, count: int) -> Chain | Unknown:
    """What the iterator of a loop is gone through by, while it is asked for an item, after so many.

    `caller`: the function that asks.
    """
    place = place_of(caller)
    if place in _plain_places:
        return NOTHING
    found: list[Counting] = []
    uneven = ""  # by what another number of items comes out than goes in
    links = _links_at(place, walk, caller)
    for link, inner in links:
        judged = _judge(link, inner, count)
        if isinstance(judged, Counting):
            if uneven:
                judged = _uncounted(judged.kind, uneven)
            else:
                found.append(judged._replace(first=judged.first - count))
        if isinstance(judged, Unknown):
            return judged._replace(reason=f"{judged.reason} ({line_of(caller)})")
        uneven = uneven or _uneven(link)
    if not links:
        _plain_places[place] = [each.f_code for each in _outwards(caller)]
    return Chain(found)


def _links_at(place: tuple[int, ...], walk: Any, caller: FrameType | None) -> list[tuple[Any, Any]]:
    """See `_links`. What was the same here before is looked for among young objects only."""
    known = _shapes.get(place)
    if known is not None:
        links = list(_links(walk, caller, among_all=False))
        if [type(link) for link, _ in links] == known[0]:
            return links
    links = list(_links(walk, caller, among_all=True))
    if len(_shapes) >= _ENTRIES:
        _shapes.clear()
        _plain_places.clear()
    _shapes[place] = [type(link) for link, _ in links], [each.f_code for each in _outwards(caller)]
    return links


def _links(walk: Any, caller: FrameType | None, *, among_all: bool) -> Iterator[tuple[Any, Any]]:
    """From a loop outwards: iterators of C with what they go through, stand-ins, and functions that hand on items."""
    current = walk
    for frame in (None, *_outwards(caller)):
        if frame is not None:
            inner = _iterator_of(frame, among_all)
            if inner is None or inner is current:
                continue
            yield (inner if isinstance(inner, Along) else frame), current
            current = inner
        while (holder := _holder(current, among_all)) is not None:
            yield holder, current
            current = holder


def handing_on(caller: FrameType | None) -> list[FrameType]:
    """Functions that are to give an item: generators, and __next__() of classes."""
    return [each for each in _outwards(caller) if _gives_items(each.f_code) and _module(each) not in _OWN_WAYS]


def line_of(frame: FrameType | None) -> str:
    """The line of the script, for people."""
    for each in _outwards(frame):
        if not is_library(each.f_code.co_filename):
            return f"{each.f_code.co_filename.rpartition('/')[2]}:{each.f_lineno}"
    return "no line of the script"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _gives_items(code: CodeType) -> bool:
    return bool(code.co_flags & inspect.CO_GENERATOR) or (code.co_name == "__next__" and code.co_argcount > 0)


def _iterator_of(frame: FrameType, among_all: bool) -> Any:
    """The generator or object whose next item this function is to give; None if it is another function."""
    code = frame.f_code
    if not _gives_items(code):
        return None
    if code.co_flags & inspect.CO_GENERATOR:
        for objects in (_young(), gc.get_objects() if among_all else []):
            for each in objects:
                if type(each) is GeneratorType and each.gi_running and each.gi_frame is frame:
                    return each
        return None
    return frame.f_locals.get(code.co_varnames[0])


def _young() -> list[Any]:
    return gc.get_objects(0) + gc.get_objects(1)


def _holder(current: Any, among_all: bool) -> Any:
    """The iterator, not of Python code, that goes through this one; None if a function does."""
    for each in _young():
        kind = type(each)
        if _is_iterator_in_c(kind):
            for held in gc.get_referents(each):
                if held is current:
                    return each
                if type(held) is tuple and issubclass(kind, _IN_TUPLES) and any(one is current for one in held):
                    return each
    for each in gc.get_referrers(current) if among_all else ():
        kind = type(each)
        if kind is tuple:
            for around in gc.get_referrers(each):
                if issubclass(type(around), _IN_TUPLES):
                    return around
        elif _is_iterator_in_c(kind):
            return each
    return None


def _is_iterator_in_c(kind: type) -> bool:
    found = _in_c.get(kind)
    if found is None:
        fetch = getattr(kind, "__next__", None)
        in_c = fetch is not None and not isinstance(fetch, FunctionType) and kind is not GeneratorType
        found = _in_c[kind] = in_c or kind is _TEE
    return found


def _judge(holder: Any, current: Any, count: int) -> Counting | Unknown | None:
    """Where an iterator around a loop is now; None if it does not count."""
    kind: Any = type(holder)
    if isinstance(holder, Along):
        return Counting(kind.kind, holder.position)
    if kind in _FREE or kind is FrameType:
        return None
    if kind is plain_enumerate:
        return Counting("enumerate", holder.__reduce__()[1][1])
    if kind is plain_islice:
        return Counting("islice", _told_by(holder)[3])
    if kind is plain_zip:
        alone: Any = plain_zip(iter(()))
        return _rows("zip", holder.__reduce__()[1], current, count, alone.__reduce__()[1])
    if kind is plain_map:
        single: Any = plain_map(print, iter(()))  # it keeps what it goes through in another tuple than it tells
        items, control = holder.__reduce__()[1][1:], single.__reduce__()[1][1:]
        return None if len(items) == 1 else _rows("map", items, current, count, control)
    return Unknown(
        f"a tracked loop is gone through by {_name(kind)}(), and a replacement, which enters the loop in the middle, "
        "would begin that anew",
        _REMEDIES.get(_name(kind), _BODY),
    )


def _name(kind: type) -> str:
    return "tee" if kind is _TEE else kind.__name__.strip("_")


def _uneven(link: Any) -> str:
    """What may give another number of items than it is given; empty if this one cannot."""
    if isinstance(link, Along):
        return "" if link.even else f"{link.kind}()"
    if isinstance(link, FrameType):
        code = link.f_code
        even = _module(link) in PROGRESS or (
            bool(code.co_flags & inspect.CO_GENERATOR) and flow.of(code, link.f_lasti).yields_each
        )
        return "" if even else f"{code.co_qualname}()"
    if type(link) is plain_islice:
        following, _, step, taken = _told_by(link)
        return "" if step == 1 and following == taken else "islice()"
    return "" if type(link) not in _FREE or type(link) in _ONE_EACH else f"{_name(type(link))}()"


def _told_by(holder: Any) -> tuple[int, int | None, int, int]:
    """Of an islice(): what it gives next, where it ends, its step, and how much it has taken."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 gives notice of it
            (_, following, stop, step), taken = holder.__reduce__()[1:3]
    except (TypeError, ValueError):  # Python 3.14 has it no more
        return 0, None, 0, 0
    return following, stop, step, taken


def _uncounted(kind: str, uneven: str) -> Unknown:
    return Unknown(
        f"{kind}() counts what {uneven} makes of a tracked loop, which may be more or less than the loop has given: a "
        "replacement could not tell where it was",
        f"let {kind}() go through the tracked loop itself, `for number, batch in enumerate(run.batches(loader)):`, or "
        "go by run.global_step",
    )


def _rows(name: str, items: tuple[Any, ...], current: Any, count: int, control: tuple[Any, ...]) -> Counting | Unknown:
    """Of zip() or map() over several: it counts rows, and the others go along. `control`: of one that nobody knows."""
    rows = count  # unless a list tells otherwise
    behind = False
    if sum(each is current for each in items) > 1:
        return Unknown(f"a {name}() goes through one tracked loop twice, and a row takes several of its items", _BODY)
    alone = sys.getrefcount(control[0])
    for at in range(len(items)):
        behind = behind or items[at] is current
        # Held by the tuple only: nobody else goes on with it, and it began with this loop.
        if items[at] is not current and sys.getrefcount(items[at]) > alone:
            return Unknown(
                f"an iterator that is kept elsewhere, too ({_name(type(items[at]))}), goes along with a tracked loop "
                f"in {name}(), and a replacement could not tell how far it was",
                f"make it where the loop begins: {name}(run.batches(loader), weights()), or look its values up by "
                "run.global_step",
            )
        if type(items[at]) in _LISTS:
            index = items[at].__reduce__()[2:]
            rows = index[0] - (not behind) if index and isinstance(index[0], int) else rows
    return Counting(name, rows)
