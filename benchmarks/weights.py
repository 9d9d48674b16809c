"""Seconds until all workers act with new weights: from worker to worker, or from the head alone.

The head and each of 16 workers live in a network namespace of their own, with a link of a limited
rate to a common switch (``tc tbf``, in both directions). A ``Collector`` publishes a policy of N
bytes; measured is the time from ``publish()`` until a fragment of every shard has arrived that was
acted with the new version. Both ways take turns. Linux, root and iproute2 are needed.

    python benchmarks/weights.py
    python benchmarks/weights.py --rate 200 --sizes 1 40 --rounds 5

Sizes are in MB of 10**6 bytes, rates in Mbit/s.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dask
import psutil
import torch
from distributed import Client
from torch import nn

import clusterenv
from clusterenv.policies import Context, Decision, Policy

NET = "10.214.88"
NAME = f"cw{os.getpid()}"
ROOT = Path(__file__).resolve().parents[1]
SIZES = (0.1, 0.4, 1.0, 4.0, 10.0, 40.0, 400.0)
PORT = 9_000  # of the plain socket that checks the links
# A packet of 64 KiB, the largest that the kernel hands over at once, must fit in; much more would
# let small weights pass before the limit counts.
BURST = "96kb"


# Links


def run(*words: str) -> None:
    """Run a command; its error output goes into the exception."""
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit(f"there is no {words[0]}: Linux, root and iproute2 are needed") from None
    if done.returncode:
        said = done.stderr.strip()
        raise SystemExit(f"{' '.join(words)}: {said}; Linux, root and iproute2 are needed")


def address(host: int) -> str:
    """Return the address of a host; 0 is the head."""
    return f"{NET}.{10 + host}"


class Network:
    """Hosts as network namespaces, each with a link of a limited rate to one switch.

    Nothing is made outside these namespaces, so that they take everything with them.
    """

    def __init__(self, hosts: int, rate: float) -> None:
        self._spaces: list[str] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._rate = rate
        self._hosts = hosts

    def __enter__(self) -> Network:
        try:
            switch = self._add("switch")
            run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            run("ip", "-n", switch, "link", "set", "bridge", "up")
            for host in range(self._hosts):
                self._connect(self._add(str(host)), switch, f"port{host}", address(host))
        except BaseException:
            self.close()
            raise
        return self

    def _add(self, name: str) -> str:
        space = f"{NAME}-{name}"
        run("ip", "netns", "add", space)
        self._spaces.append(space)
        return space

    def _connect(self, space: str, switch: str, port: str, where: str) -> None:
        device = "eth0"
        peer = ("peer", "name", port, "netns", switch)
        run("ip", "-n", space, "link", "add", device, "type", "veth", *peer)
        run("ip", "-n", space, "addr", "add", f"{where}/24", "dev", device)
        run("ip", "-n", switch, "link", "set", port, "master", "bridge")
        limit = ("tbf", "rate", f"{self._rate:g}mbit", "burst", BURST, "latency", "100ms")
        for end, name in ((space, device), (switch, port)):
            run("tc", "-n", end, "qdisc", "add", "dev", name, "root", *limit)
            run("ip", "-n", end, "link", "set", name, "up")
        run("ip", "-n", space, "link", "set", "lo", "up")

    def start(self, host: int, *command: str, quiet: bool = True) -> subprocess.Popen[bytes]:
        """Start a Python process on a host."""
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            ["ip", "netns", "exec", f"{NAME}-{host}", sys.executable, *command],
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends them
            stdout=subprocess.DEVNULL if quiet else None,
            stderr=subprocess.DEVNULL if quiet else None,
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End the processes that were started and remove the namespaces."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for space in self._spaces:
            listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
            for pid in listed.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def __exit__(self, *exception: object) -> None:
        self.close()


class Received(NamedTuple):
    """When bytes came, by the clock that all processes of the machine share."""

    nbytes: int
    began: float
    ended: float


def rate_of(received: Sequence[Received]) -> float:
    """Return the Mbit/s of transfers together.

    >>> rate_of([Received(1_000_000, 3.0, 5.0), Received(1_000_000, 4.0, 7.0)])
    4.0
    """
    seconds = max(each.ended for each in received) - min(each.began for each in received)
    return 8e-6 * sum(each.nbytes for each in received) / seconds


def receive(nbytes: int, where: str) -> Received:
    """Accept a connection and read so many bytes."""
    with socket.create_server((where, PORT)) as listener:
        sock, _ = listener.accept()
    buffer = bytearray(1 << 20)
    with sock:
        got, began = sock.recv_into(buffer), time.monotonic()
        while got < nbytes:
            got += sock.recv_into(buffer)
    return Received(nbytes, began, time.monotonic())


def send(nbytes: int, where: str) -> None:
    """Send so many bytes to :func:`receive`, which may not listen yet."""
    for _ in range(600):
        try:
            sock = socket.create_connection((where, PORT))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    block = bytes(1 << 20)
    with sock:
        for _ in range(nbytes >> 20):
            sock.sendall(block)


def check_links(client: Client, workers: Sequence[str], rate: float) -> None:
    """Print the rates of plain sockets: of one link, of the head's, of all workers' at once."""
    half = len(workers) // 2

    def transfer(targets: Sequence[int], seconds: float, sources: int | None) -> list[Received]:
        nbytes = max(1, round(seconds * rate / 8)) << 20
        receiving = [
            client.submit(receive, nbytes, address(1 + k), workers=[workers[k]], pure=False)
            for k in targets
        ]
        sending = []
        for k in targets:
            words = (nbytes, address(1 + k))
            if sources is None:
                threading.Thread(target=send, args=words).start()
            else:
                where = [workers[sources + k]]
                sending.append(client.submit(send, *words, workers=where, pure=False))
        client.gather(sending)
        return client.gather(receiving)  # type: ignore[no-any-return]

    alone = rate_of(transfer([0], 1, None))
    everyone = rate_of(transfer(range(len(workers)), 2 / len(workers), None))
    pairs = [rate_of([each]) for each in transfer(range(half), 1, half)]
    print(
        f"plain sockets, Mbit/s: head to one worker {alone:.0f}; head to all {len(workers)} "
        f"together {everyone:.0f}; {half} pairs of workers at once {min(pairs):.0f} to "
        f"{max(pairs):.0f} each",
        flush=True,
    )


# Weights


class Sized(Policy):
    """A policy of so many bytes that always does the same.

    Its weights are mapped from a file in memory that all workers share: 16 copies of 400 MB
    would not fit on this machine beside those that travel. Loading writes to it as to others.
    """

    def __init__(self, nbytes: int, file: str) -> None:
        super().__init__()
        self._made_from = nbytes, file
        count = nbytes // 4
        mapped = torch.from_file(file, shared=True, size=count, dtype=torch.float32)
        self.weights = nn.Parameter(mapped, requires_grad=False)

    def __reduce__(self) -> tuple[Any, ...]:  # the first version need not travel
        return type(self), self._made_from

    def act(self, obs: torch.Tensor, context: Context) -> Decision:
        return Decision(torch.zeros(len(obs), dtype=torch.int64), {})


class Taken(NamedTuple):
    """What a version took to reach all shards."""

    seconds: float
    head: int
    """Bytes that the head sent."""
    relayed: int
    """Bytes that workers sent."""


def deliver(collector: clusterenv.Collector, policy: Sized) -> Taken:
    """Publish a version and wait until every shard has acted with it."""
    policy.weights[0] += 1
    before = collector.stats()
    began = time.perf_counter()
    version = collector.publish(policy)
    batches = collector.rollout()
    seconds = time.perf_counter() - began
    after = collector.stats()
    assert all((batch["version"] == version).all() for batch in batches)
    assert after.restarts == 0
    return Taken(
        seconds,
        after.weight_bytes - before.weight_bytes,
        after.relayed_bytes - before.relayed_bytes,
    )


@contextlib.contextmanager
def collecting(
    client: Client, policy: Sized, workers: int, relays: bool
) -> Iterator[clusterenv.Collector]:
    """Give a collector with a shard per worker; its first rollout is done."""
    with (
        dask.config.set({"clusterenv.channel.relay": "1 B" if relays else None}),
        clusterenv.Collector(
            "CartPole-v1", policy, num_envs=workers, horizon=4, shards=workers, cluster=client
        ) as collector,
    ):
        collector.rollout()
        yield collector


def pays_from(ratios: dict[float, float]) -> float | None:
    """Return the size from which on the ratio is above 1 for all; ``None`` if there is none.

    >>> pays_from({0.4: 1.2, 1: 0.7, 4: 1.1, 40: 3.0}), pays_from({4: 1.5, 40: 0.9})
    (4, None)
    """
    paying = list(itertools.takewhile(lambda size: ratios[size] > 1, sorted(ratios, reverse=True)))
    return min(paying, default=None)


def row(size: float, alone: Sequence[Taken], relay: Sequence[Taken]) -> tuple[str, float]:
    """Return a line of the table and the ratio: the median of those of neighbours in time."""
    ratios = sorted(a.seconds / b.seconds for a, b in zip(alone, relay, strict=True))
    quarter = len(ratios) // 4
    ratio = statistics.median(ratios)
    seconds = [statistics.median(taken.seconds for taken in way) for way in (alone, relay)]
    sent = (
        [taken.head for taken in alone],
        [taken.head for taken in relay],
        [taken.relayed for taken in relay],
    )
    cells = [
        f"{size:g}",
        *(f"{each:.3f}" for each in seconds),
        f"{ratio:.2f} ({ratios[quarter]:.2f}–{ratios[-1 - quarter]:.2f})",
        *(f"{statistics.median(each) / 1e6:,.1f}" for each in sent),
    ]
    return f"| {' | '.join(cells)} |", ratio


def memory_of(nbytes: int, workers: int) -> int:
    """Return the memory that a size needs: each worker has what it acts with and what arrives."""
    return 2 * workers * nbytes + 6 * nbytes


def measure(
    client: Client, size: float, workers: int, rounds: int, memory: Path
) -> tuple[list[Taken], list[Taken]]:
    """Return what versions took from the head alone and from worker to worker."""
    nbytes = round(1e6 * size) // 64 * 64
    repeats = 5 if size <= 10 else 2 if size <= 40 else 1
    taken: dict[bool, list[Taken]] = {False: [], True: []}
    file = memory / f"{size:g}"
    with file.open("wb") as empty:
        empty.truncate(nbytes)
    for turn in range(2 * rounds):
        relays = bool(turn % 2)
        policy = Sized(nbytes, str(file))
        policy.weights.data = policy.weights.clone()  # the head's are its own
        with collecting(client, policy, workers, relays) as collector:
            for _ in range(repeats):
                each = deliver(collector, policy)
                assert relays or each.head == workers * nbytes, "a worker has two shards"
                taken[relays].append(each)
    file.unlink()
    return taken[False], taken[True]


def inside(args: argparse.Namespace) -> None:
    """Measure on the head's host, in its namespace."""
    torch.set_num_threads(1)
    with Client(f"tcp://{address(0)}:8786", timeout=60) as client:
        client.wait_for_workers(args.workers, timeout=300)
        by_host = {name.split("/")[2].rpartition(":")[0]: name for name in client.nthreads()}
        workers = [by_host[address(1 + k)] for k in range(args.workers)]
        client.run(__import__, "clusterenv")  # takes long, and is not to be measured
        check_links(client, workers, args.rate)
        columns = (
            "head alone, s",
            "relay, s",
            "faster by (middle half)",
            "head alone: head sent, MB",
            "relay: head sent, MB",
            "relay: workers sent, MB",
        )
        print(f"\n| weights, MB | {' | '.join(columns)} |\n|---:|{'---:|' * len(columns)}")
        ratios = {}
        for size in args.sizes:
            needed = memory_of(round(1e6 * size), args.workers)
            free = psutil.virtual_memory().available
            if needed > free:
                print(f"{size:g} MB need {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free")
                continue
            taken = measure(client, size, args.workers, args.rounds, Path(args.inside))
            line, ratios[size] = row(size, *taken)
            print(line, flush=True)
        least = pays_from(ratios)
        print(
            f"\n{args.workers} workers, links of {args.rate:g} Mbit/s: from worker to worker is "
            + ("not faster for the largest" if least is None else f"faster from {least:g} MB on"),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1000, help="of each link, in Mbit/s")
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES, help="in MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all is cleaned up
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix=f"{NAME}-") as memory,
        Network(1 + args.workers, args.rate) as network,
    ):
        where = ["--host", address(0), "--port", "8786", "--no-dashboard"]
        network.start(0, "-m", "dask", "scheduler", *where)
        for host in range(1, 1 + args.workers):
            network.start(
                *(host, "-m", "dask", "worker", f"tcp://{address(0)}:8786"),
                *("--host", address(host), "--nthreads", "1", "--memory-limit", "0"),
                *("--no-nanny", "--no-dashboard"),
            )
        head = network.start(0, __file__, "--inside", memory, *sys.argv[1:], quiet=False)
        code = head.wait()
    sys.exit(code)


if __name__ == "__main__":
    main()
