"""Wiring: what becomes of `init_process_group` and `destroy_process_group` in a script under the launcher.

The first asks for the rank, makes the groups with nobody there, and, in a worker of the first start, waits for the
first wiring. The second lets the default group be: the others may need this rank until all have finished.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from torchrelay.errors import RefusedError
from torchrelay.worker.process_groups import foreign, groups
from torchrelay.worker.session import Session
from torchrelay.worker.step.safepoint import Safepoint

destroy_really = dist.destroy_process_group


class Wiring:
    """The script's way to a process group."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def init_process_group(
        self,
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        store: Any = None,
        rank: int = -1,
        group_name: str = "",
        **options: Any,
    ) -> None:
        """As torch's. How ranks find each other is the launcher's affair: `init_method` and `store` are not used.

        A backend that we cannot reconfigure is torch's own affair, all of it; `protect()` refuses it.
        """
        if dist.is_initialized():
            raise ValueError("trying to initialize the default process group twice!")
        session = self._session
        assigned = session.identity.wait()
        if rank not in (-1, assigned.rank) or world_size not in (-1, assigned.world_size):
            raise RefusedError(
                f"init_process_group was given rank {rank} of {world_size}, and this worker is rank {assigned.rank} of "
                f"{assigned.world_size}",
                "leave rank and world_size out, or take them from the environment",
            )
        given = {name: value for name, value in options.items() if value is not None}
        if backend is not None and foreign.is_foreign(repr(c10d.BackendConfig(c10d.Backend(backend)))):
            groups.init_as_torch(
                backend,
                init_method=init_method,
                timeout=timeout,
                world_size=world_size,
                store=store,
                rank=rank,
                group_name=group_name,
                **given,
            )
            return
        groups.init_replacement(
            backend,
            rank=assigned.rank,
            world_size=assigned.world_size,
            timeout=timeout,
            host=session.welcome.host,
            **given,
        )
        if not assigned.replacement:
            Safepoint(session).wire()

    def destroy_process_group(self, group: Any = None) -> None:
        """The default group stays until the process ends; others are destroyed."""
        if group is not None and group is not c10d._get_default_group():
            destroy_really(group)


def install(session: Session) -> None:
    """Put ours in place of torch's two functions, wherever their names were imported to."""
    wiring = Wiring(session)
    replace_everywhere(dist.init_process_group, wiring.init_process_group)
    replace_everywhere(dist.destroy_process_group, wiring.destroy_process_group)


def replace_everywhere(function: Callable[..., Any], by: Callable[..., Any]) -> None:
    """In all modules of torch that hold this function under its name (`init_device_mesh` calls it, too)."""
    name = function.__name__
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.") and vars(module).get(name) is function:
            setattr(module, name, by)
