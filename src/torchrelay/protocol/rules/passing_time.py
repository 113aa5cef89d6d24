"""Passing time: what the rules make of time that went by, and of time that the clock has left out."""

from __future__ import annotations

from dataclasses import replace

from torchrelay.protocol.messages import events as ev
from torchrelay.protocol.model.state import Cluster
from torchrelay.protocol.model.table import Table


def tick(cluster: Cluster, event: ev.Tick) -> Cluster:
    """Only time passed: what is due is done by `settle`."""
    del event
    return cluster


def time_left_out(cluster: Cluster, event: ev.TimeLeftOut) -> Cluster:
    """For the ledger only. No deadline hears of it."""
    jobs = cluster.jobs.items()
    later = Table((name, replace(job, left_out_ms=job.left_out_ms + event.ms)) for name, job in jobs)
    return replace(cluster, jobs=later)
