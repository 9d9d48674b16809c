"""The facts about a cluster, and the findings that follow from them; pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["Finding", "Process", "Report", "Route", "Trial", "judge", "show"]

_SHOWN = ("python", "clusterenv", "dask", "distributed", "cloudpickle", "numpy", "pyarrow", "torch")
_SLOW_SECONDS = 0.01
_SLOW_BYTES = 50e6
_OUT_OF_MEMORY = "the job ran out of memory: raise memory"
_ADVICE = {  # by what the log of a job says
    "No module named": "install the package in the environment of the jobs, or name another "
    "Python in the cluster file: python: /path/to/python",
    "No such file or directory": "the Python or a file of the job is not on the nodes: name one "
    "that is (python: …), or load it in the prologue",
    "command not found": "the prologue calls a command that the nodes do not have",
    "Timed out": "the job cannot reach the scheduler: name the network that both are on, "
    "interface: ib0",
    "oom_kill": _OUT_OF_MEMORY,
    "oom-kill": _OUT_OF_MEMORY,
    "out of memory": _OUT_OF_MEMORY,
}


@dataclass(frozen=True)
class Process:
    """One process of the cluster."""

    name: str
    """``"head"``, ``"scheduler"``, or the address of a worker."""
    versions: Mapping[str, str | None]
    """Versions of Python and packages; ``None`` for a package that is not installed."""
    host: str | None = None
    cpus: int | None = None
    """CPUs that it may run on."""
    threads: int | None = None
    """Threads that Dask runs tasks in."""


@dataclass(frozen=True)
class Route:
    """The network route from the head to a worker."""

    worker: str
    error: str | None = None
    """Why the worker cannot be reached, if it cannot."""
    source: str | None = None
    """The head's address on this route."""
    interface: str | None = None
    """The head's network interface on this route."""
    seconds: float | None = None
    """Round-trip time of an actor call."""
    bytes_per_second: float | None = None
    """Bandwidth of a large result."""


@dataclass(frozen=True)
class Trial:
    """Result of stepping an environment on the workers."""

    env: str
    error: str | None = None
    steps_per_second: float | None = None


@dataclass(frozen=True)
class Report:
    """The facts about a cluster."""

    cluster: str
    failure: str | None = None
    """Why there is no cluster, or no worker."""
    tls: bool | None = None
    head: Process | None = None
    scheduler: Process | None = None
    workers: tuple[Process, ...] = ()
    routes: tuple[Route, ...] = ()
    trial: Trial | None = None
    script: str | None = None
    """The job script for a batch system."""
    logs: Mapping[str, str] = field(default_factory=dict)
    """Last lines of the logs of jobs whose workers did not connect."""


@dataclass(frozen=True)
class Finding:
    """A problem to solve, or a note."""

    text: str
    blocking: bool = True
    """Whether the cluster cannot be used before this is changed."""


def judge(report: Report) -> list[Finding]:
    """Return the findings that follow from a report; the cluster is ready if none is blocking.

    Examples
    --------
    >>> judge(Report("slurm", failure="no worker came within 60 s"))[0].blocking
    True
    """
    return list(_findings(report))


def _findings(report: Report) -> Iterator[Finding]:
    if report.failure is not None:
        yield Finding(report.failure + _log_advice(report.logs))
    yield from _versions(report)
    yield from _routes(report.routes)
    yield from _processors(report.workers)
    if report.trial is not None and report.trial.error is not None:
        yield Finding(f"{report.trial.env} does not run on the workers: {report.trial.error}")
    if report.tls is False:
        yield _note(
            "the cluster speaks plain TCP: everyone who reaches its ports can run code as you. "
            "Clusters that ClusterEnv starts speak TLS unless security=False"
        )


def _note(text: str) -> Finding:
    return Finding(text, blocking=False)


def _log_advice(logs: Mapping[str, str]) -> str:
    text = "\n".join(logs.values()).lower()
    for sign, advice in _ADVICE.items():
        if sign.lower() in text:
            return f". The log of a job says {sign!r}: {advice}"
    return ""


