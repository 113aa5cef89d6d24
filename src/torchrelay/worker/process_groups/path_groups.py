"""Path groups: process groups over several network paths (`torchrelay.netpath`), in the hands of a reconfigure.

They need no swap: the group itself is ours. Alone, its collectives do nothing. A reconfigure breaks its connections and
lets it meet the others at another store, as the same object. Connections are made when they are first used.

A script asks for the backend "torchrelay" by name; or the launcher does, in the place of Gloo (`run --net-failover`).
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from torch._C._distributed_c10d import ProcessGroup, Store

PATHS = "torchrelay"  # the backend's name
INSTEAD = "TORCHRELAY_CPU_BACKEND"  # the backend that Gloo's groups on the CPU get
_ADDRESSES = "TORCHRELAY_NET_PATHS"
_MODULE = "torchrelay.netpath.backend"
LOOPBACK = "127.0.0.1"


def chosen(backend: str, kinds: dict[str, tuple[str, ...]], gloo: str) -> bool:
    """Whether a group of this backend is to be a path group. `kinds`: kind of backend -> types of device."""
    return PATHS in kinds or (backend == gloo and os.environ.get(INSTEAD) == PATHS)


def prepare(host: str | None) -> Any:
    """The backend's module, registered with torch. Listens where Gloo would, unless the operator says otherwise.

    Raises `torchrelay.netpath.native.library.NotBuilt` if the native part is missing.
    """
    os.environ.setdefault(_ADDRESSES, host or LOOPBACK)
    module = importlib.import_module(_MODULE)
    module.make_alone(True)
    return module


def is_path_group(group: ProcessGroup) -> bool:
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(group, module.TorchrelayGroup)


def meet(group: Any, store: Store) -> None:
    """Break off what there is, and connect at this store. Raises `torch.distributed.DistBackendError`."""
    group.connect(store)
