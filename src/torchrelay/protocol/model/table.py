"""An immutable mapping: state is a value, so that it can be hashed, compared and enumerated.

A small table is a dict that is copied. A large one keeps its values in blocks, of which `put` and `drop` copy one, so a
change costs about the same in a job of eight ranks and of sixteen thousand. See docs/decisions/0018.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from itertools import chain
from typing import Any, Generic, TypeVar, cast, overload

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

SMALL = 128  # up to here a copy of a dict costs less than blocks do
BLOCK = 64  # the square root of a few thousand: a block and the row of blocks cost about the same to copy


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

    __slots__ = ("_blocks", "_hash", "_items", "_length", "_places", "_used")

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
                return cast(V, value)
        raise KeyError(key)

    @overload
    def get(self, key: K, /) -> V | None: ...

    @overload
    def get(self, key: K, /, default: V | T) -> V | T: ...

    def get(self, key: K, /, default: Any = None) -> Any:
        if self._items is not None:
            return self._items.get(key, default)
        place = self._place(key)
        return default if place is None else self._blocks[place // BLOCK][place % BLOCK]

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
            return self._of(self._places, self._replaced(place, value), self._used, self._length)
        if key in self._places.of or len(self._places.keys) != self._used:  # of another version, or dropped before
            return Table({**dict(self.pairs()), key: value})
        self._places.of[key] = self._used
        self._places.keys.append(key)
        last = self._blocks[-1]
        blocks = (*self._blocks, (value,)) if len(last) == BLOCK else (*self._blocks[:-1], (*last, value))
        return self._of(self._places, blocks, self._used + 1, self._length + 1)

    def drop(self, key: K) -> Table[K, V]:
        """The same table without `key`, which may be absent."""
        if self._items is not None:
            return Table({k: v for k, v in self._items.items() if k != key}) if key in self._items else self
        place = self._place(key)
        if place is None:
            return self
        if self._length <= SMALL or 2 * self._length <= self._used:  # half of it is gaps
            return Table((k, v) for k, v in self.pairs() if k != key)
        return self._of(self._places, self._replaced(place, NOTHING), self._used, self._length - 1)

    def _replaced(self, place: int, value: object) -> tuple[tuple[Any, ...], ...]:
        """The blocks with another value in this place."""
        row, column = divmod(place, BLOCK)
        block = list(self._blocks[row])
        block[column] = value
        blocks = list(self._blocks)
        blocks[row] = tuple(block)
        return tuple(blocks)
