"""The roll call: that all ranks have made the same groups, known to each rank from a few bytes of the store.

Each group is counted under a digest of its name and ranks; the first of its members to come says how many are still to
come, and each of the others that it has come. When every rank has called, nothing may be missing. Only if something is
do the ranks read what each has called, so that all of them can say which rank lacks which group.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence

from torch._C._distributed_c10d import Store

Groups = Mapping[str, Sequence[int]]  # by name: the ranks of each, the group's own first rank first


def call_roll(store: Store, rank: int, world_size: int, groups: Groups, count: int) -> int:
    """Returns the greatest `count` of all ranks, as soon as all have called: names of groups are counted.

    A group that another rank has not made would never connect: raises `ValueError` with the remedy, on every rank.
    What the store sends to a rank is O(its groups), whatever the number of ranks.
    """
    digests = {digest_of(name, ranks): (name, ranks) for name, ranks in groups.items()}
    mine = json.dumps([secrets.token_hex(4), *digests])  # as no other call is: it would be counted twice
    if store.compare_set(f"called/{rank}", "", mine).decode() != mine:
        raise ValueError(f"rank {rank} has called before in this generation: it is connected in the next one")
    for digest, (name, ranks) in digests.items():
        first = store.add(f"group/{digest}", 1) == 1
        if first:
            store.set(f"ranks/{digest}", json.dumps([name, list(ranks)]))
        store.add("missing", len(ranks) - 1 if first else -1)
    raise_to(store, "count", count)
    if store.add("called", 1) == world_size:
        store.set("complete", str(store.add("missing", 0)))
    if int(store.get("complete")):
        raise ValueError(what_is_missing(store, world_size))
    return int(store.get("count"))


def digest_of(name: str, ranks: Sequence[int]) -> str:
    return hashlib.blake2b(json.dumps([name, list(ranks)]).encode(), digest_size=16).hexdigest()


def raise_to(store: Store, key: str, value: int) -> None:
    """Let this number be at least so great, whoever else raises it now."""
    known = store.compare_set(key, "", str(value)).decode()
    while int(known) < value:
        known = store.compare_set(key, known, str(value)).decode()


def what_is_missing(store: Store, world_size: int) -> str:
    """The first group that one of its ranks has not made, in the order of ranks."""
    called = [json.loads(text) for text in store.multi_get([f"called/{rank}" for rank in range(world_size)])]
    for rank, digests in enumerate(called):
        for digest in digests[1:]:
            name, ranks = json.loads(store.get(f"ranks/{digest}"))
            for member in ranks:
                if digest not in called[member]:
                    return (
                        f"rank {rank} has a group '{name}' of ranks {ranks}, rank {member} has not: "
                        "make all groups before protect()"
                    )
    return "a rank has made a group that others have not: make all groups before protect()"
