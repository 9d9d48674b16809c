"""Local workers are forked from a process that has imported everything, and differ all the same."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import dask
import numpy as np
import psutil
import pytest
import torch
from distributed import Client

import clusterenv

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


METHOD = "distributed.worker.multiprocessing-method"


def ancestors() -> list[str]:
    return [" ".join(parent.cmdline()) for parent in psutil.Process().parents()]


def draws() -> tuple[float, ...]:
    old = np.random.random()  # noqa: NPY002  # what old environments use
    return old, random.random(), float(torch.rand(()))


def test_workers_share_imports_and_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERENV_TEST_LATE", "1")  # the process that is forked began without it
    with clusterenv.connect("local", n_workers=2, set_as_default=False) as client:
        assert all("forkserver" in names[0] for names in client.run(ancestors).values())
        first, second = client.run(draws).values()
        assert not set(first) & set(second)
        late = client.run(os.environ.get, "CLUSTERENV_TEST_LATE")
        assert set(late.values()) == {"1"}
        threads = client.run(os.environ.get, "OMP_NUM_THREADS")
        assert set(threads.values()) == {"1"}


def test_other_clusters_of_this_process_keep_their_way_to_start_workers() -> None:
    before = dask.config.get(METHOD)
    with clusterenv.connect("local", n_workers=1, set_as_default=False) as client:
        assert dask.config.get(METHOD) == before
        client.restart()
        ((parent, *_),) = client.run(ancestors).values()
        assert "forkserver" in parent  # and ours theirs, also after a restart
    assert dask.config.get(METHOD) == before


FORKS = """
import os
import numpy as np
import torch
import clusterenv.worker.preload
np.random.random(), torch.rand(())  # whatever is imported may have drawn
for _ in range(2):
    child = os.fork()
    if child == 0:
        print(np.random.random(), torch.rand(()).item(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_what_is_forked_draws_numbers_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True)
    first, second = (line.split() for line in done.stdout.splitlines())
    assert not set(first) & set(second)


def test_a_setting_turns_it_off() -> None:
    with (
        dask.config.set(
            {
                "clusterenv.local.fork": False,
                METHOD: "spawn",
            }
        ),
        clusterenv.connect("local", n_workers=1, set_as_default=False) as client,
    ):
        ((parent, *_),) = client.run(ancestors).values()
        assert "forkserver" not in parent


def test_strangers_cannot_have_anything_forked(client: Client) -> None:
    """Who reaches the socket could run code: its directory is for its owner alone."""
    address = Path(forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]
    assert address.is_socket()
    assert stat.S_IMODE(address.parent.stat().st_mode) == 0o700
