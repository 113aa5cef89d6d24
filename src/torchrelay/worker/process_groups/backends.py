"""Making the backends of process groups: pretended while a replacement is alone, real ones that we can break.

torch makes every group in one function. We stand in its place: a group is first made with a fake backend, under the
name of the real one, so that `new_group`, DDP and DeviceMesh work with nobody else there. Its real backends are put in
at the next reconfigure; or at once, if this process is connected already.
"""

from __future__ import annotations

import json
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.testing._internal.distributed.fake_pg  # registers the fake backend
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Backend, PrefixStore, ProcessGroup, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from torchrelay.errors import RefusedError
from torchrelay.worker.process_groups import foreign, path_groups
from torchrelay.worker.process_groups.abandon import await_unless_broken
from torchrelay.worker.process_groups.aborts import Aborts
from torchrelay.worker.process_groups.counts import GLOO, Counts
from torchrelay.worker.process_groups.foreign import NCCL, OURS
from torchrelay.worker.process_groups.path_groups import PATHS
from torchrelay.worker.process_groups.sockets import Address, Ours, listening_addresses
from torchrelay.worker.process_groups.swap import Swap

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"

# What torch's type stubs do not tell.
_Gloo: Any = _distributed_c10d.ProcessGroupGloo
_Nccl: Any = getattr(_distributed_c10d, "ProcessGroupNCCL", None)
_c10d: Any = c10d


@dataclass(frozen=True)
class Wiring:
    """What must be remembered of a group to make its backends again."""

    name: str
    ranks: tuple[int, ...]  # global ranks, in the order of the group
    rank: int  # in the group
    kinds: Mapping[str, tuple[str, ...]]  # kind of backend -> types of device that it serves
    timeout: timedelta
    default: bool = False  # whether it is the default group
    description: str = "undefined"
    devices: tuple[Any, ...] = field(default=(), compare=False)  # Gloo's, kept from generation to generation
    nccl_options: Any = field(default=None, compare=False)

    @property
    def main_kind(self) -> str:
        """The kind that torch takes for what has no device."""
        return next((kind for kind in (NCCL, PATHS) if kind in self.kinds), GLOO)


