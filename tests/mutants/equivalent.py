"""Equivalent mutants: changes that change nothing which matters, each with its reason. Nothing else may survive.

A line whose mutant is killed, or is not made any more, fails too.
"""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {
    "cluster:module: 10000 to 20001": "a bound that no sound core comes near",
    "placing:seat_all: any((seat.worker is not None for seat in job.seats.values())) by all": (
        "at a start all ranks have a holder or none has: all are given at once, and a loss takes all away"
    ),
    "speech:job_orders: always cluster.workers.get(seat.worker)": "nobody is named None; it is said for the types",
    "speech:prepare_orders: record is not None and sources without record is not None": (
        "without a record the job falls back before anything is ordered; it is said for the types"
    ),
    "roster:Seat: 0 to 1": "compared with the generation of an interruption only, which is 2 at least",
}
