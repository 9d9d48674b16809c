"""Reads cluster files, which describe a cluster to start: ``cluster="cluster.yaml"``."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from distributed import LocalCluster

from clusterenv.cluster.jobqueue import JOBQUEUES, jobqueue_class
from clusterenv.errors import ConfigError

__all__ = ["ClusterFile", "is_cluster_file", "read_cluster_file"]

_SHORT = {
    "directives": "job_extra_directives",
    "partition": "queue",
    "prologue": "job_script_prologue",
}
_LISTS = ("job_directives_skip", "job_extra_directives", "job_script_prologue", "worker_extra_args")
_COMMON = ("cluster", "n_workers", "security")
# Names that dask-jobqueue has deprecated, and those that it passes to itself.
_EXCLUDED = {
    *("asynchronous", "env_extra", "extra", "header_skip", "host", "job_cls", "job_extra"),
    *("job_kwargs", "loop", "project", "scheduler", "scheduler_cls", "self"),
    *("base_class_kwargs", "dashboard_address", "kwargs"),
}
_LOCAL = ("local_directory", "memory_limit")  # LocalCluster passes these on to its workers


@dataclass(frozen=True)
class ClusterFile:
    """The content of a cluster file."""

    cluster: str
    """``"local"``, or the name of a batch system."""
    options: Mapping[str, Any]
    """Passed to the cluster that is started."""


def is_cluster_file(cluster: Any) -> bool:
    """Whether an argument is the path of a cluster file; scheduler files are JSON."""
    return isinstance(cluster, (str, os.PathLike)) and Path(cluster).suffix in (".yaml", ".yml")


def read_cluster_file(path: str | os.PathLike[str]) -> ClusterFile:
    """Read a cluster file; ``ConfigError`` if that fails or it has an unknown option."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError) as error:  # also a name with a null byte, or a binary file
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"the cluster file {path} cannot be read: {reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the cluster file {path} is no YAML: {error}") from error
    if not isinstance(content, dict) or content.get("cluster") not in ("local", *JOBQUEUES):
        found = content.get("cluster") if isinstance(content, dict) else content
        raise ConfigError(
            f"the cluster file {path} must say which cluster, and says {found!r}; one of local, "
            f"{', '.join(JOBQUEUES)}:\n\n    cluster: slurm\n    cores: 8\n    memory: 16GB\n"
        )
    try:
        return _parse(content, _accepted_options(content["cluster"]))
    except ConfigError as error:
        raise ConfigError(f"the cluster file {path}: {error}") from error


def _accepted_options(cluster: str) -> set[str]:
    """Return the names of the options that a kind of cluster takes."""
    if cluster == "local":
        classes: list[Any] = [LocalCluster]
    else:
        cls: Any = jobqueue_class(cluster)
        classes = [*cls.__mro__[:2], *cls.job_cls.__mro__[:2]]
    names = {name for each in classes for name in inspect.signature(each.__init__).parameters}
    more = {*_LOCAL, "dashboard_address", "host"} if cluster == "local" else set(_SHORT)
    return (names - _EXCLUDED) | more | set(_COMMON)


def _parse(content: Mapping[str, Any], accepted: Collection[str]) -> ClusterFile:
    """Return the content of a file with the option names of dask-jobqueue.

    ``accepted`` are the names that it may have; hyphens count as underscores.

    >>> _parse({"cluster": "slurm", "partition": "gpu"}, ["cluster", "partition"])
    ClusterFile(cluster='slurm', options={'queue': 'gpu'})
    """
    options: dict[str, Any] = {}
    for key, value in content.items():
        short = str(key).replace("-", "_")
        if short not in accepted:
            close = difflib.get_close_matches(short, accepted, n=1, cutoff=0.5)
            hint = (
                f"did you mean {close[0]!r}?" if close else f"one of {', '.join(sorted(accepted))}"
            )
            raise ConfigError(f"{key!r} is no option of cluster {content['cluster']!r}; {hint}")
        name = _SHORT.get(short, short)
        if name in options:
            raise ConfigError(f"{key!r} and {name!r} are the same option; keep one of them")
        if value is None:
            continue
        if name == "walltime" and not isinstance(value, str):
            # YAML reads 1:30:00 as a number in base 60.
            raise ConfigError(f"walltime: {value!r} is no string; use quotes: walltime: '01:30:00'")
        is_lines = name in _LISTS and isinstance(value, str)
        options[name] = value.splitlines() if is_lines else value
    return ClusterFile(options.pop("cluster"), options)
