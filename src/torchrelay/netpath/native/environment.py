"""What switches the network part on for NCCL and RCCL: environment variables of theirs."""

from __future__ import annotations

import re
from importlib import metadata

from torchrelay.netpath.native.library import find

NAME = "torchrelay"  # by which the plugin is asked for
FAILOVER, RECOVERY = (2, 29, 7), (2, 30, 3)  # the versions of NCCL that have them
_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
# Retries begin after 4.096 us x 2^TIMEOUT, and there are seven: half a second instead of half a minute.
IB_TIMEOUT = 14
_GROUPS = re.compile(r"\w+(,\w+)+(;\w+(,\w+)+)*")


class BadMerge(ValueError):
    """The devices to be merged are not written as NCCL wants them."""


def plugin() -> dict[str, str]:
    """The variables by which NCCL and RCCL take our plugin, and nothing else in its place. Raises `NotBuilt`."""
    return {"NCCL_NET_PLUGIN": str(find()), "NCCL_NET": NAME}


def infiniband(merge: str | None, version: tuple[int, ...] | None) -> dict[str, str]:
    """The variables by which NCCL itself survives the loss of an InfiniBand or RoCE port.

    `merge`: which devices back each other ("mlx5_0,mlx5_1;mlx5_2,mlx5_3"), None: whichever NCCL merges by itself.
    `version`: NCCL's, None: not known. Raises `BadMerge`.
    """
    variables = {"NCCL_IB_RESILIENCY_PORT_FAILOVER": "1"}
    if version is None or version >= RECOVERY:
        variables["NCCL_IB_RESILIENCY_PORT_RECOVERY"] = "1"
    variables["NCCL_IB_TIMEOUT"] = str(IB_TIMEOUT)
    if merge is not None:
        if not _GROUPS.fullmatch(merge):
            raise BadMerge(
                f"'{merge}' names no devices that back each other: write them as mlx5_0,mlx5_1;mlx5_2,mlx5_3"
            )
        variables |= {"NCCL_IB_MERGE_NICS": "1", "NCCL_NET_FORCE_MERGE": merge}
    return variables


def nccl_version() -> tuple[int, ...] | None:
    """The version of NCCL that was installed with torch; None if none was."""
    for package in _PACKAGES:
        try:
            return tuple(int(part) for part in metadata.version(package).split(".")[:3])
        except (metadata.PackageNotFoundError, ValueError):
            continue
    return None
