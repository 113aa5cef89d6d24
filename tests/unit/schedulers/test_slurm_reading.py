"""What Slurm prints becomes values, in the shapes of several versions; hostlists; states; deadlines; command lines."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrelay.protocol.messages.ids import Generation, JobId, NodeId, Rank, WorkerId
from torchrelay.schedulers.port import Grant, Health, Place, Roster
from torchrelay.schedulers.slurm import abilities, asking, judging, reading
from torchrelay.schedulers.slurm.abilities import Site
from torchrelay.schedulers.slurm.hostlists import compress, expand
from torchrelay.schedulers.slurm.judging import Leave
from torchrelay.schedulers.slurm.reading import JobRecord, JobRow, NodeRecord, Partition, Reservation, Unreadable

# Recorded from Slurm 22.05.8.
NODE = (
    "NodeName=n4 Arch=x86_64 CoresPerSocket=4  CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=2.06 AvailableFeatures=prod "
    "ActiveFeatures=prod Gres=gpu:2 NodeAddr=127.0.0.1 NodeHostName=vm Port=45861 Version=22.05.8 OS=Linux 6.18.44 #1 "
    "SMP PREEMPT_DYNAMIC @0  RealMemory=1000 AllocMem=0 FreeMem=16783 Sockets=1 Boards=1 State=IDLE+DRAIN "
    "ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=train,low  BootTime=2026-11-29T03:40:27 "
    "SlurmdStartTime=2026-11-29T08:25:03 CfgTRES=cpu=4,mem=1000M,billing=4 AllocTRES= CapWatts=n/a CurrentWatts=0 "
    "ExtSensorsTemp=n/s Reason=xid 79 State=IDLE = bad [root@2026-11-29T08:25:41]\n"
)
JOB = (
    "JobId=1 JobName=myjob UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1000 Nice=0 Account=(null) QOS=(null) "
    "JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "RunTime=00:00:02 TimeLimit=00:30:00 TimeMin=N/A SubmitTime=2026-11-29T08:25:39 StartTime=2026-11-29T08:25:39 "
    "EndTime=2026-11-29T08:55:39 Deadline=N/A Partition=train AllocNode:Sid=localhost:26338 ReqNodeList=(null) "
    "ExcNodeList=(null) NodeList=n[1-3] BatchHost=n1 NumNodes=3 NumCPUs=3 NumTasks=3 CPUs/Task=1 "
    "TRES=cpu=3,node=3,billing=3 MinCPUsNode=1 MinMemoryNode=0 Features=(null) OverSubscribe=OK "
    'Comment={"a":"b c=d"}  Power= TresPerNode=gres:gpu:2 \n'
)
ROWS = (
    "13|PENDING|low|NONE|BeginTime||stranger|(null)\n"
    '11|RUNNING|train|2026-11-29T08:51:04|None|n1|j+spare.1.0123456789|{"main":1,"key":"a|1"}\n'
    "more of a comment\n"
    "20_[1-4]|PENDING|low|NONE|Priority||array|(null)\n"
)
PARTITION = (
    "PartitionName=low AllowGroups=ALL Default=NO GraceTime=60 Hidden=NO MaxTime=UNLIMITED Nodes=n[1-5] "
    "PriorityJobFactor=1 PriorityTier=1 PreemptMode=REQUEUE State=UP TotalCPUs=20 TotalNodes=5\n"
)
RESERVATION = (
    "ReservationName=maint StartTime=2026-11-29T09:35:40 EndTime=2026-11-29T10:35:40 Duration=01:00:00 Nodes=n3 "
    "NodeCnt=1 CoreCnt=4 Features=(null) Flags=MAINT,SPEC_NODES TRES=cpu=4 Users=root State=INACTIVE\n"
)
NOON = 1795940739.0  # 2026-11-29T08:25:39 UTC


def number(value: int) -> dict[str, object]:
    return {"set": True, "infinite": False, "number": value}


# ---------------------------------------------------------------- hostlists


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[1-3,07-09]x", ("n1x", "n2x", "n3x", "n07x", "n08x", "n09x")),
        ("a,b[9-11],c", ("a", "b9", "b10", "b11", "c")),
        ("r[1-2]n[01-02]", ("r1n01", "r1n02", "r2n01", "r2n02")),
        ("gpu-a.site.org,n1,n1", ("gpu-a.site.org", "n1")),
        ("", ()), ("(null)", ()), ("n[099-101]", ("n099", "n100", "n101")), ("n[3-1]", ()),
    ],
)  # fmt: skip
def test_a_hostlist_is_expanded(text: str, names: tuple[str, ...]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    "text", ["n[1-3", "n1-3]", "n[[1]]", "n[a-b]", "a,,b", "n[1-999999999]", "n 1", "n[1-400]m[1-400]"]
)
def test_what_is_no_hostlist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="hostlist"):
        expand(text)


NAME = st.from_regex(r"[a-z][a-z0-9.-]{0,6}", fullmatch=True)


@given(st.sets(NAME, max_size=60))
def test_what_is_compressed_expands_to_the_same(names: set[str]) -> None:
    assert set(expand(compress(names))) == names


@given(st.sets(st.integers(0, 2000), min_size=1), st.integers(1, 4), st.sampled_from(["", "x", "-ib"]))
def test_numbers_with_and_without_zeros_come_back(numbers: set[int], width: int, ending: str) -> None:
    names = {f"n{value:0{width}d}{ending}" for value in numbers}
    assert set(expand(compress(names))) == names
    assert len(compress(f"node{value}" for value in range(10_000))) < 100


@given(st.text(max_size=30))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        names = expand(text)
    except ValueError:
        return
    assert len(set(names)) == len(names)


# ---------------------------------------------------------------- nodes and jobs


def test_a_node_is_read_from_text() -> None:
    expected = NodeRecord(name="n4", states=frozenset({"IDLE", "DRAIN"}), reason="xid 79 State=IDLE = bad", gpus=2,
                          partitions=("train", "low"))  # fmt: skip
    assert reading.nodes_of_text(NODE) == [expected]


@pytest.mark.parametrize(
    "shape",
    [
        {"state": "idle", "state_flags": ["DRAIN"], "partitions": ["train", "low"], "reason": "fan"},
        {"state": ["IDLE", "DRAIN"], "partitions": "train,low", "reason": "fan", "unknown": {"set": False}},
    ],
)
def test_a_node_is_read_from_json_of_each_kind(shape: dict[str, object]) -> None:
    text = json.dumps({"meta": {}, "nodes": [{"name": "n4", "gres": "gpu:h100:8(S:0-1)", **shape}], "errors": []})
    expected = NodeRecord(name="n4", states=frozenset({"IDLE", "DRAIN"}), reason="fan", gpus=8,
                          partitions=("train", "low"))  # fmt: skip
    assert reading.nodes_of_json(text) == [expected]


def test_a_job_is_read_from_text() -> None:
    job = reading.job_of_text(JOB)
    assert (job.job, job.name, job.nodes, job.batch_host) == (1, "myjob", ("n1", "n2", "n3"), "n1")
    assert job.end_at == NOON + 1800
    assert job.preempt_at is None
    assert asking.resources_of(job) == ("--gres=gpu:2",)


@pytest.mark.parametrize(
    "shape",
    [
        {"job_state": "RUNNING", "end_time": 1795942539, "preempt_time": 0, "cpus": 24, "node_count": 3},
        {"job_state": ["RUNNING"], "end_time": number(1795942539), "preempt_time": number(0), "cpus": number(24),
         "node_count": number(3), "memory_per_node": {"set": False, "infinite": False, "number": 0}},
    ],
)  # fmt: skip
def test_a_job_is_read_from_json_of_each_kind(shape: dict[str, object]) -> None:
    same = {"job_id": 1, "name": "myjob", "nodes": "n[1-3]", "batch_host": "n1", "partition": "train",
            "tres_per_node": "gres/gpu:h100:8", "account": "lab", "qos": ""}  # fmt: skip
    job = reading.job_of_json(json.dumps({"jobs": [{**same, **shape}]}))
    assert (job.job, job.name, job.nodes, job.end_at, job.preempt_at) == (
        1,
        "myjob",
        ("n1", "n2", "n3"),
        NOON + 1800,
        None,
    )
    words = ("--account=lab", "--gres=gpu:h100:8", "--ntasks-per-node=1", "--cpus-per-task=8")
    assert asking.resources_of(job) == words


def test_a_queue_is_read() -> None:
    waiting, running = reading.rows_of(ROWS)
    assert (waiting.state, waiting.end_at, waiting.comment) == ("PENDING", None, "")
    assert (running.job, running.nodes, running.end_at) == (11, ("n1",), NOON + 1525)
    assert asking.key_of(running) == "a|1"
    assert reading.rows_of("") == []


def test_notices_are_read() -> None:
    text = "11                  N/A                 \n12                  2026-11-29T08:25:39 \n12_3 NONE\n"
    assert reading.notices_of(text) == {12: NOON}


def test_partitions_reservations_and_settings_are_read() -> None:
    low = Partition(name="low", tier=1, preempt_mode="REQUEUE", nodes=frozenset(expand("n[1-5]")), grace_s=60)
    assert reading.partitions_of(PARTITION) == [low]
    as_json = {"name": "low", "priority": {"tier": 1}, "preempt_mode": ["REQUEUE"], "grace_time": number(60),
               "nodes": {"configured": "n[1-5]"}, "partition": {"state": ["UP"]}}  # fmt: skip
    assert reading.partitions_of_json(json.dumps({"partitions": [as_json]})) == [low]
    (maint,) = reading.reservations_of(RESERVATION)
    assert (maint.start_at, maint.nodes) == (NOON + 4201, frozenset({"n3"}))
    assert reading.reservations_of("No reservations in the system\n") == []
    settings = reading.config_of("Configuration data as of x\nKillWait   = 30 sec\nSLURM_VERSION  = 22.05.8\n")
    assert settings["KillWait"] == "30 sec"


@pytest.mark.parametrize(
    "text", ["", "garbage", '{"jobs": [', "[]", '{"nodes": 3}', "NodeName=n1 Arch=x", "JobId=1", "null"]
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    readers = (reading.nodes_of_text, reading.nodes_of_json, reading.job_of_text, reading.job_of_json,
               reading.partitions_of, reading.partitions_of_json, reading.config_of)  # fmt: skip
    for reader in readers:
        with pytest.raises(Unreadable):
            reader(text)


@given(st.integers(0, len(NODE + JOB + ROWS)))
def test_a_text_that_is_cut_off_is_read_or_refused(length: int) -> None:
    for text, reader in ((NODE, reading.nodes_of_text), (JOB, reading.job_of_text), (ROWS, reading.rows_of)):
        try:
            reader(text[:length])
        except Unreadable:
            pass


# ---------------------------------------------------------------- states and deadlines


@pytest.mark.parametrize(
    ("state", "health", "reason"),
    [
        ("IDLE", Health.HEALTHY, ""), ("MIXED-", Health.HEALTHY, ""), ("ALLOCATED+PLANNED", Health.HEALTHY, ""),
        ("idle*", Health.SUSPECT, "does not respond"), ("MIXED+DRAIN", Health.LEAVING, "drained"),
        ("DRAINING", Health.LEAVING, "drained"), ("ALLOC@", Health.LEAVING, "to be rebooted"),
        ("IDLE+MAINT", Health.LEAVING, "under maintenance"), ("IDLE+FAIL", Health.LEAVING, "about to fail"),
        ("REBOOT^", Health.LOST, "rebooting"), ("DOWN*+DRAIN", Health.LOST, "down"),
        ("MIXED$", Health.LEAVING, "under maintenance"),
        ("DOWN+NOT_RESPONDING", Health.LOST, "down"), ("SOMETHING_NEW", Health.HEALTHY, ""),
    ],
)  # fmt: skip
def test_states_become_health(state: str, health: Health, reason: str) -> None:
    node = NodeRecord(name="n1", states=reading.states_of(state))
    assert judging.health_of(node) == (health, reason)


def test_only_an_idle_node_that_nobody_waits_for_is_idle() -> None:
    for state, idle in (
        ("IDLE", True),
        ("IDLE+PLANNED", False),
        ("MIXED", False),
        ("IDLE*", False),
        ("IDLE+DRAIN", False),
    ):
        assert judging.is_idle(NodeRecord(name="n1", states=reading.states_of(state))) is idle


def test_several_reasons_have_the_first_deadline() -> None:
    grant = Grant(grant="1", key="first", nodes=(NodeId("n3"), NodeId("n4")))
    nodes = {"n3": NodeRecord(name="n3", states=frozenset({"MIXED", "DRAIN"}), reason="fan")}
    maint = Reservation(name="m", start_at=NOON + 100, flags=frozenset({"MAINT"}), nodes=frozenset({"n3"}))
    plain = Reservation(name="p", start_at=NOON + 50, flags=frozenset({"SPEC_NODES"}), nodes=frozenset({"n4"}))
    far = Reservation(name="f", start_at=NOON + 90_000, flags=frozenset({"MAINT"}), nodes=frozenset({"n4"}))
    end = Leave("the time limit of its job", NOON + 200)
    found = judging.leaves_of(grant, nodes, end, (maint, plain, far), NOON)
    assert found["n3"] == Leave("fan; maintenance ahead (reservation m); the time limit of its job", NOON + 100)  # type: ignore[index]
    assert found["n4"] == end  # type: ignore[index]


@pytest.mark.parametrize(
    ("grace_s", "end_at", "at"),
    [
        (60.0, None, NOON + 60),  # 22.05, of a job without a time limit
        (60.0, NOON + 9000, NOON + 60),
        (60.0, NOON + 20, NOON + 20),  # the time limit comes first
        (0.0, NOON + 40, NOON + 40),  # a QOS has given the time
        (0.0, None, None),
    ],
)
def test_a_job_that_was_preempted_ends_when_its_grace_time_is_over(
    grace_s: float, end_at: float | None, at: float | None
) -> None:
    wanted = Leave(judging.PREEMPTED, at, whole=True)
    row = JobRow(job=1, state="RUNNING", name="gpt", end_at=end_at)
    assert judging.end_of(row, NOON, grace_s, NOON + 1) == wanted
    record = JobRecord(job=1, name="gpt", state="RUNNING", nodes=("n1",), end_at=end_at, preempt_at=NOON, asked={})
    assert judging.notice_of(record, grace_s, 30.0, NOON + 1) == wanted


def test_a_job_without_grace_time_has_what_slurm_waits_before_it_kills() -> None:
    ends = JobRecord(job=1, name="gpt", state="COMPLETING", nodes=("n1",), preempt_at=NOON, asked={})
    leave = judging.notice_of(ends, 0.0, 30.0, NOON)
    assert leave is not None
    assert (leave.at, leave.whole) == (NOON + 30 - judging.LAST_S, True)
    leave = judging.notice_of(ends, 0.0, 1.0, NOON)
    assert leave is not None
    assert leave.at == NOON


def test_a_job_of_whose_end_slurm_says_nothing_is_not_meant() -> None:
    runs = JobRecord(job=1, name="gpt", state="RUNNING", nodes=("n1",), end_at=NOON + 9, asked={})
    assert judging.notice_of(runs, 60.0, 30.0, NOON) is None


@pytest.mark.parametrize(("text", "seconds"), [("45 sec", 45.0), ("", 30.0), ("unknown", 30.0)])
def test_how_long_slurm_waits_before_it_kills_is_read(text: str, seconds: float) -> None:
    site = Site(version=(22, 5, 8), config={"KillWait": text})
    assert abilities.kill_wait_of(site) == seconds


# ---------------------------------------------------------------- asking


def row(job: int, state: str, name: str) -> JobRow:
    return JobRow(job=job, state=state, name=name)


def test_of_two_of_a_name_one_is_too_many() -> None:
    a, b = asking.satellite_name("gpt", 1, "a"), asking.satellite_name("gpt", 1, "b")
    others = [row(9, "RUNNING", asking.satellite_name("gpt", 11, "a")), row(8, "RUNNING", "gpt+spare.1.short")]
    rows = [row(2, "PENDING", a), row(3, "RUNNING", a), row(4, "COMPLETING", b), row(5, "PENDING", b), *others]
    running, waiting, surplus = asking.sorted_out(rows, 1)
    assert [each.job for each in running] == [3]
    assert waiting == {b}
    assert surplus == (2,)


def test_the_name_says_whose_it_is_and_never_changes() -> None:
    name = asking.satellite_name("my job; rm -rf /", 4711, "gpt/3/8")
    assert name == asking.satellite_name("my job; rm -rf /", 4711, "gpt/3/8")
    assert name.startswith("my_job__rm_-rf__+spare.4711.")
    assert name != asking.satellite_name("my job; rm -rf /", 4711, "gpt/4/8")


def test_the_command_line_is_as_it_should_be() -> None:
    need = asking.Need(
        name="j+spare.1.x",
        key="a/1",
        main=1,
        count=1,
        partition="train",
        resources=("--gres=gpu:2",),
        exclude=("n1", "n2"),
        nodes=("n4",),
        minutes=0,
        wait_s=0.5,
    )
    assert asking.salloc(need) == (
        "salloc",
        "--no-shell",
        "--quiet",
        "--no-kill",
        "--nodes=1",
        "--partition=train",
        "--job-name=j+spare.1.x",
        "--dependency=singleton",
        '--comment={"main":1,"key":"a/1"}',
        "--immediate=2",
        "--gres=gpu:2",
        "--time=1",
        "--exclude=n[1-2]",
        "--nodelist=n4",
    )
    argv = asking.agent_argv("7", "n4", ["torchrelay", "agent"])
    assert argv[:4] == ("srun", "--jobid=7", "--overlap", "--nodes=1")
    assert argv[-2:] == ("torchrelay", "agent")


@given(st.integers(0, 3000), st.integers(1, 16), st.booleans())
def test_a_roster_fits_into_a_comment_and_comes_back_where_it_can(ranks: int, per_node: int, holes: bool) -> None:
    places = tuple(
        Place(rank=Rank(rank), worker=None if holes and rank % 7 == 0 else WorkerId(f"w{rank}"),
              node=None if holes and rank % 7 == 0 else NodeId(f"n{rank // per_node}"))
        for rank in range(ranks)
    )  # fmt: skip
    roster = Roster(job=JobId("gpt"), generation=Generation(3), places=places)
    comment = asking.roster_comment(roster)
    assert len(comment) <= asking.MOST_COMMENT
    assert json.loads(comment)["gen"] == 3
    if ranks <= 30:
        assert asking.roster_of_comment(comment) == roster


@pytest.mark.parametrize("text", ["", "hello", "[]", "3", '{"roster":3}', '{"job":"a","gen":1,"roster":{"n":"x-"}}'])
def test_a_comment_of_somebody_elses_is_no_roster(text: str) -> None:
    assert asking.roster_of_comment(text) is None


def test_a_reason_is_one_line() -> None:
    assert asking.plain_reason("ecc\n\x1b errors  " + "x" * 500) == ("ecc errors " + "x" * 500)[:200]


# ---------------------------------------------------------------- abilities


@pytest.mark.parametrize(
    ("version", "safe"),
    [((22, 5, 8), False), ((23, 2, 6), False), ((23, 2, 7), True), ((23, 11, 7), False), ((23, 11, 8), True),
     ((24, 5, 0), True), ((26, 5, 5), True)],
)  # fmt: skip
def test_a_resize_is_safe_from_some_versions_on(version: tuple[int, int, int], safe: bool) -> None:
    site = abilities.Site(version=version, config={})
    assert abilities.may_shrink(site).able is safe
    assert abilities.may_shrink(site, at_our_risk=True).able


def test_who_yields() -> None:
    nodes = frozenset({"n1"})
    listed = [
        Partition(name="train", tier=100, preempt_mode="OFF", nodes=nodes),
        Partition(name="low", tier=1, preempt_mode="REQUEUE", nodes=nodes),
        Partition(name="firm", tier=1, preempt_mode="OFF", nodes=nodes),
        Partition(name="far", tier=1, preempt_mode="CANCEL", nodes=frozenset({"m1"})),
    ]
    site = abilities.Site(
        version=(24, 11, 5), config={"PreemptType": "preempt/partition_prio"}, partitions=tuple(listed)
    )
    assert abilities.yielding(site, "train") == ["low"]
    assert abilities.yielding(site, "low") == []
    assert abilities.may_preempt(site, "train", "firm").able is False
    for kind, able in (("preempt/none", False), ("preempt/qos", None)):
        other = abilities.Site(version=(24, 11, 5), config={"PreemptType": kind})
        assert abilities.may_preempt(other, "train").able is able


@pytest.mark.parametrize(
    ("script", "line", "environ", "seen"),
    [
        ("#!/bin/sh\n#SBATCH --no-kill\n", "", {}, True), ("#SBATCH -k\n", "", {}, True),
        ("#!/bin/sh\nsrun --no-kill x\n", "", {}, None), ("#!/bin/sh\n", "sbatch x.sh", {}, False),
        ("#!/bin/sh\n", "sbatch --no-kill x.sh", {}, True), ("", "", {"SBATCH_NO_KILL": "1"}, True),
    ],
)  # fmt: skip
def test_no_kill_is_seen(script: str, line: str, environ: dict[str, str], seen: bool | None) -> None:
    assert abilities.saw_no_kill(script, line, environ).able is seen


def test_of_a_job_array_the_task_that_is_meant_is_read() -> None:
    """`scontrol show job` of an array's number prints all of its tasks, each with a number of its own."""
    other = JOB.replace(f"JobId={reading.job_of_text(JOB).job}", "JobId=99", 1)
    both = f"{other.rstrip()}\n{JOB.strip()}\n"
    wanted = reading.job_of_text(JOB).job
    assert reading.job_of_text(both, wanted).job == wanted
    assert reading.job_of_text(both, 99).job == 99
    shape = [{"job_id": number, "job_state": ["RUNNING"]} for number in (99, wanted)]
    assert reading.job_of_json(json.dumps({"jobs": shape}), wanted).job == wanted


def test_gpus_that_were_asked_for_the_whole_job_are_asked_for_by_node() -> None:
    asked = {"TresPerJob": "gres:gpu:16", "NumNodes": "4"}
    assert asking.gres_of_job(asked) == ["gpu:4"]
    assert asking.gres_of_job({"TresPerJob": "gres/gpu:h100:3", "NumNodes": "2"}) == ["gpu:h100:2"]
    assert asking.gres_of_job({"NumNodes": "2"}) == []
