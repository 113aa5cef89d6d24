"""Descriptors: how many files and connections a process may have open at once."""

from __future__ import annotations

import resource

# More than any job needs. Some programs close every descriptor that they could have, and with the 2^30 that container
# engines allow they would be at it for minutes.
ENOUGH = 65_536


def allow_many() -> int:
    """Raise the soft limit to the hard one, at most to `ENOUGH`; what we start inherits it. Returns the soft limit.

    Whoever reaches a port can fill it with connections. At the usual 1024 that ends a rank: its script cannot open a
    file, and Gloo aborts the process when it cannot accept.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):
        return soft  # a sandbox that does not allow it
    return wanted
