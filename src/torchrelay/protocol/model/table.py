"""An immutable mapping: state is a value, so that it can be hashed, compared and enumerated.

A small table is a dict that is copied. A large one keeps its values in blocks, of which `put` and `drop` copy one, so a
change costs about the same in a job of eight ranks and of sixteen thousand. See docs/decisions/0018.

What is asked of all values (is there one that is not ready? which workers run on this node?) is counted once, and kept
from version to version: `count`, `any`, `where` and `group` cost what has changed since they were asked last.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Hashable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from itertools import chain
from typing import Any, Generic, TypeVar, cast, overload

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

SMALL = 128  # up to here a copy of a dict costs less than blocks do
BLOCK = 64  # the square root of a few thousand: a block and the row of blocks cost about the same to copy
FEW = 64  # so many places are kept with a count; of more, only how many there are


class _Nothing:
    """In the place of a value: the key was dropped."""

    def __repr__(self) -> str:
        return "nothing"


NOTHING = _Nothing()


class _Places(Generic[K]):
    """Which key has which place. Versions of a table share it: places are only added, and each version knows how many
    of them are its own."""

    __slots__ = ("keys", "of")

    def __init__(self, keys: Iterable[K]) -> None:
        self.keys = list(keys)
        self.of = {key: place for place, key in enumerate(self.keys)}


# Of a fact about values: how many have it, the places of these if they are few, and a place before which none has it. A
# fact is a function of its own, as it is told from others by identity.
_Tally = tuple[int, tuple[int, ...] | None, int]


class _Items(ItemsView[K, V]):
    def __init__(self, table: Table[K, V]) -> None:
        super().__init__(table)
        self._table = table

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return self._table.pairs()


class _Values(ValuesView[V]):
    def __init__(self, table: Table[Any, V]) -> None:
        super().__init__(table)
        self._table = table

    def __iter__(self) -> Iterator[V]:
        return (value for _, value in self._table.pairs())


class Table(Mapping[K, V], Generic[K, V]):
    """A mapping that never changes, in the order in which keys came; `put` and `drop` make a new one."""

    __slots__ = ("_blocks", "_groups", "_hash", "_items", "_length", "_places", "_tallies", "_used")

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        found = dict(items)
        self._hash: int | None = None
        self._items: dict[K, V] | None = found
        if len(found) > SMALL:
            self._spread(found)

    def _spread(self, found: dict[K, V]) -> None:
        values = tuple(found.values())
        blocks = tuple(values[at : at + BLOCK] for at in range(0, len(values), BLOCK))
        self._fill(_Places(found), blocks, len(values), len(values))

    def _fill(self, places: _Places[K], blocks: tuple[tuple[Any, ...], ...], used: int, length: int) -> None:
        self._items = None
        self._places, self._blocks, self._used, self._length = places, blocks, used, length
        self._tallies: dict[Callable[[V], bool], _Tally] = {}
        self._groups: dict[Callable[[V], Hashable], Table[Hashable, tuple[int, ...]]] = {}

    @classmethod
    def _of(cls, places: _Places[K], blocks: tuple[tuple[Any, ...], ...], used: int, length: int) -> Table[K, V]:
        made: Table[K, V] = cls.__new__(cls)
        made._hash = None
        made._fill(places, blocks, used, length)
        return made

    def _place(self, key: object) -> int | None:
        """The place of a key that is in this table; None for one that is not."""
        place = self._places.of.get(cast(Any, key))
        if place is None or place >= self._used or self._blocks[place // BLOCK][place % BLOCK] is NOTHING:
            return None
        return place

    # ------------------------------------------------------------ what Mapping would do by way of __getitem__, faster

    def __getitem__(self, key: K) -> V:
        if self._items is not None:
            return self._items[key]
        place = self._places.of[key]
        if place < self._used:
            value = self._blocks[place // BLOCK][place % BLOCK]
            if value is not NOTHING:
                return value  # type: ignore[no-any-return]
        raise KeyError(key)

    @overload
    def get(self, key: K, /) -> V | None: ...

    @overload
    def get(self, key: K, /, default: V | T) -> V | T: ...

    def get(self, key: K, /, default: Any = None) -> Any:
        if self._items is not None:
            return self._items.get(key, default)
        place = self._places.of.get(key)
        if place is None or place >= self._used:
            return default
        value = self._blocks[place // BLOCK][place % BLOCK]
        return default if value is NOTHING else value

    def __contains__(self, key: object) -> bool:
        return key in self._items if self._items is not None else self._place(key) is not None

    def __iter__(self) -> Iterator[K]:
        return iter(self._items) if self._items is not None else (key for key, _ in self.pairs())

    def __len__(self) -> int:
        return len(self._items) if self._items is not None else self._length

    def pairs(self) -> Iterator[tuple[K, V]]:
        """Keys and values, in order."""
        if self._items is not None:
            return iter(self._items.items())
        both = zip(self._places.keys, chain.from_iterable(self._blocks), strict=False)  # later versions have more keys
        return both if self._length == self._used else ((key, value) for key, value in both if value is not NOTHING)

    def items(self) -> ItemsView[K, V]:
        return self._items.items() if self._items is not None else _Items(self)

    def values(self) -> ValuesView[V]:
        return self._items.values() if self._items is not None else _Values(self)

    # ------------------------------------------------------------ values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table):
            return False
        if self._items is not None and other._items is not None:
            return self._items == other._items
        if len(self) != len(other):
            return False
        shared = self._items is None and other._items is None and self._places is other._places
        if shared and self._used == other._used:  # tuples compare by identity first: only what differs costs
            return self._blocks == other._blocks
        return dict(self.pairs()) == dict(other.pairs())

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.pairs()))
        return self._hash

    def __repr__(self) -> str:
        return f"Table({dict(self.pairs())!r})"

    # ------------------------------------------------------------ changes

    def put(self, key: K, value: V) -> Table[K, V]:
        """The same table with `key` set to `value`."""
        if self._items is not None:
            return Table({**self._items, key: value})
        place = self._place(key)
        if place is not None:
            made = self._of(self._places, self._replaced(place, value), self._used, self._length)
            return made._follow(self, place, self._blocks[place // BLOCK][place % BLOCK], value)
        if key in self._places.of or len(self._places.keys) != self._used:  # of another version, or dropped before
            return Table({**dict(self.pairs()), key: value})
        self._places.of[key] = self._used
        self._places.keys.append(key)
        last = self._blocks[-1]
        blocks = (*self._blocks, (value,)) if len(last) == BLOCK else (*self._blocks[:-1], (*last, value))
        return self._of(self._places, blocks, self._used + 1, self._length + 1)._follow(
            self, self._used, NOTHING, value
        )

    def put_all(self, pairs: Iterable[tuple[K, V]]) -> Table[K, V]:
        """The same table with all of these set. Those that are there and lie side by side cost little more than one."""
        pairs = list(pairs)
        places = [] if self._items is not None else [self._place(key) for key, _ in pairs]
        if self._items is not None or self._tallies or self._groups or None in places:
            table = self
            for key, value in pairs:
                table = table.put(key, value)
            return table
        changed: dict[int, list[Any]] = {}
        for place, (_, value) in zip(places, pairs, strict=True):
            row, column = divmod(cast(int, place), BLOCK)
            if row not in changed:
                changed[row] = list(self._blocks[row])
            changed[row][column] = value
        blocks = list(self._blocks)
        for row, block in changed.items():
            blocks[row] = tuple(block)
        return self._of(self._places, tuple(blocks), self._used, self._length)

    def drop(self, key: K) -> Table[K, V]:
        """The same table without `key`, which may be absent."""
        if self._items is not None:
            return Table({k: v for k, v in self._items.items() if k != key}) if key in self._items else self
        place = self._place(key)
        if place is None:
            return self
        if self._length <= SMALL or 2 * self._length <= self._used:  # half of it is gaps
            return Table((k, v) for k, v in self.pairs() if k != key)
        made = self._of(self._places, self._replaced(place, NOTHING), self._used, self._length - 1)
        return made._follow(self, place, self._blocks[place // BLOCK][place % BLOCK], NOTHING)

    def _replaced(self, place: int, value: object) -> tuple[tuple[Any, ...], ...]:
        """The blocks with another value in this place."""
        row, column = divmod(place, BLOCK)
        block = list(self._blocks[row])
        block[column] = value
        blocks = list(self._blocks)
        blocks[row] = tuple(block)
        return tuple(blocks)

    # ------------------------------------------------------------ what is asked of all values

    def count(self, fact: Callable[[V], bool]) -> int:
        """How many values have this fact. Pass the same function each time."""
        if self._items is not None:
            return sum(map(fact, self._items.values()))
        return self._tally(fact)[0]

    def counted(self, *some: Callable[[V], bool], by: Callable[[V], Hashable]) -> Table[K, V]:
        """The same table, in which these facts are counted, and the groups formed, before anybody waits for it."""
        for fact in some if self._items is None else ():
            self._tally(fact)
        if self._items is None:
            self._grouped(by)
        return self

    def any(self, fact: Callable[[V], bool]) -> bool:
        """Whether a value has this fact."""
        return any(map(fact, self._items.values())) if self._items is not None else self._tally(fact)[0] > 0

    def where(self, fact: Callable[[V], bool]) -> Iterator[tuple[K, V]]:
        """The keys and values that have this fact, in order. To ask for the first of many costs little."""
        if self._items is not None:
            return ((key, value) for key, value in self._items.items() if fact(value))
        places = self._tally(fact)[1]
        if places is None:
            return self._search(fact)
        return ((self._places.keys[place], self._blocks[place // BLOCK][place % BLOCK]) for place in places)

    def _search(self, fact: Callable[[V], bool]) -> Iterator[tuple[K, V]]:
        number, _, first = self._tallies[fact]
        found = False
        for place in range(first, self._used):
            value = self._blocks[place // BLOCK][place % BLOCK]
            if value is not NOTHING and fact(value):
                if not found:
                    found, self._tallies[fact] = True, (number, None, place)
                yield self._places.keys[place], value

    def group(self, of: Callable[[V], Hashable], name: Hashable, *, after: K | None = None) -> Iterator[tuple[K, V]]:
        """The keys and values of which `of` is `name`, in order. Pass the same function each time.

        `after`: begin behind this key, and come round to it.
        """
        if self._items is not None:
            found = [(key, value) for key, value in self._items.items() if of(value) == name]
            order = {key: place for place, key in enumerate(self._items)} if after is not None else {}
            behind = [pair for pair in found if after is None or order[pair[0]] > order[after]]
            return chain(behind, found[: len(found) - len(behind)])
        places = self._grouped(of).get(name, ())
        cut = 0 if after is None else bisect_right(places, self._places.of[after])
        return (
            (self._places.keys[place], self._blocks[place // BLOCK][place % BLOCK])
            for place in chain(places[cut:], places[:cut])
        )

    def size(self, of: Callable[[V], Hashable], name: Hashable) -> int:
        """Of how many values `of` is `name`."""
        if self._items is not None:
            return sum(of(value) == name for value in self._items.values())
        return len(self._grouped(of).get(name, ()))

    def _grouped(self, of: Callable[[V], Hashable]) -> Table[Hashable, tuple[int, ...]]:
        groups = self._groups.get(of)
        if groups is None:
            found: dict[Hashable, list[int]] = {}
            for place, value in self._placed():
                found.setdefault(of(value), []).append(place)
            groups = self._groups[of] = Table((key, tuple(places)) for key, places in found.items())
        return groups

    def differences(self, before: Table[K, V]) -> Iterator[tuple[K, V | None, V | None]]:
        """Each key whose value is not the object that it was before, with the value then and now; None: absent."""
        shared = self._items is None and before._items is None and self._places is before._places
        if not shared:
            for key, value in before.pairs():
                if self.get(key) is not value:
                    yield key, value, self.get(key)
            yield from ((key, None, value) for key, value in self.pairs() if key not in before)
            return
        for row in range(max(len(self._blocks), len(before._blocks))):
            new = self._blocks[row] if row < len(self._blocks) else ()
            old = before._blocks[row] if row < len(before._blocks) else ()
            if new is old:
                continue
            for column in range(max(len(new), len(old))):
                now = new[column] if column < len(new) else NOTHING
                was = old[column] if column < len(old) else NOTHING
                if now is not was:
                    key = self._places.keys[row * BLOCK + column]
                    yield key, cast(V, None if was is NOTHING else was), cast(V, None if now is NOTHING else now)

    def _placed(self) -> Iterator[tuple[int, V]]:
        values = enumerate(chain.from_iterable(self._blocks))
        return ((place, value) for place, value in values if value is not NOTHING)

    def _tally(self, fact: Callable[[V], bool]) -> _Tally:
        known = self._tallies.get(fact)
        if known is None or (known[1] is None and known[0] <= FEW):
            places = tuple(place for place, value in self._placed() if fact(value))
            first = places[0] if places else self._used
            known = self._tallies[fact] = (len(places), places if len(places) <= FEW else None, first)
        return known

    def _follow(self, before: Table[K, V], place: int, old: Any, new: Any) -> Table[K, V]:
        """Keep what was counted in the version before, which differs in this place."""
        for fact, tally in before._tallies.items():
            had, has = old is not NOTHING and fact(old), new is not NOTHING and fact(new)
            self._tallies[fact] = tally if had == has else _counted(tally, place, has)
        for of, groups in before._groups.items():
            was = NOTHING if old is NOTHING else of(old)
            now = NOTHING if new is NOTHING else of(new)
            if was != now:
                groups = groups if was is NOTHING else _left(groups, was, place)
                groups = groups if now is NOTHING else _joined(groups, now, place)
            self._groups[of] = groups
        return self


def _counted(tally: _Tally, place: int, has: bool) -> _Tally:
    """A tally after the value in this place got the fact, or lost it."""
    number, places, first = tally
    if has:
        few = None if places is None or number == FEW else _with(places, place)
        return number + 1, few, min(first, place)
    return number - 1, None if places is None else tuple(one for one in places if one != place), first


def _with(places: tuple[int, ...], place: int) -> tuple[int, ...]:
    found = list(places)
    insort(found, place)
    return tuple(found)


def _left(groups: Table[Any, tuple[int, ...]], name: Hashable, place: int) -> Table[Any, tuple[int, ...]]:
    # An empty group keeps its place: it mostly fills again.
    return groups.put(name, tuple(one for one in groups[name] if one != place))


def _joined(groups: Table[Any, tuple[int, ...]], name: Hashable, place: int) -> Table[Any, tuple[int, ...]]:
    return groups.put(name, _with(groups.get(name, ()), place))
