"""Causes: what a world may do to a job that keeps it from going on without loss."""

from __future__ import annotations

from enum import StrEnum


class Cause(StrEnum):
    """What the world did that may keep a job from going on without loss."""

    NO_REPLICA = "every holder of a shard is gone"
    NODE = "a node is gone, and the buddies of its ranks too"
    FROZEN = "the operator has frozen the job"
    SCRIPT = "the script's own error"
    TWICE = "two workers ended alike at the same point"
    UNDECLARED = "an undeclared collective was cut"
    REFUSED = "the script is refused"
    CANCELLED = "the operator stopped the job"
    NEVER_STARTED = "three starts were hit before anything was committed"
    NEVER_CONNECTS = "connecting fails again and again"
    MISMATCH = "no replica delivers what it has"
    PATIENCE = "a worker lost its patience"
    UNDYING = "a worker cannot be ended"
    DOUBT = "replicas differ, and no majority tells who is right"
