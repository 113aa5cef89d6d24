"""Layouts: which nodes hold the same part of the state, and so whether a lost one can be had from another.

A node stands for its GPUs: what is split within a node is of no account, as nodes are lost whole. `replicas` copies of
the state are spread over the nodes; node i holds part `i % (nodes / replicas)`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchrelay.economics.formulas.rates import GPUS_PER_NODE, Unreasonable, unreasonable_value

KNOWN = "ddp, fsdp, hsdp=REPLICAS, or degrees as in tp=8,pp=4 (the rest is data parallel, or fsdp)"


@dataclass(frozen=True)
class Layout:
    """How the state lies on the nodes."""

    name: str
    nodes: int
    replicas: int  # of each part, on as many nodes

    @property
    def parts(self) -> int:
        """How many nodes one copy of the state takes."""
        return self.nodes // self.replicas

    def part(self, node: int) -> int:
        """Which part of the state the node in this place holds."""
        return node % self.parts

    def peers(self, node: int) -> range:
        """The places that hold the same part, this one included."""
        return range(self.part(node), self.nodes, self.parts)

    def covered(self, lost: set[int]) -> bool:
        """Whether each part has a holder left when these places are lost at the same time."""
        return all(any(peer not in lost for peer in self.peers(node)) for node in lost)


def layout_of(text: str, gpus: int, gpus_per_node: int = GPUS_PER_NODE) -> Layout:
    """A layout as it is written. Raises `Unreasonable`, naming what does not fit."""
    if gpus < 1 or gpus % gpus_per_node:
        raise unreasonable_value("gpus", gpus, f"nodes have {gpus_per_node} GPUs, so give a multiple of that")
    nodes = gpus // gpus_per_node
    degrees: dict[str, int] = {}
    for word in text.split(","):
        found = re.fullmatch(r"(ddp|fsdp|hsdp|tp|pp|cp|ep)(?:=([1-9]\d{0,6}))?", word.strip())
        if found is None or (found[1] in ("ddp", "fsdp")) != (found[2] is None):
            raise unfit(text, f"{word.strip()!r} is not known; give {KNOWN}")
        if found[1] in degrees:
            raise unfit(text, f"{found[1]} is there twice")
        degrees[found[1]] = int(found[2] or 1)
    if sum(name in degrees for name in ("ddp", "fsdp", "hsdp")) > 1:
        raise unfit(text, "ddp, fsdp and hsdp exclude one another")
    return Layout(text, nodes, replicas_of(degrees, text, gpus, nodes, gpus_per_node))


def replicas_of(degrees: dict[str, int], text: str, gpus: int, nodes: int, gpus_per_node: int) -> int:
    """How many nodes hold each part. Context parallel ranks hold equal weights, but the copies are counted by node."""
    model = degrees.get("tp", 1) * degrees.get("pp", 1) * degrees.get("ep", 1)
    ranks = model * degrees.get("cp", 1)
    if gpus % ranks:
        raise unfit(text, f"a group takes {ranks} GPUs, and {gpus} are no multiple of that")
    copies = gpus // model
    if "fsdp" in degrees:
        copies = 1
    elif "hsdp" in degrees:
        if copies % degrees["hsdp"]:
            raise unfit(text, f"{copies} ranks cannot be split into {degrees['hsdp']} replicas")
        copies = degrees["hsdp"]
    # A copy smaller than a node is on each node; one that takes several is on one in so many.
    per_copy = max(1, -(-gpus // copies // gpus_per_node))
    if nodes % per_copy:
        raise unfit(text, f"one copy takes {per_copy} nodes, and {nodes} are no multiple of that")
    return nodes // per_copy


def unfit(text: str, why: str) -> Unreasonable:
    """The refusal of a layout."""
    return Unreasonable("layout", f"layout {text!r}: {why}", why)
