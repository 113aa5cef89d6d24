"""What must be true of all successions of a simulated run, as the world knows it: the core is not asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchrelay.protocol.succession.succession import CopyId, Succession, VoterId
from torchrelay.simulation.succession.words import Order


class Violation(Exception):
    """Something that must never be."""


@dataclass
class Office:
    """What an orchestrator had of the journal when it was elected, what has left it, and whether it has acted."""

    owner: CopyId
    have: dict[int, int]
    left: int = 0
    acted: bool = False


@dataclass
class Judge:
    """Everything that has happened and counts. `offices`: by lease. `noted`: who has ever noted what."""

    offices: dict[int, Office] = field(default_factory=dict)
    told: dict[Order, Succession] = field(default_factory=dict)
    noted: dict[Order, set[VoterId]] = field(default_factory=dict)

    def elect(self, lease: int, owner: CopyId, have: dict[int, int]) -> None:
        if lease in self.offices:
            raise Violation(f"{self.offices[lease].owner} and {owner} are elected under lease {lease}")
        self.offices[lease] = Office(owner, dict(have))

    def act(self, lease: int) -> None:
        """Somebody begins to act: it has all that has left under lower leases."""
        office = self.offices[lease]
        office.acted = True
        for earlier, other in self.offices.items():
            if earlier < lease and other.left > office.have.get(earlier, 0):
                raise Violation(
                    f"{office.owner} acts under lease {lease} and has {office.have.get(earlier, 0)} parts of lease "
                    f"{earlier}, of which {other.left} had left"
                )

    def leave(self, lease: int, part: int) -> bool:
        """Something leaves a head that depends on this part. Whether it is the first."""
        office = self.offices[lease]
        if part <= office.left:
            return False
        office.left = part
        for later, other in self.offices.items():
            if later > lease and other.acted and other.have.get(lease, 0) < part:
                raise Violation(f"part {part} leaves under lease {lease}, and {other.owner} acts under {later} without")
        return True

    def tell(self, succession: Succession) -> None:
        """Voters may hear of it from now on."""
        self.told.setdefault(succession.order, succession)

    def note(self, voter: VoterId, order: Order) -> None:
        self.noted.setdefault(order, set()).add(voter)

    def is_settled(self, succession: Succession) -> bool:
        """Whether enough have ever noted it: counted here, not as the core does."""
        have = self.noted.get(succession.order, set())
        return all(len(have & set(group)) > len(set(group)) / 2 for group in succession.groups if group)

    def settled(self) -> Succession:
        """The newest that is settled. Under each lease the first is told before the next."""
        return max((each for each in self.told.values() if self.is_settled(each)), key=lambda each: each.order)

    def open(self) -> list[Succession]:
        """That one, and all that are newer and may yet be settled, or seem so."""
        settled = self.settled()
        return [settled, *(each for order, each in self.told.items() if order > settled.order)]
