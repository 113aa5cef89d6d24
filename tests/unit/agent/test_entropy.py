"""An unseeded script draws by its rank and job, whichever process holds the rank."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy
import pytest
import torch
from msgspec import structs

from torchrelay.agent.workers.processes import base_environment
from torchrelay.wire.files.launch import Launch
from torchrelay.worker.bootstrap.main import Entropy


@pytest.fixture(autouse=True)
def states() -> Iterator[None]:
    """The test's own random states, put back afterwards."""
    kept = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(kept[0])
    numpy.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


def draw() -> tuple[float, float, float]:
    return float(torch.rand(1)), random.random(), float(numpy.random.random())


def process(rank: int, secret: bytes = b"secret", before: object = None) -> tuple[float, float, float]:
    """What an unseeded script draws in a new process that becomes this rank."""
    torch.seed()
    random.seed()
    numpy.random.seed()
    entropy = Entropy(secret)
    if callable(before):
        before()
    entropy.belong_to(rank)
    return draw()


def test_who_takes_a_rank_over_draws_what_its_predecessor_drew() -> None:
    assert process(1) == process(1)


def test_ranks_and_jobs_draw_differently() -> None:
    found = [process(0), process(1), process(2), process(0, b"another")]
    for kind in range(3):
        assert len({one[kind] for one in found}) == 4


def test_what_the_script_has_seeded_is_its_own() -> None:
    def seed() -> None:
        torch.manual_seed(7)
        random.seed(7)
        numpy.random.seed(7)

    seed()
    assert process(0, before=seed) == process(1, before=seed)
    seed()
    assert process(2, before=seed) == draw_after(seed)


def draw_after(seed: object) -> tuple[float, float, float]:
    if callable(seed):
        seed()
    return draw()


def test_what_was_drawn_before_the_rank_was_known_is_gone_on_with() -> None:
    def begin() -> None:
        torch.rand(3)
        random.random()
        numpy.random.random(3)

    assert process(1, before=begin) == process(1, before=begin)


def test_all_processes_of_a_run_come_to_the_same_order_of_a_set() -> None:
    launch = Launch(script="train.py", cwd="/", nproc_per_node=2, master_port=29500)
    found = [base_environment(one, "127.0.0.1")["PYTHONHASHSEED"] for one in (launch, launch)]
    assert found[0] == found[1]
    assert 0 <= int(found[0]) < 1 << 32
    assert base_environment(structs.replace(launch, master_port=1), "127.0.0.1")["PYTHONHASHSEED"] != found[0]
    given = structs.replace(launch, env={"PYTHONHASHSEED": "0"})
    assert base_environment(given, "127.0.0.1")["PYTHONHASHSEED"] == "0"


def test_torchs_watchdog_leaves_a_broken_communicator_to_us_unless_the_operator_wants_it() -> None:
    launch = Launch(script="train.py", cwd="/", nproc_per_node=2, master_port=29500)
    found = base_environment(launch, "127.0.0.1")
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == found["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"
    given = structs.replace(launch, env={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"})
    assert base_environment(given, "127.0.0.1")["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
