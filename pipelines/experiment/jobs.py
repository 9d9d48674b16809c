"""Output files of batch jobs, in the directory of what they work for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dask

__all__ = ["LOGS", "job_files"]

LOGS = "jobs"
"""Directory in a run directory: what the jobs of a batch system print, such as slurm-17.out."""
_SETTING = "clusterenv.jobs.log-directory"


@contextmanager
def job_files(out: Path) -> Iterator[None]:
    """Have jobs that are submitted within the context print into ``out``.

    What a cluster file or Dask's configuration says comes first.
    """
    directory = dask.config.get(_SETTING, None) or str((out / LOGS).absolute())
    with dask.config.set({_SETTING: directory}):
        yield
