"""Freed memory stays with the process that will need it again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

_FAULTS = """
import resource
import numpy as np
from clusterenv.worker.memory import keep_freed_memory


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        np.empty(1 << 20, np.uint8)[:] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


given_back = faults()
assert keep_freed_memory()
faults()
print(given_back, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have no mallopt")
def test_an_array_of_the_same_size_takes_no_page_from_the_system() -> None:
    environ = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "65536"}  # as Dask's nannies do
    shown = subprocess.run(
        [sys.executable, "-c", _FAULTS], env=environ, capture_output=True, text=True, check=True
    ).stdout
    given_back, kept = map(int, shown.split())
    assert kept < given_back / 10
