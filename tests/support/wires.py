"""Wires: pretended machines joined by several network paths, and what can happen to these. No root is needed (Linux).

    with Wires(rate="1gbit") as wires:
        process = wires.start("a", ["iperf3", "-c", wires.address("b", 1)])
        wires.blackhole(1)
        ...
        wires.heal()

Each machine is a network namespace, and all of them are in user, network and mount namespaces of their own: the
network of this machine is not touched, and the end of whoever made them is theirs, too. Path 1 is `eth1` of each
machine, path 2 `eth2`; `eth0` is for control traffic, which no fault here touches. Two machines are joined directly: if
a link is down, both see it. With `switched`, or more of them, each path has a switch, and a machine sees only its own
links.

What leaves a machine (and a switch) is held at `rate` by a token bucket. Packets are lost and changed where they
arrive, by nftables. All methods return when the fault is there.
"""

from __future__ import annotations

import functools
import os
import random
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

NET = "10.99"  # path p of the n-th machine is 10.99.p.n
TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2", "ss": "iproute2"}
TOOLS |= {"nft": "nftables"}
CONTROL = 0  # the path that no fault touches
SWITCH = "switch"
ANSWER_S = 20.0
# A bucket of so many bytes, as packets come from the sender's kernel in pieces of up to 64 KiB.
BURST = "256kb"
DONE = "wires-said-it"


class WiresError(RuntimeError):
    """A command in the pretended world failed, or it cannot be made."""


class Shell:
    """A shell in namespaces of its own, which hold the others. It ends with us, and they with it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            ["unshare", "-Urnm", "--propagation", "private", "bash"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._turn = threading.Lock()
        self.run("mount -t tmpfs tmpfs /run", "mkdir -p /run/netns")
        self.pid = int(self.run("echo $$"))

    def run(self, *lines: str) -> str:
        """What they wrote. Raises `WiresError` with it if one of them failed; the others after it are left out."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._turn:
            # A watchdog: should a command hang, the shell ends, and reading it with it.
            watchdog = threading.Timer(ANSWER_S, self._process.kill)
            watchdog.start()
            try:
                words = " && ".join(f"{{ {line}; }}" for line in lines)
                self._process.stdin.write(f"{{ {words}; }} 2>&1 </dev/null; echo {DONE} $?\n")
                self._process.stdin.flush()
                said: list[str] = []
                while not (line := self._process.stdout.readline()).startswith(DONE):
                    if not line:
                        raise WiresError(f"the shell of the namespaces has ended at `{words}`: {''.join(said)[-1000:]}")
                    said.append(line)
            except BrokenPipeError:
                raise WiresError(f"no namespaces: {self._process.stdout.read()[-1000:]}") from None
            finally:
                watchdog.cancel()
        text = "".join(said)
        if line.split()[1] != "0":
            raise WiresError(f"`{words}` failed: {text.strip()[-1000:]}")
        return text

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # it had ended before


@functools.cache
def obstacle() -> str:
    """Why this machine cannot pretend to be several; empty if it can. Tried once."""
    missing = sorted(tool for tool in TOOLS if shutil.which(tool) is None)
    if missing:
        return f"`{missing[0]}` is not here: install {TOOLS[missing[0]]}"
    try:
        wires = Wires(paths=1, rate="1gbit")
    except WiresError as error:
        return f"no network namespaces of one's own (user namespaces, veth, tbf, nftables in netdev): {error}"
    wires.close()
    return ""


