"""A script runs before its rank is known, and waits exactly where it asks for it."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
import torch
from msgspec.structs import replace

from tests.support.identity import assign
from torchrelay.errors import RefusedError
from torchrelay.protocol.messages.ids import Rank
from torchrelay.worker.control import identity
from torchrelay.worker.control.identity import Identity, environment_of


def test_the_variables_are_torchruns() -> None:
    assert environment_of(assign(6)) == {
        "RANK": "6",
        "LOCAL_RANK": "2",
        "GROUP_RANK": "1",
        "ROLE_RANK": "6",
        "WORLD_SIZE": "8",
        "ROLE_WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what an assignment writes."""
    for name in environment_of(assign()):
        monkeypatch.setenv(name, "")


@pytest.mark.usefixtures("environment")
class TestBecomingARank:
    def test_who_waits_goes_on_with_the_assignment(self) -> None:
        me = Identity()
        ranks: list[Rank] = []
        waiter = threading.Thread(target=lambda: ranks.append(me.rank))
        waiter.start()
        assert not me.known
        me.assign(assign(3, replacement=True))
        waiter.join(10)
        assert ranks == [Rank(3)]
        assert me.wait().replacement

    def test_a_repetition_changes_nothing(self) -> None:
        me = Identity()
        me.assign(assign(3, replacement=True))
        me.assign(assign(3, replacement=False))
        assert me.wait().replacement

    def test_who_asks_writes_the_environment(self) -> None:
        """Not who brings the rank: a variable that is set may move what another thread reads from C."""
        me = Identity()
        me.let_environment_wait()
        bringing = threading.Thread(target=lambda: me.assign(assign()))
        bringing.start()
        bringing.join(10)
        assert me.known
        assert os.environ.__class__.__name__ == "_WaitingEnviron"
        read = ctypes.CDLL(None).getenv
        read.restype = ctypes.c_char_p
        assert read(b"RANK") is None
        assert os.environ["RANK"] == "5"
        assert read(b"RANK") == b"5"

    def test_it_becomes_no_other_rank(self) -> None:
        me = Identity()
        me.assign(assign(3))
        with pytest.raises(ValueError, match="is rank 3 and cannot become rank 4"):
            me.assign(assign(4))


def test_this_process_waits_for_nobody() -> None:
    assert type(os.environ).__name__ == "_Environ"


@pytest.mark.parametrize("slot", [0, 2, 3, 9])
def test_the_local_rank_is_the_ranks_own_whatever_slot_it_has_moved_to(slot: int) -> None:
    told = environment_of(replace(assign(6), local_rank=slot))
    assert (told["RANK"], told["LOCAL_RANK"], told["GROUP_RANK"]) == ("6", "2", "1")
    assert int(told["LOCAL_RANK"]) < int(told["LOCAL_WORLD_SIZE"])


class TestDevices:
    def test_the_slots_device_is_found_under_the_local_rank(self) -> None:
        env = {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b,GPU-c"}
        found = identity.arrange(env, 2, 0)
        assert found == {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-b,GPU-a"}

    @pytest.mark.parametrize("listed", [None, "4,5,6,7"])
    def test_no_two_ranks_of_a_node_find_the_same_device(
        self, monkeypatch: pytest.MonkeyPatch, listed: str | None
    ) -> None:
        monkeypatch.setattr(identity, "count", lambda: ["4", "5", "6", "7"])
        env = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
        for slots in ([0, 1], [2, 1], [2, 3], [1, 0], [3, 0]):  # of local ranks 0 and 1, wherever they have gone
            orders = [env | identity.arrange(env, slot, rank) for rank, slot in enumerate(slots)]
            seen = [order.get("CUDA_VISIBLE_DEVICES", "4,5,6,7").split(",") for order in orders]
            assert [seen[rank][rank] for rank in (0, 1)] == [str(4 + slot) for slot in slots]
            assert all(sorted(one) == ["4", "5", "6", "7"] for one in seen), "all stay visible"

    def test_without_devices_or_away_from_them_nothing_is_arranged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(identity, "count", list)
        assert identity.arrange({}, 2, 0) == {}
        assert identity.arrange({"CUDA_VISIBLE_DEVICES": ""}, 2, 0) == {}
        assert identity.arrange({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, 0) == {}
        assert identity.arrange({"CUDA_VISIBLE_DEVICES": "0,1"}, 1, 1) == {}

    def test_cuda_that_was_used_too_early_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        with pytest.raises(RefusedError, match=r"slot 2.*Read RANK"):
            identity.arrange({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 2, 0)
        assert identity.arrange({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 1, 1) == {}