def _versions(report: Report) -> Iterator[Finding]:
    if report.head is None:
        return
    others = [*report.workers, *([report.scheduler] if report.scheduler else [])]
    for package, ours in report.head.versions.items():
        if ours is None:
            continue
        differ: dict[str | None, list[str]] = {}
        for process in others:
            theirs = process.versions.get(package)
            # The scheduler runs no environments: it needs only the packages of Dask itself.
            needed = process is not report.scheduler or package in ("python", "dask", "distributed")
            if needed and theirs != ours:
                differ.setdefault(theirs, []).append(process.name)
        for theirs, names in differ.items():
            where = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            if theirs is None:
                yield Finding(f"{package} {ours} is not installed on {where}: install it")
            else:
                yield Finding(
                    f"{package} is {ours} at the head and {theirs} on {where}: use one environment "
                    "for both",
                    blocking=ours.split(".")[:2] != theirs.split(".")[:2],
                )


def _routes(routes: tuple[Route, ...]) -> Iterator[Finding]:
    for route in routes:
        seconds, rate = route.seconds or 0.0, route.bytes_per_second or _SLOW_BYTES
        if route.error is not None:
            yield Finding(
                f"the head cannot reach {route.worker}: {route.error}. Name a network that both "
                "are on (interface: ib0); if a firewall leaves only some ports open, "
                "clusterenv.channel.ports: [9000, 9100] and worker_extra_args: "
                "['--worker-port', '9101:9200']"
            )
        elif seconds > _SLOW_SECONDS:
            yield _note(
                f"a call to {route.worker} takes {1e3 * seconds:.0f} ms: step by step will be "
                "slow; collect with the policy beside the environments"
            )
        elif rate < _SLOW_BYTES:
            yield _note(
                f"{rate / 1e6:.0f} MB/s from {route.worker}: is there a faster network than the "
                "one in use (interface: ib0)?"
            )


def _processors(workers: tuple[Process, ...]) -> Iterator[Finding]:
    counts = Counter(worker.host for worker in workers if worker.host and worker.cpus)
    for host, count in counts.items():
        cpus = max(worker.cpus or 0 for worker in workers if worker.host == host)
        if count > cpus:
            shared = f"{cpus} CPU{'s' if cpus > 1 else ''}"
            yield _note(f"{count} workers on {host} share {shared}: they slow each other down")


def show(report: Report) -> str:
    """Format a report as text."""
    lines = [f"cluster     {report.cluster}"]
    if report.script is not None:
        lines += ["job script", *(f"    {line}" for line in report.script.strip().splitlines())]
    for path, tail in report.logs.items():
        lines += [f"the end of {path}", *(f"    {line}" for line in tail.splitlines())]
    if report.tls is not None:
        lines.append(f"TLS         {'yes' if report.tls else 'no'}")
    processes = [each for each in (report.head, report.scheduler, *report.workers) if each]
    if processes:
        lines.append("versions    " + "  ".join(_SHOWN))
        for process in processes:
            versions = "  ".join(process.versions.get(name) or "-" for name in _SHOWN)
            lines.append(f"    {process.name}: {versions}")
    for process in report.workers:
        if process.host is not None:
            lines.append(
                f"CPUs        {process.name} on {process.host}: {process.cpus} to run on, "
                f"{process.threads} thread{'s' if (process.threads or 0) > 1 else ''}"
            )
    for route in report.routes:
        way = f"from {route.source or '?'} ({route.interface or '?'})"
        speed = "not reached" if route.error else "reached"
        if route.seconds is not None and route.bytes_per_second is not None:
            speed = (
                f"{1e3 * route.seconds:.1f} ms there and back, "
                f"{route.bytes_per_second / 1e6:,.0f} MB/s"
            )
        lines.append(f"route       {way} to {route.worker}: {speed}")
    if report.trial is not None and report.trial.steps_per_second is not None:
        lines.append(
            f"environment {report.trial.env}: {report.trial.steps_per_second:,.0f} steps/s, one "
            "environment per worker"
        )
    return "\n".join(lines)