class Backends:
    """Makes groups and their backends. One per process: it stands behind torch's name from `install` on."""

    def __init__(self, ours: Ours, swap: Callable[[], Swap], aborts: Aborts) -> None:
        self.alone = True
        self.protects = False  # the script has joined: what cannot be reconfigured is refused from now on
        self.host: str | None = None  # None: the interface named by GLOO_SOCKET_IFNAME, else loopback
        self._ours = ours
        self._swap = swap
        self._make_torchs: Any = None  # torch's own function
        self._wirings: weakref.WeakKeyDictionary[ProcessGroup, Wiring] = weakref.WeakKeyDictionary()
        self._aborts = aborts
        self.counts = Counts()

    # ------------------------------------------------------------ in torch's place

    def install(self) -> None:
        """Stand in the place of torch's function. Does nothing the second time.

        Raises `ValueError` if torch was asked to wrap backends: the wrapper would have to be connected, too.
        """
        if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
            raise ValueError(
                "TORCH_DISTRIBUTED_DEBUG=DETAIL wraps groups so that they cannot be reconfigured: use INFO"
            )
        if os.environ.pop("TORCH_DIST_INIT_BARRIER", None):
            log.info(
                "TORCH_DIST_INIT_BARRIER is dropped: a replacement is alone, and a reconfigure proves its connections"
            )
        if self._make_torchs is None:
            self._make_torchs = _c10d._new_process_group_helper
            _c10d._new_process_group_helper = self._make

    def prepare(self, backend: str | None) -> None:
        """Before torch looks up the name of a path group's backend: see that it knows it."""
        if backend == PATHS or os.environ.get(path_groups.INSTEAD):
            path_groups.prepare(self.host)

    def _make(
        self,
        size: int,
        rank: int,
        ranks: list[int],
        backend: str,
        store: Store,
        group_name: GroupName,
        backend_options: Any = None,
        timeout: timedelta | None = None,
        pg_tag: Any = None,
        device_id: Any = None,
        group_desc: str | None = None,
    ) -> tuple[ProcessGroup, Store]:
        """A group as torch makes it, with a fake backend of the real one's name. `ranks` is empty for the default.

        No group is bound to a device: torch would then split NCCL's communicators, which no reconfigure can repeat.
        """
        assert timeout is not None, "torch makes no group without a timeout"
        self.prepare(backend)
        config = c10d.BackendConfig(c10d.Backend(backend))
        if foreign.is_foreign(repr(config)):
            if self.protects and foreign.communicates(repr(config), size):
                raise RefusedError(*foreign.refusal(repr(config), size))
            return self._make_torchs(  # type: ignore[no-any-return]
                size, rank, ranks, backend, store, group_name, backend_options, timeout, pg_tag, device_id, group_desc
            )
        kinds = kinds_of(repr(config))
        if path_groups.chosen(backend, kinds, GLOO):
            return self._make_path_group(size, rank, ranks, store, group_name, timeout, pg_tag, group_desc)
        fake = ",".join(f"{device}:fake" for device in config.get_device_backend_map())
        made = self._make_torchs(size, rank, ranks, fake, store, group_name, None, timeout, pg_tag, None, group_desc)
        group, meeting = made
        if not isinstance(group, ProcessGroup) or group in self._wirings:
            return made  # type: ignore[no-any-return]  # no member, or made before under this tag
        _c10d._world.pg_map[group] = (c10d.Backend(backend), meeting)
        _c10d._world.pg_backend_config[group] = repr(config)
        members = tuple(ranks) or tuple(range(size))
        wiring = Wiring(
            str(group_name),
            members,
            rank,
            kinds,
            timeout,
            not ranks,
            group_desc or "undefined",
            nccl_options=backend_options,
        )
        self._note_made(group, wiring, meeting)
        return group, meeting

    def _note_made(self, group: ProcessGroup, wiring: Wiring, meeting: Store) -> None:
        """A group with a fake backend was made: it is ours to connect, now if we are connected."""
        group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        self._wirings[group] = wiring
        if not self.alone:
            self._connect_later(group, wiring, meeting)

    def _make_path_group(
        self,
        size: int,
        rank: int,
        ranks: list[int],
        store: Store,
        group_name: GroupName,
        timeout: timedelta,
        pg_tag: Any,
        group_desc: str | None,
    ) -> tuple[ProcessGroup, Store]:
        """A group over the paths of the machine. It is alone until it is connected."""
        made = self._make_torchs(size, rank, ranks, PATHS, store, group_name, None, timeout, pg_tag, None, group_desc)
        group, meeting = made
        if not isinstance(group, ProcessGroup) or group in self._wirings:
            return made  # type: ignore[no-any-return]  # no member, or made before under this tag
        members, about = tuple(range(size)) if not ranks else tuple(ranks), group_desc or "undefined"
        wiring = Wiring(str(group_name), members, rank, {PATHS: ("cpu",)}, timeout, not ranks, about)
        self._wirings[group] = wiring
        self._aborts.add(group, blocks=False)
        if not self.alone:
            self.put(group, wiring, {}, meeting)
        return group, meeting

    def _connect_later(self, group: ProcessGroup, wiring: Wiring, meeting: Store) -> None:
        """Connect a group that the script makes while we are connected: the members tell where they listen."""
        wiring = self._wirings[group] = self._equip(wiring)
        timeout_s = wiring.timeout.total_seconds()

        def connect() -> dict[str, Backend]:
            self._ours.add_peers(self.exchange(meeting, wiring.rank, range(len(wiring.ranks))))
            return self.connect(wiring, meeting)

        self.put(group, wiring, await_unless_broken(connect, timeout_s, f"connecting group {wiring.name}"), meeting)

    # ------------------------------------------------------------ what there is

    def survey(self) -> dict[ProcessGroup, Wiring]:
        """All groups that this rank belongs to, default group first, and what they need to be connected.

        Groups of other backends that talk to nobody are let be. Raises `ValueError` for one that does.
        """
        let_be = {group for group, config in foreign.groups() if not foreign.communicates(config, group.size())}
        return {group: self._wiring_of(group) for group in _c10d._world.pg_map if group not in let_be}

    def _wiring_of(self, group: ProcessGroup) -> Wiring:
        wiring = self._wirings.get(group)
        if wiring is None:  # made by another way than ours, like split_group
            members = _c10d._world.pg_group_ranks[group]
            ranks = tuple(sorted(members, key=members.__getitem__))
            kinds = kinds_of(_c10d._world.pg_backend_config[group])
            name = _c10d._world.pg_names[group]
            about = group.group_desc
            wiring = Wiring(name, ranks, group.rank(), kinds, _c10d.default_pg_timeout, description=about)
        live = self._live_options(group, wiring)
        if live is not None:  # the script may have changed it since
            wiring = replace(wiring, timeout=live._timeout)
        wiring = self._wirings[group] = self._equip(wiring)
        return wiring

    def timeout_s(self, group: ProcessGroup) -> float:
        """How long a collective of this group may take, as of the last survey."""
        return self._wirings[group].timeout.total_seconds()

    def _live_options(self, group: ProcessGroup, wiring: Wiring) -> Any:
        """The options of the group's real backend; None if it has none now."""
        try:
            backend: Any = group._get_backend(torch.device(wiring.kinds[wiring.main_kind][0]))
        except RuntimeError:  # taken out, by a reconfigure that failed
            return None
        real = isinstance(backend, _Gloo) or (_Nccl is not None and isinstance(backend, _Nccl)) or backend is group
        return backend.options if real else None

    def _equip(self, wiring: Wiring) -> Wiring:
        """The same with Gloo devices, if it needs and does not have them."""
        if GLOO not in wiring.kinds or wiring.devices:
            return wiring
        return replace(wiring, devices=self._new_devices())

    # ------------------------------------------------------------ real backends

    def _new_devices(self) -> tuple[Any, ...]:
        """Gloo devices at our host: each listens at an address of its own. Raises `RuntimeError` for a bad host."""
        before = listening_addresses()
        names = os.environ.get("GLOO_SOCKET_IFNAME") if self.host is None else None
        if names:
            made = [_Gloo.create_device(interface=name, lazy_init=False) for name in names.split(",")]
        else:
            made = [_Gloo.create_device(hostname=self.host or LOOPBACK, lazy_init=False)]
        self._ours.add_devices(listening_addresses() - before)
        return tuple(made)

    def exchange(self, store: Store, rank: int, ranks: Iterable[int]) -> frozenset[Address]:
        """Tell where our devices listen, and learn where those of `ranks` do."""
        store.set(f"devices/{rank}", json.dumps(sorted(self._ours.devices)))
        told = store.multi_get([f"devices/{other}" for other in ranks])
        return frozenset((str(name), int(port)) for text in told for name, port in json.loads(text))

    def connect(self, wiring: Wiring, meeting: Store) -> dict[str, Backend]:
        """Real backends for a group, by kind, connected to all its members. Blocks; see `await_unless_broken`."""
        connected: dict[str, Backend] = {}
        for kind in wiring.kinds:
            if kind == PATHS:
                continue  # it connects as soon as it is used
            store = PrefixStore(kind, meeting)
            if kind == GLOO:
                backend = gloo(store, wiring)
            else:
                backend = nccl(store, wiring)
                self._aborts.add(backend, blocks=True)
            options: Any = backend.options
            # As torch does: the default group's list is empty. Flight recorders and debuggers read it.
            options.global_ranks_in_group = [] if wiring.default else list(wiring.ranks)
            options.group_name = GroupName(wiring.name)
            backend._set_sequence_number_for_group()
            connected[kind] = backend
        return connected

    def put(self, group: ProcessGroup, wiring: Wiring, backends: Mapping[str, Backend], meeting: Store) -> None:
        """Give the group these backends, and torch the store at which groups made from it will meet."""
        counts: tuple[Any, ...] = tuple(backends.values())
        aside = 0
        if PATHS in wiring.kinds:
            path_groups.meet(group, PrefixStore(PATHS, meeting))
            counts = (group,)
            aside = self._begun(group)  # in all generations before
        else:
            for kind, devices in wiring.kinds.items():
                self._swap().put(group, devices, kind, backends[kind], meeting, main=kind == wiring.main_kind)
        group._set_group_name(GroupName(wiring.name))  # the backends keep it, and functional collectives need it
        group._set_group_desc(wiring.description)
        name, _ = _c10d._world.pg_map[group]
        _c10d._world.pg_map[group] = (name, meeting)
        self.counts.add(group, wiring, counts, aside=aside)

    @staticmethod
    def _begun(group: Any) -> int:
        """How many collectives a path group has begun."""
        return int(group._get_sequence_number_for_group())

    def take(self, group: ProcessGroup) -> Callable[[], object]:
        """Take the group's backends out; the result lets go of them. A path group does that when it connects anew."""
        return (lambda: None) if path_groups.is_path_group(group) else self._swap().take(group)


