"""Notice: what a SIGTERM means to an agent: end, or, where the job may park, that its node is about to be taken away.

Then it tells the orchestrator, as a taint, and lives on: what becomes of the job is decided there.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable

from torchrelay.protocol.messages.events import TaintSet
from torchrelay.protocol.messages.ids import NodeId
from torchrelay.protocol.placement.taints import TOLD
from torchrelay.schedulers.lasting import AGAIN_S

logger = logging.getLogger(__name__)

SOURCE = "agent"
REASON = "Slurm has told this node's processes to end (SIGTERM)"


class Notice:
    """`lasts`: whether the first one does not end this agent. `tell` the orchestrator, `stop` the agent."""

    def __init__(
        self,
        node: NodeId,
        *,
        lasts: bool,
        tell: Callable[[TaintSet], None],
        stop: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node, self._lasts, self._tell, self._stop, self._now_s = node, lasts, tell, stop, now_s
        self._since_s: float | None = None

    def hear(self) -> None:
        """A SIGTERM has come."""
        if not self._lasts:
            self._stop("received SIGTERM")
        elif self._since_s is None:
            self._since_s = self._now_s()
            logger.warning("%s; the job may park, so this agent and its workers go on", REASON)
            number = str(int(signal.SIGTERM))
            self._tell(TaintSet(node=self._node, key=TOLD, value=number, reason=REASON, source=SOURCE))
        elif self._now_s() - self._since_s >= AGAIN_S:
            self._stop("received SIGTERM again: the time is over")
