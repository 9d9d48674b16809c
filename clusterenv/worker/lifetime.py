"""The time that a worker has left until its lifetime or its Slurm job ends."""

from __future__ import annotations

import os
import re
import subprocess
import time

import psutil

__all__ = ["parse_slurm", "seconds_left"]

_ASK_SECONDS = 10.0


def seconds_left(lifetime: float | None) -> float | None:
    """Return the seconds until this process must end, or ``None`` if that is not known.

    ``lifetime`` is that of the Dask worker in seconds, from the start of its process.
    """
    left = []
    if lifetime:
        left.append(psutil.Process().create_time() + lifetime - time.time())
    if end := os.environ.get("SLURM_JOB_END_TIME"):  # set by Slurm 23.02 and newer
        left.append(float(end) - time.time())
    elif (job := os.environ.get("SLURM_JOB_ID")) and (of_job := _ask_slurm(job)) is not None:
        left.append(of_job)
    return min(left) if left else None


def _ask_slurm(job: str) -> float | None:
    try:
        words = ["squeue", "--noheader", "--jobs", job, "--format", "%L"]
        asked = subprocess.run(words, capture_output=True, text=True, timeout=_ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):  # then the end of the job counts as a loss
        return None
    return parse_slurm(asked.stdout.strip())


def parse_slurm(text: str) -> float | None:
    """Return the seconds of ``[[days-]hours:]minutes:seconds``; ``None`` for any other text.

    >>> parse_slurm("1-02:03:04"), parse_slurm("59:58"), parse_slurm("UNLIMITED")
    (93784.0, 3598.0, None)
    """
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    if found is None:
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