def kinds_of(config: str) -> dict[str, tuple[str, ...]]:
    """Of 'cpu:gloo,cuda:nccl': which kind of backend serves which types of device.

    Raises `ValueError` for a kind that cannot be reconfigured.
    """
    kinds: dict[str, tuple[str, ...]] = {}
    for pair in config.split(","):
        device, _, kind = pair.partition(":")
        if kind not in OURS:
            raise ValueError(f"backend '{kind}' cannot be reconfigured: use gloo, nccl or {PATHS}")
        kinds[kind] = (*kinds.get(kind, ()), device)
    if PATHS in kinds and len(kinds) > 1:
        raise ValueError(f"backend '{PATHS}' stands alone: torch takes the whole group from it")
    return kinds


def gloo(store: Store, wiring: Wiring) -> Backend:
    """A connected Gloo backend on the group's devices, with the group's timeout.

    Sends and receives wait as long as its connecting may take; whoever waits for that has a deadline of its own.
    """
    options = _Gloo._Options()
    options._devices = list(wiring.devices)
    options._timeout = wiring.timeout
    backend: Backend = _Gloo(store, wiring.rank, len(wiring.ranks), options)
    return backend


def nccl(store: Store, wiring: Wiring) -> Backend:
    """An NCCL backend with the script's options. It connects at its first collective."""
    options = _Nccl.Options() if wiring.nccl_options is None else wiring.nccl_options
    options._timeout = wiring.timeout
    options.split_from = None  # the communicator that it was split from is gone
    backend: Backend = _Nccl(store, wiring.rank, len(wiring.ranks), options)
    return backend
