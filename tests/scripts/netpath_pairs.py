"""What tests let one puppet do with groups that have all their ranks in it: each a thread, each with the same store."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.scripts.groups_ranks import Actions
from torchrelay.netpath.backend import TorchrelayGroup
from torchrelay.netpath.transport import mesh

ENDS_S = 10.0  # nothing here takes longer, whatever happens
HANGS = "it hangs"
LARGE = 100_000  # elements that go round the ring


def pair(store: Any = None, timeout_s: float = 2.0, size: int = 2) -> list[TorchrelayGroup]:
    store = dist.HashStore() if store is None else store
    return [TorchrelayGroup(store, rank, size, timedelta(seconds=timeout_s), "pair") for rank in range(size)]


def on_each(groups: list[TorchrelayGroup], do: Callable[[TorchrelayGroup, int], Any]) -> list[Any]:
    """What each rank gets: the result, the words of an error, or `HANGS`."""
    found: list[Any] = [HANGS] * len(groups)

    def run(rank: int) -> None:
        try:
            found[rank] = do(groups[rank], rank)
        except Exception as error:  # noqa: BLE001  the test looks at it
            found[rank] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ENDS_S)
    return found


# ---------------------------------------------------------------- tensors that are others seen through a conjugation


def conjugates(_a: Actions) -> list[bool]:
    """Whether their values are sent and received, and not what lies in memory."""
    plain = torch.complex(torch.arange(float(LARGE)), torch.ones(LARGE))
    wanted = plain.conj().resolve_conj()

    def broadcast(group: TorchrelayGroup, rank: int) -> torch.Tensor:
        mine = plain.clone().conj() if rank == 0 else torch.zeros(LARGE, dtype=plain.dtype).conj()
        group.broadcast([mine], 0).wait()
        return mine

    def message(group: TorchrelayGroup, rank: int) -> torch.Tensor:
        mine = plain.clone().conj() if rank == 0 else torch.zeros(LARGE, dtype=plain.dtype)
        (group.send([mine], 1) if rank == 0 else group.recv([mine], 0)).wait()
        return mine

    def negative(group: TorchrelayGroup, rank: int) -> torch.Tensor:
        mine = plain.clone().conj().imag if rank == 0 else torch.zeros(LARGE)
        group.broadcast([mine], 0).wait()
        return torch.complex(wanted.real, mine)

    groups = pair()
    return [torch.equal(one, wanted) for do in (broadcast, message, negative) for one in on_each(groups, do)]


# ---------------------------------------------------------------- messages


def tags(_a: Actions) -> list[str]:
    """What is said of tags that cannot be."""
    said = []
    groups = pair()
    for tag in (-1, -2, 1 << 31):
        for do in (groups[0].send, groups[0].recv):
            try:
                do([torch.ones(1)], 1, tag)
            except ValueError as error:
                said.append(str(error))
        try:
            groups[0].recv_anysource([torch.ones(1)], tag)
        except ValueError as error:
            said.append(str(error))
    return said


class LostStore:
    """A store that is gone after all have met."""

    def __init__(self) -> None:
        self._kept = dist.HashStore()

    def set(self, key: str, value: str) -> None:
        self._kept.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._kept.get(key))

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError(f"the store of {', '.join(keys)} is gone")


def without_a_store(_a: Actions) -> list[Any]:
    return on_each(pair(LostStore()), lambda group, rank: group.send([torch.ones(2)], 1 - rank).wait())


def to_oneself(_a: Actions) -> list[Any]:
    """How sending ends when the receiver has no room, and when nobody receives and the group is aborted."""

    def no_room(group: TorchrelayGroup, rank: int) -> str:
        sent, received = group.send([torch.ones(4)], rank), group.recv([torch.ones(3)], rank)
        sent._ended.wait(ENDS_S / 2)
        received._ended.wait(ENDS_S / 2)
        return f"{sent.exception()}; {received.exception()}"

    def nobody(group: TorchrelayGroup, rank: int) -> None:
        sent = group.send([torch.ones(4)], rank, 5)
        group.abort()
        sent.wait()

    return [*on_each(pair(size=1), no_room), *on_each(pair(size=1), nobody)]


# ---------------------------------------------------------------- the end


def last_words(_a: Actions) -> list[Any]:
    """A rank ends when it has done its part of a broadcast, and another comes to it much later."""
    mesh.LAST_WORDS_S = 0.0
    groups = pair(timeout_s=ENDS_S)
    on_each(groups, lambda group, _: group.barrier().wait())
    late = threading.Event()

    def do(group: TorchrelayGroup, rank: int) -> Any:
        values = torch.full((3,), 7.0 * (1 - rank))
        if rank == 0:
            group.broadcast([values], 0).wait()
            ending = threading.Thread(target=group.shutdown, daemon=True)
            ending.start()
            ending.join(0.3)  # it would be over long ago
            late.set()
            ending.join(ENDS_S)
            return "ended" if not ending.is_alive() else HANGS
        late.wait()
        group.broadcast([values], 0).wait()
        return values.tolist()

    return on_each(groups, do)


class NoStore(LostStore):
    """A store that is gone before all have met."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError(f"there is no store for {key}: {value[:1]}")


def not_connected_anew(_a: Actions) -> list[Any]:
    """What a group does that could not be connected anew; then it can."""
    groups = pair()
    on_each(groups, lambda group, _: group.barrier().wait())
    first = on_each(groups, lambda group, _: group.connect(NoStore()))
    second = on_each(groups, lambda group, _: group.barrier().wait())
    store = dist.HashStore()
    on_each(groups, lambda group, _: group.connect(store))
    return [*first, *second, *on_each(groups, lambda group, _: group.barrier().wait())]


def dropped(_a: Actions) -> tuple[list[str], Any]:
    """A group is dropped where a message of its has come: what goes wrong, and what the other rank is told."""
    wrong: list[str] = []
    sys.unraisablehook = lambda about: wrong.append(repr(about.exc_value))
    first, *second = pair(timeout_s=ENDS_S)
    second[0].send([torch.ones(1)], 0)
    first.recv([torch.zeros(1)], 1).wait()  # they know one another
    received = second[0].recv([torch.zeros(1)], 0)
    then = received.get_future().then(lambda _: second.clear())
    waiting = first.recv([torch.zeros(1)], 1)
    first.send([torch.ones(1)], 1).wait()
    then.wait()
    del received, then
    return wrong, on_each([first], lambda *_: waiting.wait())[0]


def one_is_missing(_a: Actions, others_s: float) -> str:
    """Whom a monitored barrier of eight names if all have come but rank 1. `others_s`: the patience of ranks 2 to 7."""
    groups = pair(size=8)

    def do(group: TorchrelayGroup, rank: int) -> None:
        if rank != 1:
            group.monitored_barrier(timedelta(seconds=others_s if rank else 4.0), wait_all_ranks=True)

    return str(on_each(groups, do)[0])


def spread_out(_a: Actions) -> list[Any]:
    """A root broadcasts one element that is seen as many."""

    def do(group: TorchrelayGroup, rank: int) -> list[float]:
        mine = torch.ones(1).expand(5) if rank == 0 else torch.zeros(5)
        group.broadcast([mine], 0).wait()
        return mine.tolist()

    return on_each(pair(), do)
