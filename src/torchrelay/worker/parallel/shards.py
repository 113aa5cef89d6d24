"""Shards: of a DTensor a rank holds a part, its local tensor; only that part is carried, and its place is told with it.

A DTensor that the source has and this rank has not (an optimizer's state before its first step) is made here on the
mesh that the script has built: meshes are known by the names and sizes of their dimensions, which must tell them apart.
torch's DTensor is not imported for those who do not use it: that takes a second.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from msgspec import Struct

SHARD, STRIDED, REPLICATE = "S", "SS", "R"  # of a placement's description


class Described(Struct, array_like=True, frozen=True):
    """What makes a DTensor of a local tensor. Plain values: it travels."""

    mesh: str  # by `name_of`
    placements: tuple[tuple[str | int, ...], ...]
    shape: tuple[int, ...]  # of the whole tensor, over all ranks
    strides: tuple[int, ...]
    at: tuple[int, ...]  # which part it is: the place in each dimension of the mesh, 0 where it is replicated


def is_shard(tensor: Any) -> bool:
    """Whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that lies on this rank, the same memory; any other tensor is its own part."""
    if not is_shard(tensor):
        return tensor
    part: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]  # to_local() would make a view with a graph
    return part


def version(tensor: torch.Tensor) -> int:
    """How often its memory was written to. A DTensor's own count does not tell: updates write to the local tensor."""
    return local(tensor)._version


def refusal(tensor: Any) -> str | None:
    """Why this DTensor cannot be carried; None if it can."""
    for placement in tensor.placements:
        if _describe(placement) is None:
            return f"is a DTensor with the placement {placement}: redistribute it to Shard or Replicate"
    part = local(tensor)
    if type(part) is not torch.Tensor:
        return f"is a DTensor of a {type(part).__name__}: only plain dense tensors are carried"
    return None


def describe(tensor: Any) -> Described:
    """What a replacement needs to make this DTensor of its local part. Raises `TypeError` if it cannot be told."""
    placements = [_describe(placement) for placement in tensor.placements]
    if None in placements:
        raise TypeError(refusal(tensor))
    told = tuple(placement for placement in placements if placement is not None)
    mesh = tensor.device_mesh
    here = mesh.get_coordinate() or [-1] * mesh.ndim  # a rank that is not in the mesh has a part of nothing
    at = tuple(0 if placement == (REPLICATE,) else place for placement, place in zip(told, here, strict=True))
    return Described(name_of(mesh), told, tuple(tensor.shape), tuple(tensor.stride()), at)


def of_local(part: torch.Tensor, described: Described, mesh: Any) -> torch.Tensor:
    """The DTensor on this mesh whose local part is `part`, the same memory, wherever it is. No communication.

    Not by from_local(), which would move a part that was offloaded to the CPU onto the mesh's device: a copy.
    Raises `ValueError` if it would be another part of the whole here.
    """
    from torch.distributed.tensor import DTensor  # the script has: there is a mesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    placements = tuple(_placement(told) for told in described.placements)
    meta = TensorMeta(torch.Size(described.shape), described.strides, part.dtype)
    make: Any = DTensor
    made: torch.Tensor = make(part, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)
    if describe(made) != described:
        raise ValueError(f"it is the part at {described.at} of the whole, and this rank is at {describe(made).at}")
    return made


def like(tensor: Any, part: torch.Tensor) -> torch.Tensor:
    """A tensor as `tensor`, whose local part is `part`."""
    return of_local(part, describe(tensor), tensor.device_mesh) if is_shard(tensor) else part


def placed_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are spread in the same way, or not at all."""
    if is_shard(one) and is_shard(other):
        return bool(one.placements == other.placements)  # type: ignore[attr-defined]
    return is_shard(one) == is_shard(other)


def name_of(mesh: Any) -> str:
    """By which a mesh is known on other ranks: 'dp_replicate=2,dp_shard=4'."""
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    # Not mesh.mesh.shape: torch then makes a tensor of all ranks, and this is asked for each DTensor.
    return ",".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))


def meshes(tensors: Iterable[torch.Tensor]) -> dict[str, Any]:
    """The meshes of these tensors by their names. Raises `ValueError` if two have the same name."""
    found: dict[str, Any] = {}
    for tensor in filter(is_shard, tensors):
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        if found.setdefault(name_of(mesh), mesh) != mesh:
            raise ValueError(f"two device meshes look alike ({name_of(mesh)}): give their dimensions names that differ")
    return found


def _describe(placement: Any) -> tuple[str | int, ...] | None:
    """By class, as a strided shard is a shard, too, in some versions of torch."""
    kind = type(placement).__name__
    if kind == "Shard":
        return SHARD, int(placement.dim)
    if kind == "_StridedShard":
        return STRIDED, int(placement.dim), int(placement.split_factor)
    return (REPLICATE,) if kind == "Replicate" else None


def _placement(told: tuple[str | int, ...]) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    match told:
        case ("R",):
            return Replicate()
        case ("S", int(dim)):
            return Shard(dim)
        case ("SS", int(dim), int(factor)):
            return _StridedShard(dim, split_factor=factor)
    raise ValueError(f"{told!r} is no placement")
