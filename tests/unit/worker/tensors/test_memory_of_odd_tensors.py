"""No tensor that a script may hold makes a look at it raise, whatever its layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from torchrelay.worker.hidden_state.signatures import contents, glance, glance_into, is_small, signature_of, size_of
from torchrelay.worker.parallel.of_state import is_free, leave_to_state
from torchrelay.worker.tensors import arguments, memory

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # some of them are in beta state
    ODD: dict[str, torch.Tensor] = {
        "coo": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "csc": torch.eye(3).to_sparse_csc(),
        "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
        "mkldnn": torch.zeros(3).to_mkldnn(),
        "jagged": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "quantized": torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
        "meta": torch.zeros(3, device="meta"),
        "expanded": torch.zeros(1).expand(4),
        "conjugated": torch.zeros(4, dtype=torch.complex64).conj(),
        "empty": torch.zeros(0),
    }
LOOKS: dict[str, Callable[[torch.Tensor], object]] = {
    "place": memory.place, "bytes": memory.bytes_in, "held": memory.is_held, "refusal": memory.refusal,
    "signature": signature_of, "small": is_small, "size": size_of, "glance": lambda odd: glance(odd, ""),
    "contents": lambda odd: contents([odd], whole=True), "into": glance_into, "free": is_free,
}  # fmt: skip


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", ODD)
def test_a_look_at_it(kind: str, look: str) -> None:
    LOOKS[look](ODD[kind])


@pytest.mark.parametrize("kind", sorted(ODD.keys() - {"meta", "mkldnn", "expanded", "conjugated"}))
def test_its_digest_is_the_same_for_a_copy(kind: str) -> None:
    assert arguments.digest(ODD[kind]) == arguments.digest(ODD[kind].clone())


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_the_digest_of_a_nested_one_tells_of_its_values(layout: torch.layout) -> None:
    parts = [torch.zeros(2), torch.zeros(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, same = (torch.nested.nested_tensor(parts, layout=layout) for _ in range(2))
        other = torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)], layout=layout)
    assert arguments.digest(one) == arguments.digest(same) != arguments.digest(other)


def test_an_expanded_one_is_filled_as_it_lies() -> None:
    base = torch.zeros(2, 1)
    assert memory.fill(base.expand(2, 3), torch.tensor([[1.0], [2.0]]).expand(2, 3))
    assert base.tolist() == [[1.0], [2.0]]
    assert not memory.fill(base, torch.zeros(3))
    assert not memory.fill(ODD["csr"], torch.zeros(3, 3))


def test_what_is_trained_and_not_of_the_state_is_moved_by_hand() -> None:
    given, own = torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)
    leave_to_state(lambda: ((given.untyped_storage().data_ptr(),), ()))
    try:
        assert is_free(own)
        assert is_free(own), "and when it is asked for again"
        assert not is_free(given)
        assert not is_free(given * 2)
        assert not is_free(torch.zeros(3))
    finally:
        leave_to_state(lambda: ((), ()))
