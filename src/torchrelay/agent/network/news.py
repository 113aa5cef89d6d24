"""News: what a node's paths look like, for people and figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from torchrelay.agent.network.findings import Judge
from torchrelay.agent.network.paths import Link
from torchrelay.wire.messages.pathnews import FindingNews, LinkNews, NetworkNews, PathNews


def tell_paths(judge: Judge, now: float, taint_of: Callable[[str], str]) -> NetworkNews:
    """All paths, links and findings. `taint_of`: the key of the taint that lies for a path, by its local address."""
    by_path: dict[str, list[Link]] = {}
    for link in judge.paths.links.values():
        by_path.setdefault(link.local, []).append(link)
    numbers = {local: min(link.path for link in links) for local, links in by_path.items()}  # processes may differ
    found = tuple(
        PathNews(
            path=numbers[local], interface=next((link.interface for link in links if link.interface), ""), local=local,
            links=tuple(tell_link(judge, link, now) for link in sorted(links, key=lambda one: one.remote)),
            finding=tell_finding(judge, local, now, taint_of(local)),
        )
        for local, links in sorted(by_path.items(), key=lambda one: (numbers[one[0]], one[0]))
    )  # fmt: skip
    return NetworkNews(paths=found, processes=len(judge.paths.processes), left_out=judge.paths.left_out)


def tell_link(judge: Judge, link: Link, now: float) -> LinkNews:
    sent, received = judge.paths.link_rates.last(link.id)
    words = link.words.values()
    return LinkNews(
        remote=link.remote, state=str(link.state), state_s=max(0.0, now - link.since), reason=link.reason,
        live=sum(word.live for word in words), round_trip_us=max((word.round_trip_us for word in words), default=0),
        flaps=len(link.flaps), sent_rate=sent, received_rate=received, **asdict(link.totals),
    )  # fmt: skip


def tell_finding(judge: Judge, local: str, now: float, taint: str) -> FindingNews | None:
    finding = judge.findings.get(local)
    if finding is None:
        return None
    return FindingNews(
        kind=str(finding.kind), where=str(finding.where), evidence=finding.evidence, for_s=now - finding.since,
        taint=taint,
    )  # fmt: skip
