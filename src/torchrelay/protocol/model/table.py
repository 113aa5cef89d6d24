"""An immutable mapping: state is a value, so that it can be hashed, compared and enumerated."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Table(Mapping[K, V], Generic[K, V]):
    """A mapping that never changes; `put` and `drop` make a new one."""

    __slots__ = ("_hash", "_items")

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        self._items: dict[K, V] = dict(items)
        self._hash: int | None = None

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    # What Mapping would do by way of __getitem__, at the speed of a dict: most of the protocol's time is spent here.

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def items(self) -> ItemsView[K, V]:
        return self._items.items()

    def values(self) -> ValuesView[V]:
        return self._items.values()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._items == other._items

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self._items.items()))
        return self._hash

    def __repr__(self) -> str:
        return f"Table({self._items!r})"

    def put(self, key: K, value: V) -> Table[K, V]:
        """The same table with `key` set to `value`."""
        return Table({**self._items, key: value})

    def drop(self, key: K) -> Table[K, V]:
        """The same table without `key`, which may be absent."""
        return Table({k: v for k, v in self._items.items() if k != key})
