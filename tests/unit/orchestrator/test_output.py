"""What workers print on other machines: in which files it may stand, and that it comes once."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrelay.agent.output.forwarder import Forwarder
from torchrelay.orchestrator.store.output import MOST_LOGS, Output, bounds
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.wire.messages.channel import OutputFrame, Printed


def lines_of(log: str, *lines: str, end: int = 1) -> OutputFrame:
    return OutputFrame(Printed(log, 7, end), lines)


M1 = NodeId("m1")


class TestOutput:
    def test_lines_of_a_rank_stand_in_its_log(self, tmp_path: Path) -> None:
        output = Output(tmp_path)
        assert output.write(M1, lines_of("rank-0.log", "one", "two"))
        assert output.write(M1, lines_of("rank-0.log", "three", end=9))
        assert (tmp_path / "rank-0.log").read_text() == "one\ntwo\nthree\n"
        assert output.printed(M1) == (Printed("rank-0.log", 7, 9),)
        assert output.printed(NodeId("m2")) == ()

    @pytest.mark.parametrize(
        "name",
        [
            "../token", "agent-m1.log", "orchestrator.log", "orchestrator.err", "", "a/b.log", ".log", "a.log\n",
            "m2.0.1.log", "m1.0.log", "m1.0.1.log\n", "m1.log", "rank-.log", "rank-x.log",
        ],
    )  # fmt: skip
    def test_no_other_file_is_written(self, tmp_path: Path, name: str) -> None:
        assert not Output(tmp_path).write(M1, lines_of(name, "x"))
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("node", ["orchestrator", "agent-7", "rank-0", "a.b"])
    def test_whatever_a_node_is_called_its_workers_have_logs(self, tmp_path: Path, node: str) -> None:
        assert Output(tmp_path).write(NodeId(node), lines_of(f"{node}.0.12.log", "x"))
        assert (tmp_path / f"{node}.0.12.log").read_text() == "x\n"

    def test_a_link_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("mine")
        (tmp_path / "rank-0.log").symlink_to(tmp_path / "mine")
        Output(tmp_path).write(M1, lines_of("rank-0.log", "x"))
        assert (tmp_path / "mine").read_text() == "mine"

    def test_there_are_only_so_many_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torchrelay.orchestrator.store.output.MOST_LOGS", 2)
        output = Output(tmp_path)
        written = [output.write(M1, lines_of(f"rank-{rank}.log", "x")) for rank in (0, 1, 2, 0)]
        assert written == [True, True, False, True]

    def test_all_of_them_have_a_bound_together(self) -> None:
        assert bounds(1).size == 32_000_000
        assert sum(bounds(number).size for number in range(1, MOST_LOGS + 1)) < 10_000_000_000


class TestForwarder:
    """What workers have printed is sent once, whatever ends in between: the connection, the agent, or both ends."""

    def made(self, tmp_path: Path, sent: list[OutputFrame]) -> Forwarder:
        record = tmp_path / "node"
        record.mkdir(exist_ok=True)
        return Forwarder(tmp_path, M1, record, show=sent.append, heard=lambda: True, pause_s=lambda: 0.0)

    def test_an_agent_that_is_started_again_goes_on_where_the_orchestrator_has_read(self, tmp_path: Path) -> None:
        log, sent = tmp_path / "rank-0.log", list[OutputFrame]()
        log.write_text("one\ntwo\nthr")
        forwarder = self.made(tmp_path, sent)
        assert forwarder.look()
        assert sent[-1].lines == ("one", "two")
        came = sent[-1].upto
        with log.open("a") as file:
            file.write("ee\nfour\n")
        forwarder.look()  # lost with the connection
        again = self.made(tmp_path, sent)
        again.go_on([came])
        again.look()
        assert sent[-1].lines == ("three", "four")
        forwarder.go_on([came])  # the same agent, another connection
        forwarder.look()
        assert sent[-1].lines == ("three", "four")

    def test_its_own_record_counts_where_the_orchestrator_knows_nothing(self, tmp_path: Path) -> None:
        log, sent = tmp_path / "m1.0.3.log", list[OutputFrame]()
        log.write_text("one\n")
        self.made(tmp_path, sent).look()
        again = self.made(tmp_path, sent)
        assert not again.look()
        log.write_text("one\ntwo\n")
        again.look()
        assert [frame.lines for frame in sent] == [("one",), ("two",)]

    def test_a_log_that_was_renamed_meanwhile_is_read_to_its_end(self, tmp_path: Path) -> None:
        log, sent = tmp_path / "rank-0.log", list[OutputFrame]()
        log.write_text("one\n")
        forwarder = self.made(tmp_path, sent)
        forwarder.look()
        with log.open("a") as file:
            file.write("two\n")
        log.rename(tmp_path / "rank-0.log.1")
        log.write_text("three\n")
        again = self.made(tmp_path, sent)
        again.look()
        assert [line for frame in sent for line in frame.lines] == ["one", "two", "three"]

    def test_a_log_that_was_emptied_is_read_from_its_beginning(self, tmp_path: Path) -> None:
        log, sent = tmp_path / "rank-0.log", list[OutputFrame]()
        log.write_text("one two three\n")
        forwarder = self.made(tmp_path, sent)
        forwarder.look()
        log.write_text("four\n")
        again = self.made(tmp_path, sent)
        again.go_on([sent[0].upto])
        again.look()
        assert sent[-1].lines == ("four",)

    def test_a_long_line_says_how_much_of_it_is_missing(self, tmp_path: Path) -> None:
        sent = list[OutputFrame]()
        (tmp_path / "rank-0.log").write_text("x" * 20_000 + "\n")
        self.made(tmp_path, sent).look()
        assert sent[0].lines[0].endswith("(3,616 more characters stand in the log)")

    def test_other_logs_are_not_sent(self, tmp_path: Path) -> None:
        sent = list[OutputFrame]()
        for name in ("agent-m1.log", "m2.0.1.log", "other.log"):
            (tmp_path / name).write_text("x\n")
        assert not self.made(tmp_path, sent).look()
