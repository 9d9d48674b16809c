"""Some hundred wrong calls; ``make fuzz`` makes ten thousand."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
from distributed import Client
from fuzz import Fuzz
from targets import LEFT_OUT, TARGETS

import clusterenv
from clusterenv import policies, store

CLASSES = (
    clusterenv.ClusterEnv,
    clusterenv.Collector,
    clusterenv.ReplayStore,
    clusterenv.RolloutStore,
    store.Journal,
)


@pytest.fixture(scope="module")
def fuzz(client: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzz]:
    here = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setenv("MINARI_DATASETS_PATH", str(here))
        fuzz = Fuzz(client, here, seed=1)
        yield fuzz
        fuzz.close()


def test_what_wrong_calls_are_made_of_is_right(fuzz: Fuzz) -> None:
    fuzz.right_calls()


def test_a_wrong_call_ends_in_an_error_of_ours_and_leaves_nothing(fuzz: Fuzz) -> None:
    report = fuzz.run(range(500))
    print(report)
    assert not report.failures, str(report)


def test_every_public_callable_is_tried(fuzz: Fuzz) -> None:
    tried = {eval(target.call, fuzz.names).__qualname__ for target in TARGETS}
    for package in (clusterenv, store, policies):
        for name in package.__all__:
            found = getattr(package, name)
            if callable(found) and inspect.signature(found).parameters:
                assert found.__qualname__ in tried | LEFT_OUT, f"{name}: add it to targets.py"
    for kind in CLASSES:
        for name, method in inspect.getmembers(kind, inspect.isroutine):
            ours = (getattr(method, "__module__", None) or "").startswith("clusterenv.")
            if ours and not name.startswith("_") and len(inspect.signature(method).parameters) > 1:
                assert method.__qualname__ in tried | LEFT_OUT, f"{method}: add it to targets.py"
