"""A fork of the head has its parent's objects, and must not use what both would share."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agents import cartpole_policy
from batches import Fleet, Vector
from conftest import wait_until
from distributed import Client

import clusterenv
from clusterenv import ReplayStore, RolloutStore, errors
from clusterenv.data import processes
from clusterenv.store import Journal


def in_fork(function: Callable[[], Any]) -> str:
    """Return what a function returns, or raises, in a fork of this process."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = repr(function())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        try:
            os.write(writes, said.encode())
        finally:
            os._exit(0)
    os.close(writes)
    ended = wait_until(lambda: os.waitpid(child, os.WNOHANG)[0] == child, 20)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with os.fdopen(reads, "rb") as pipe:
        said = pipe.read().decode()
    assert ended, f"the fork did not end: {said}"
    return said


def assert_refused(said: str, what: str) -> None:
    assert said.startswith(f"WrongProcess: {what} belongs to process {os.getpid()}, "), said
    assert "get_context('spawn')" in said


def test_the_guard_knows_its_process() -> None:
    guard = processes.ProcessGuard("this thing", "sockets")
    assert guard.is_here
    guard.check()
    assert in_fork(lambda: guard.is_here) == "False"
    assert_refused(in_fork(guard.check), "this thing")
    assert issubclass(errors.WrongProcess, RuntimeError)


# On a cluster


@pytest.fixture
def collector(client: Client, leaves_nothing: None) -> Iterator[clusterenv.Collector]:
    with clusterenv.Collector(
        "CartPole-v1", cartpole_policy(), num_envs=4, horizon=8, shards=2, cluster=client
    ) as collector:
        yield collector


def test_a_cluster_env_is_its_parents_alone(client: Client, leaves_nothing: None) -> None:
    with clusterenv.make_vec("CartPole-v1", 4, shards=2, cluster=client) as envs:
        envs.reset(seed=1)
        actions = [0, 1, 0, 1]
        for call in (
            lambda: envs.step(actions),
            lambda: envs.step(cartpole_policy()),
            lambda: envs.reset(seed=1),
            lambda: envs.send(actions),
            lambda: envs.get_attr("spec"),
            envs.render,
            envs.step_wait,
            envs.recv,
        ):
            assert_refused(in_fork(call), "this ClusterEnv")
        assert in_fork(lambda: (envs.close(), envs.__del__(), envs.closed)) == "(None, None, True)"
        envs.send(actions)
        assert_refused(in_fork(envs.recv), "this ClusterEnv")
        envs.recv()
        envs.recv()
        envs.step(actions)


def test_a_collector_is_its_parents_alone(collector: clusterenv.Collector) -> None:
    policy = cartpole_policy()
    first = collector.rollout()
    for call in (
        lambda: collector.publish(policy),
        collector.rollout,
        lambda: collector.collect(16),
        lambda: next(iter(collector)),
        lambda: collector.scale(1),
        lambda: collector.ready,
        collector.stats,
    ):
        assert_refused(in_fork(call), "this Collector")
    gone = in_fork(lambda: (collector.close(), collector.__del__(), collector.closed))
    assert gone == "(None, None, True)"
    assert collector.publish(policy) == 1
    again = collector.rollout()
    assert [batch.num_rows for batch in again] == [batch.num_rows for batch in first]
    assert {batch.policy_version for batch in again} == {1}
    assert len(collector.collect(16)) >= 1
    assert collector.stats().restarts == 0


# Stores


def filled(**options: Any) -> tuple[ReplayStore, Fleet]:
    store, fleet = ReplayStore(200, seed=1, **options), Fleet(Vector(), seed=3, episode=9)
    for _ in range(3):
        store.add(fleet.next()[0])
    return store, fleet


def test_a_store_in_memory_is_copied_with_the_process() -> None:
    """As in a ``DataLoader`` whose workers are forked."""
    store, fleet = filled()
    rows, batch = len(store), fleet.next()[0]

    def use() -> int:
        store.add(batch)
        return len(store.sample(8)["obs"])

    assert in_fork(use) == "8"
    assert len(store) == rows
    sample = in_fork(lambda: store.sample(8)["indices"].tolist())
    assert sample == repr(store.sample(8)["indices"].tolist())
    rollouts = RolloutStore()
    rollouts.add(batch, newest_version=batch.policy_version)
    assert in_fork(lambda: rollouts.take()["obs"].shape) == repr(rollouts.take()["obs"].shape)


def test_a_journal_is_its_parents_alone(tmp_path: Path) -> None:
    store, fleet = filled(journal=tmp_path)
    store.commit(step=1)
    store.add(fleet.next()[0])  # written, and not committed
    batch = fleet.next()[0]
    what = f"the store in {tmp_path}"
    for call in (lambda: store.add(batch), store.commit, lambda: store.commit(step=2)):
        assert_refused(in_fork(call), what)
    assert in_fork(lambda: len(store.sample(8)["obs"])) == "8"
    assert in_fork(lambda: store.save(tmp_path / "copy")) == "None"
    assert len(ReplayStore.load(tmp_path / "copy")) == len(store)

    def end() -> None:
        nonlocal store
        store.close()
        del store
        gc.collect()

    assert in_fork(end) == "None"
    with pytest.raises(errors.StoreInUse):  # the parent still has it
        Journal(tmp_path)
    store.add(batch)
    store.commit(step=3)
    rows = len(store)
    store.close()
    loaded = ReplayStore.load(tmp_path)  # which compares all checksums
    assert len(loaded) == rows
    assert loaded.note == {"step": 3}


def test_a_forgotten_journal_of_a_fork_writes_nothing(tmp_path: Path) -> None:
    journal, fleet = Journal(tmp_path), Fleet(Vector(), seed=3, episode=9)
    journal.append(fleet.next()[0])
    assert_refused(in_fork(journal.commit), f"the store in {tmp_path}")

    def forget() -> None:
        nonlocal journal
        del journal
        gc.collect()

    assert in_fork(forget) == "None"
    journal.append(fleet.next()[0])
    journal.commit()
    rows = journal.manifest.rows
    journal.close()
    assert len(ReplayStore.load(tmp_path)) == rows


def test_mapped_files_are_their_parents_alone(tmp_path: Path) -> None:
    store, fleet = filled(directory=tmp_path)
    batch, what = fleet.next()[0], f"the store in {tmp_path}"
    before = store.sample(8)["obs"]
    for call in (lambda: store.sample(8), lambda: store.add(batch), lambda: store.save("copy")):
        assert_refused(in_fork(call), what)
    assert in_fork(store.close) == "None"
    assert (tmp_path / "columns").is_dir()
    store.add(batch)
    assert store.sample(8)["obs"].shape == before.shape
    store.close()
    assert not (tmp_path / "columns").exists()


def test_a_fork_never_gets_a_store_in_the_middle_of_a_change() -> None:
    store, _ = filled()
    held = threading.Event()

    def change() -> None:
        with store._lock:
            held.set()
            assert wait_until(processes._forking.locked)  # another thread wants to fork

    thread = threading.Thread(target=change)
    thread.start()
    assert held.wait(10)
    assert in_fork(lambda: np.isfinite(store.sample(8)["obs"]).all()) in ("True", "np.True_")
    thread.join(10)
    assert len(store.sample(8)["obs"]) == 8
