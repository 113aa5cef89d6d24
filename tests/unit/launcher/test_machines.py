"""The machines of a run, as a command line names them: everything that can be wrong is said before anything starts."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from torchrelay.agent.joining import of_the_machine
from torchrelay.cli.launch.run import plan
from torchrelay.client.runs import NotPossible
from torchrelay.launcher.machines import Host, Machines, by_hand, exported, own_address, parse_hosts, read_hostfile
from torchrelay.launcher.machines_run import encrypting, slots_of
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.wire.files.launch import ENCRYPTING, PRELOAD


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


def host(name: str, slots: int = 0, user: str = "") -> Host:
    return Host(f"{user}{name}", NodeId(name), slots)


def test_hosts_may_have_slots_and_users() -> None:
    assert parse_hosts("a, b:4,me@c.example") == (host("a"), host("b", 4), host("c.example", user="me@"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a,a", "named twice"), ("a,me@a:2", "named twice"), (",", "no host is named"), ("a b", "is no host"),
        ("-oProxyCommand=x", "is no host"), ("a:0", "slots"), ("a;b", "is no host"), ("a:99999", "is no host"),
        ("a..b", "is no host"), ("a.", "is no host"), (".a", "is no host"), ("a" * 64, "is no host"),
        ("_a", "is no host"),
        (".".join(["a" * 60] * 2), "is no host"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_hosts_is_refused(text: str, why: str) -> None:
    with pytest.raises(NotPossible, match=why):
        parse_hosts(text)


def test_a_hostfile_is_read_in_each_of_its_forms(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# mine\na slots=8\nb:4   # old\n\nc slots=2 max_slots=4\nd\n")
    assert read_hostfile(path) == (host("a", 8), host("b", 4), host("c", 2), host("d"))


@pytest.mark.parametrize(
    ("text", "why"),
    [("a slots=none", "2: 'slots=none' is not"), ("a gpus=2", "is not slots=N"), ("a slots=0", "is not slots=N")],
)
def test_a_line_of_a_hostfile_that_makes_no_sense_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"z\n{text}\n")
    with pytest.raises(NotPossible, match=f"hosts:.*{why}" if "2:" not in why else f"hosts:{why}"):
        read_hostfile(path)
    with pytest.raises(NotPossible, match="No such file"):
        read_hostfile(tmp_path / "none")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--hosts", "a", "--hostfile", "f"], "give one of them"), (["--hosts", "a", "--by-hand"], "give one of them"),
        (["--host", "x"], "only with --hosts"), (["--export", "ALL"], "only with --hosts"),
        (["--plain-transfer"], "--plain-transfer: only with --hosts"),
        (["--hosts", "a,b", "--isolate"], "pretends nodes"), (["--hosts", "a,b", "--nnodes", "3"], "2 hosts are named"),
        (["--hosts", "a,b", "--nnodes", "2", "--spare-nodes", "1"], "2 hosts are named"),
        (["--hosts", "a,b:2", "--nproc-per-node", "4"], "b: fewer slots"), (["--by-hand"], "give --host ADDRESS"),
        (["--hosts", "a", "--spare-nodes", "1"], "at least 1"), (["--hosts", "a,b", "--ssh", " "], "--ssh"),
        (["--hosts", "nobody.invalid"], "give --host ADDRESS"),
    ],
)  # fmt: skip
def test_a_command_line_that_makes_no_sense_is_refused(script: str, words: list[str], why: str) -> None:
    with pytest.raises(NotPossible, match=why) as refused:
        plan([*words, script])
    assert refused.value.code == 2
    assert not list(Path().glob("torchrelay-runs/*"))


def test_all_hosts_but_the_spare_ones_hold_ranks(script: str) -> None:
    words = ["--hosts", "a,b,c,d", "--host", "10.0.0.1", "--spare-nodes", "1", "--nproc-per-node", "2", "--spares", "1"]
    made = plan([*words, "--run-dir", "run", script])
    assert made.machines is not None
    assert (made.spec.nodes, made.spec.world_size, made.spec.spares) == (3, 6, 3)
    assert slots_of(made, made.machines) == {"a": 3, "b": 2, "c": 2, "d": 2}


def test_more_hosts_than_are_needed_are_spare_ones(script: str) -> None:
    words = ["--hosts", "a,b:6,c", "--host", "10.0.0.1", "--nnodes", "2", "--nproc-per-node", "4"]
    made = plan([*words, "--run-dir", "run", script])
    assert made.machines is not None
    assert slots_of(made, made.machines) == {"a": 4, "b": 6, "c": 4}


def test_between_machines_it_is_encrypted_unless_the_network_is_trusted(script: str) -> None:
    words = ["--hosts", "a,b", "--host", "10.0.0.1"]
    made = encrypting(plan([*words, "--run-dir", "one", script]))
    assert made.encrypts
    assert set(ENCRYPTING) < set(made.preload)
    plain = plan([*words, "--run-dir", "two", "--plain-transfer", script])
    assert not encrypting(plain).encrypts
    assert encrypting(plain).preload == PRELOAD
    assert any("unencrypted" in remark for remark in plain.remarks)
    alone = plan(["--run-dir", "three", script])
    assert (alone.launch.encrypts, alone.launch.preload) == (False, PRELOAD), "on one machine nothing is"


def test_the_pass_is_in_no_command_line() -> None:
    machines = Machines((host("far", user="me@"), host("localhost")), "10.0.0.1", ("ssh", "-F", "config"))
    words = machines.command(NodeId("far"), 2, "10.0.0.1:4100")
    assert words[:3] == ["ssh", "-F", "config"]
    assert words[-2] == "me@far"
    assert "--token-file - " in words[-1]
    assert words[-1].endswith("--node far --slots 2")
    near = machines.command(NodeId("localhost"), 1, "10.0.0.1:4100")
    assert "ssh" not in near
    assert near[near.index("--token-file") + 1] == "-"


def test_another_command_than_ssh_gets_no_flags_of_ssh() -> None:
    machines = Machines((host("far"),), "10.0.0.1", ("kubectl-exec",))
    assert machines.command(NodeId("far"), 1, "x:1")[:2] == ["kubectl-exec", "far"]


def test_settings_of_libraries_go_to_all_machines_and_places_of_this_one_do_not() -> None:
    here = {"PATH": "/bin", "HOME": "/root", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "MY": "1", "YOURS": "2"}
    assert exported(here, "") == {"NCCL_DEBUG": "INFO"}
    assert exported(here, "MY, none") == {"NCCL_DEBUG": "INFO", "MY": "1"}
    assert exported(here, "ALL") == here


def test_the_address_of_this_machine_is_found_by_the_way_to_another() -> None:
    assert own_address([host("localhost"), host("127.0.0.2")]) == "127.0.0.1"


def test_what_to_type_by_hand_is_said(tmp_path: Path) -> None:
    told = by_hand(tmp_path, "10.0.0.1:4100")
    assert str(tmp_path / "passes" / "agent.pem") in told
    assert f"torchrelay agent --join 10.0.0.1:4100 --token-file {os.path.basename('agent.pem')}" in told


def test_what_slurm_says_of_a_step_is_not_the_workers() -> None:
    step = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "3", "SLURM_LOCALID": "0", "PMI_RANK": "0"}
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3", "PATH": "/bin"}
    assert of_the_machine({**step, **job}) == job


def test_a_node_that_is_this_machine_by_another_name_tells_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian has 127.0.1.1 for the name of the machine itself."""
    here = (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 9))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [here])
    with pytest.raises(NotPossible, match="give --host ADDRESS"):
        own_address([host("n1")])