class Wires:
    """The pretended machines. Paths count from 1."""

    def __init__(
        self,
        machines: Sequence[str] = ("a", "b"),
        *,
        paths: int = 2,
        rate: str | None = "1gbit",
        switched: bool = False,
    ) -> None:
        """`rate` as `tc` takes it; None: as fast as this machine can. Raises `WiresError` with what went wrong."""
        self.machines, self.paths, self.rate = tuple(machines), tuple(range(1, paths + 1)), rate
        self.switched = switched or len(self.machines) > 2
        self._started: list[subprocess.Popen[Any]] = []
        self._shell = Shell()
        try:
            self._build()
        except WiresError:
            self._shell.close()
            raise

    def __enter__(self) -> Wires:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what was started here; the namespaces go with the last of it."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._shell.close()

    # ---------------------------------------------------------------- building

    def _build(self) -> None:
        self._shell.run(*(f"ip netns add {name}" for name in (*self.machines, *([SWITCH] if self.switched else []))))
        for path in (CONTROL, *self.paths):
            self._shell.run(*(self._joined_by_switch(path) if self.switched else self._joined(path)))
            self._shell.run(*(line for machine in self.machines for line in self._dressed(machine, path)))

    def _joined(self, path: int) -> list[str]:
        a, b = self.machines
        return [f"ip link add eth{path} netns {a} type veth peer name eth{path} netns {b}"]

    def _joined_by_switch(self, path: int) -> list[str]:
        lines = [
            f"ip -n {SWITCH} link add path{path} type bridge forward_delay 0 stp_state 0",
            f"ip -n {SWITCH} link set path{path} up",
        ]
        return [*lines, *(line for machine in self.machines for line in self._port(machine, path))]

    def _port(self, machine: str, path: int) -> list[str]:
        port = f"{machine}{path}"
        return [
            f"ip link add eth{path} netns {machine} type veth peer name {port} netns {SWITCH}",
            f"ip -n {SWITCH} link set {port} master path{path} up",
            *self._shaped(SWITCH, port, self.rate),
        ]

    def _dressed(self, machine: str, path: int) -> list[str]:
        table = ["nft add table netdev faults"] if path == CONTROL else []
        hook = f"type filter hook ingress device eth{path} priority 0;"
        chain = f"nft 'add chain netdev faults eth{path} {{ {hook} }}'"
        return [
            f"ip -n {machine} link set lo up",
            f"ip -n {machine} addr add {self.address(machine, path)}/24 dev eth{path}",
            f"ip -n {machine} link set eth{path} up",
            *self._shaped(machine, f"eth{path}", self.rate),
            *(f"ip netns exec {machine} {line}" for line in (*table, chain)),
        ]

    def _shaped(self, machine: str, interface: str, rate: str | None) -> list[str]:
        if rate is None:
            return [f"tc -n {machine} qdisc del dev {interface} root 2>/dev/null || true"]
        return [f"tc -n {machine} qdisc replace dev {interface} root tbf rate {rate} burst {BURST} latency 20ms"]

    # ---------------------------------------------------------------- in it

    def address(self, machine: str, path: int = CONTROL) -> str:
        return f"{NET}.{path}.{self.machines.index(machine) + 1}"

    def interfaces(self) -> str:
        """Those of the paths, as they are told to programs: eth1,eth2."""
        return ",".join(f"eth{path}" for path in self.paths)

    def words(self, machine: str, command: Sequence[str]) -> list[str]:
        """The command as it runs on this machine, in the folder where we are. It keeps its process id."""
        enter = ["nsenter", "--preserve-credentials", "-U", "-n", "-m", "-t", str(self._shell.pid)]
        return [*enter, "ip", "netns", "exec", machine, "env", "-C", os.getcwd(), *command]

    def start(
        self,
        machine: str,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[Any]:
        """Start it there. It is killed with the world. `env` comes on top of ours."""
        process = subprocess.Popen(
            self.words(machine, command),
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
        self._started.append(process)
        return process

    def run(self, machine: str, *lines: str) -> str:
        """Run shell commands there and wait: what they wrote. Raises `WiresError` if one fails."""
        return self._shell.run(*(f"ip netns exec {machine} bash -c {shlex.quote(line)}" for line in lines or [":"]))

    def multipath_tcp(self, *, patient: bool = False) -> None:
        """MPTCP connections over path 1 may use all paths. `patient`: with the two settings that let a lost path come
        back soon (Linux 6.15: net.ipv4.tcp_rto_max_ms). Raises `WiresError` where the kernel has not got it.
        """
        settings = {"tcp_rto_max_ms": 1000, "tcp_retries2": 255} if patient else {}
        for machine in self.machines:
            self.run(machine, "ip mptcp limits set subflows 4 add_addr_accepted 4")
            self.run(machine, *(f"echo {value} > /proc/sys/net/ipv4/{name}" for name, value in settings.items()))
        first = self.machines[0]
        for path in self.paths[1:]:
            self.run(first, f"ip mptcp endpoint add {self.address(first, path)} dev eth{path} subflow")
            for other in self.machines[1:]:
                self.run(other, f"ip mptcp endpoint add {self.address(other, path)} dev eth{path} signal")

    # ---------------------------------------------------------------- links and addresses

    def link(self, machine: str, path: int, up: bool) -> None:
        """Its link, down or up: carrier is lost, and on a direct path the other machine's, too."""
        self._shell.run(f"ip -n {machine} link set eth{path} {'up' if up else 'down'}")

    def unplug(self, machine: str, path: int, plugged: bool = False) -> None:
        """Pull its cable at the far end: the machine sees its carrier go, and is still administered up."""
        if self.switched:
            self._shell.run(f"ip -n {SWITCH} link set {machine}{path} {'up' if plugged else 'down'}")
        else:
            others = [other for other in self.machines if other != machine]
            self.link(others[0], path, plugged)

    def interface_gone(self, machine: str, path: int) -> None:
        """Its interface is no more (switched)."""
        self._shell.run(f"ip -n {machine} link del eth{path}")

    def interface_made(self, machine: str, path: int) -> None:
        """There is another of the same name and address."""
        self._shell.run(*self._port(machine, path), *self._dressed(machine, path))

    def address_taken(self, machine: str, path: int) -> None:
        """Its address is gone, its link is up."""
        self._shell.run(f"ip -n {machine} addr del {self.address(machine, path)}/24 dev eth{path}")

    def address_given(self, machine: str, path: int) -> None:
        """Its address is there again."""
        self._shell.run(f"ip -n {machine} addr add {self.address(machine, path)}/24 dev eth{path}")

    def storm(self, seed: int, flaps: int, shortest_s: float = 0.1, longest_s: float = 0.4) -> None:
        """Links of any path and machine go down and up, one after the other; takes as long as it does."""
        chance = random.Random(seed)
        for _ in range(flaps):
            machine, path = chance.choice(self.machines), chance.choice(self.paths)
            self.link(machine, path, up=False)
            time.sleep(chance.uniform(shortest_s, longest_s))
            self.link(machine, path, up=True)
            time.sleep(chance.uniform(shortest_s, longest_s))

    def forgetful(self, path: int) -> None:
        """The machines forget each other's hardware addresses within seconds; half a minute is usual."""
        times = {"base_reachable_time_ms": 1000, "delay_first_probe_time": 2, "retrans_time_ms": 200}
        for machine in self.machines:
            here = f"/proc/sys/net/ipv4/neigh/eth{path}"
            self.run(machine, *(f"echo {value} > {here}/{name}" for name, value in times.items()))
            self.run(machine, f"ip neigh flush dev eth{path}")  # what is known already is kept as long as before

    def knows(self, machine: str, other: str, path: int) -> bool:
        """Whether it knows the other's hardware address on this path, without asking."""
        return " lladdr " in self.run(machine, f"ip neigh show {self.address(other, path)} dev eth{path}")

    def asks(self, machine: str, path: int) -> bool:
        """Whether it has asked for somebody's hardware address on this path, and was not answered."""
        found = self.run(machine, f"ip neigh show dev eth{path} nud incomplete; ip neigh show dev eth{path} nud failed")
        return bool(found.strip())

    # ---------------------------------------------------------------- packets

    def _rule(self, path: int, rule: str, machines: Sequence[str] | None = None) -> None:
        """A rule for what arrives over the path, on all machines or these."""
        self._shell.run(
            *(
                f"ip netns exec {machine} nft {shlex.quote(f'add rule netdev faults eth{path} {rule}')}"
                for machine in machines or self.machines
            )
        )

    def blackhole(self, path: int) -> None:
        """Nothing arrives any more, in no direction; no link goes down."""
        self._rule(path, "drop")

    def deaf(self, machine: str, path: int) -> None:
        """Nothing arrives at this machine any more over the path; what it sends does."""
        self._rule(path, "drop", [machine])

    def refuse(self, path: int) -> None:
        """Every TCP packet is answered with RST: connections end, and new ones are refused."""
        self._rule(path, "meta l4proto tcp reject with tcp reset")

    def swallow_large(self, path: int, longest: int = 1000) -> None:
        """Packets over so many bytes are lost without a word (a wrong MTU on the way)."""
        self._rule(path, f"meta length > {longest} drop")

    def lossy(self, path: int, one_in: int) -> None:
        """One packet of so many is lost."""
        self._rule(path, f"numgen random mod {one_in} 0 drop")

    def corrupt(self, path: int, one_in: int = 200, machines: Sequence[str] | None = None) -> None:
        """A bit in one large packet of so many is turned, and the checksum of the packet made right again."""
        self._rule(path, f"meta length > 5000 numgen random mod {one_in} 0 {self._turned(512)} counter", machines)

    def corrupt_headers(self, path: int, one_in: int = 100, machines: Sequence[str] | None = None) -> None:
        """The same near the beginning of packets of any length, where frames have their numbers, places and sizes."""
        for byte in (4, 6, 8, 16, 20, 28):
            self._rule(path, f"numgen random mod {one_in} 0 {self._turned(byte)} counter", machines)

    @staticmethod
    def _turned(byte: int) -> str:
        """The lowest bit of this byte of what a TCP packet carries, where there are so many."""
        place = f"@ih,{byte * 8},32"
        return f"ip protocol tcp meta length > {byte + 72} {place} set {place} ^ 0x01000000"

    def hits(self, path: int) -> int:
        """How many packets the rules with a counter met, on all machines, since the last `heal`."""
        said = [self.run(machine, f"nft list chain netdev faults eth{path}") for machine in self.machines]
        return sum(int(part.split()[0]) for text in said for part in text.split("counter packets ")[1:])

    def heal(self, path: int | None = None) -> None:
        """No rule for packets is left, on this path or on all; their speed is as it was."""
        for one in self.paths if path is None else (path,):
            self._shell.run(
                *(f"ip netns exec {machine} nft flush chain netdev faults eth{one}" for machine in self.machines)
            )

    def speed(self, path: int, rate: str | None) -> None:
        """What the machines send over the path is held at this rate, as `tc` takes it."""
        self._shell.run(*(line for machine in self.machines for line in self._shaped(machine, f"eth{path}", rate)))

    # ---------------------------------------------------------------- connections

    def cut_connections(self, machine: str, path: int) -> None:
        """Its kernel ends its TCP connections over the path, as an administrator can; the other side is told (RST)."""
        self.run(machine, f"ss -K src {self.address(machine, path)} 2>&1 || true")

    def half_open(self, machine: str, path: int) -> None:
        """Its connections end without a word to the others, which have them still. `heal` lets words through again."""
        others = [other for other in self.machines if other != machine]
        self._rule(path, "tcp flags & (rst | fin) != 0 drop", others)
        self.cut_connections(machine, path)

    def traffic(self, machine: str, path: int) -> int:
        """Bytes that arrived over the path at this machine since it was made."""
        return int(self.run(machine, f"cat /sys/class/net/eth{path}/statistics/rx_bytes"))
