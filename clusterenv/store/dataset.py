"""Rows on disk as Arrow datasets and Minari datasets."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import pyarrow.dataset
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_flag, check_instance, check_path
from clusterenv.data.spaces import Column, Layout
from clusterenv.errors import ConfigError, EmptyStore, StoreNotWritten, UnknownEnv, shown
from clusterenv.store.journal.journal import Journal
from clusterenv.store.journal.snapshot import Snapshot, open_snapshot

if TYPE_CHECKING:
    from minari import EpisodeData, MinariDataset

__all__ = ["Episode", "episodes", "from_minari", "open_dataset", "to_minari"]

logger = logging.getLogger("clusterenv")
_SOURCE = ("run", "shard", "incarnation")  # the same for all rows of a batch
_KEY = (*_SOURCE, "env", "episode", "step")


def open_dataset(directory: str | Path, *, checksums: bool = True) -> pyarrow.dataset.Dataset:
    """Return the rows of a saved store, a journal or a collection, without loading them.

    The dataset is a snapshot of the last commit: later commits do not change its rows.

    DuckDB, Polars and pandas query it directly. ``next_obs`` is null if another row holds the
    next observation: it is the ``obs`` of the row with the same ``run``, ``shard``,
    ``incarnation``, ``env`` and ``episode`` and the next ``step``. Both are lists, as all columns
    of arrays; the field's metadata has the ``shape`` of a row. For stacked observations, ``obs``
    is the newest frame.

    Parameters
    ----------
    directory
        Of a saved store, a journal or a collection.
    checksums
        Whether to read all files once and compare their checksums. ``False`` compares only their
        sizes, which is fast for very large runs but does not find altered bytes.

    Raises
    ------
    StoreUnreadable
        If there is no store, or its format is another one.
    StoreDamaged
        If a file is missing or was altered; the message says which, and what is readable.

    Examples
    --------
    ::

        rows = clusterenv.open_dataset("runs/x/replay")
        duckdb.sql("select version, avg(reward) from rows group by version")
    """
    path = check_path("directory", directory, "open_dataset('replay')")
    check_flag("checksums", checksums, "open_dataset('replay', checksums=False)")
    snapshot = open_snapshot(path)
    snapshot.check(checksums)
    return snapshot.dataset()


@dataclass(frozen=True)
class Episode:
    """A complete episode; ``observations`` has one row more than the other arrays."""

    observations: dict[str, Column]
    actions: Column
    rewards: Column
    terminated: bool
    truncated: bool


def episodes(snapshot: Snapshot) -> Iterator[Episode]:
    """Yield the complete episodes; loads all rows into memory."""
    batches = list(snapshot.batches())
    if not batches:
        return
    names = ["env", "episode", "step", "action", "reward", "terminated", "truncated"]
    names += batches[0].tail
    rows = {name: np.concatenate([batch.flat(name) for batch in batches]) for name in names}
    for name in _SOURCE:
        rows[name] = np.concatenate([np.full(b.num_rows, getattr(b, name)) for b in batches])
    tail = {name: np.concatenate([b.tail[name] for b in batches]) for name in batches[0].tail}
    starts = np.cumsum([0, *(batch.num_rows for batch in batches[:-1])])
    tail_rows = np.concatenate([b.tail_rows + s for b, s in zip(batches, starts, strict=True)])
    tail_of = np.full(len(rows["step"]), -1)
    tail_of[tail_rows] = np.arange(len(tail_rows))
    order = np.lexsort([rows[name] for name in reversed(_KEY)])
    begins = np.zeros(len(order), np.bool_)  # the rows at which another episode begins
    for name in _KEY[:-1]:
        begins[1:] |= np.diff(rows[name][order]) != 0
    for track in np.split(order, np.flatnonzero(begins)):
        last = track[-1]
        ended = rows["terminated"][last] or rows["truncated"][last]
        if not ended or not (rows["step"][track] == np.arange(len(track))).all():
            continue
        ends = [tail_of[last]]
        yield Episode(
            {name: np.concatenate([rows[name][track], tail[name][ends]]) for name in tail},
            rows["action"][track],
            rows["reward"][track],
            bool(rows["terminated"][last]),
            bool(rows["truncated"][last]),
        )


def to_minari(
    directory: str | Path,
    dataset_id: str,
    *,
    env: str | gym.Env[Any, Any] | None = None,
    observation_space: spaces.Space[Any] | None = None,
    action_space: spaces.Space[Any] | None = None,
    **metadata: Any,
) -> MinariDataset:
    """Write all complete episodes as a Minari dataset, without loss.

    Parameters
    ----------
    directory
        Of a saved store, a journal or a collection.
    dataset_id
        Such as ``cartpole/random-v0``; Minari writes it below ``MINARI_DATASETS_PATH``.
    env
        Environment of the rows; alternatively, give both spaces.
    observation_space, action_space
        By default those of ``env``.
    **metadata
        Passed to ``minari.create_dataset_from_buffers``: ``algorithm_name``, ``author``, …

    Raises
    ------
    EmptyStore
        If there is no complete episode.
    ConfigError
        If the rows do not match the spaces, or Minari refuses the id or the metadata.
    StoreNotWritten
        If the disk is full or gone.
    """
    try:
        import minari
        from minari.data_collector import EpisodeBuffer
    except ImportError as error:
        raise ConfigError("to_minari needs Minari: pip install 'clusterenv[minari]'") from error
    right = "to_minari(directory, 'cartpole/random-v0', env='CartPole-v1')"
    path = check_path("directory", directory, right)
    check_instance("dataset_id", dataset_id, str, right)
    if env is not None:
        made = _made(env, right)
        if observation_space is None:
            observation_space = made.observation_space
        if action_space is None:
            action_space = made.action_space
        if made is not env:
            made.close()
    if observation_space is None or action_space is None:
        raise ConfigError(f"to_minari must know the spaces: {right}")
    check_instance("observation_space", observation_space, spaces.Space, right)
    check_instance("action_space", action_space, spaces.Space, right)
    layout = Layout(observation_space)
    names = [leaf.name("obs") for leaf in layout.leaves]
    snapshot = open_snapshot(path)
    whole = list(episodes(snapshot))
    if not whole:
        raise EmptyStore(f"{path} holds no whole episode; collect more rows first")
    _check_space("observation_space", observation_space, "obs", whole[0].observations, right)
    _check_space("action_space", action_space, "action", {"action": whole[0].actions}, right)
    buffers = [
        EpisodeBuffer(
            id=index,
            observations=layout.nest([episode.observations[name] for name in names]),
            actions=episode.actions,
            rewards=episode.rewards.tolist(),
            terminations=[False] * (len(episode.rewards) - 1) + [episode.terminated],
            truncations=[False] * (len(episode.rewards) - 1) + [episode.truncated],
            infos={},
        )
        for index, episode in enumerate(whole)
    ]
    left_out = snapshot.rows - sum(len(buffer.rewards) for buffer in buffers)
    if left_out:
        logger.info("Left out %d of %d rows, of incomplete episodes", left_out, snapshot.rows)
    try:
        return minari.create_dataset_from_buffers(
            dataset_id,
            buffers,
            env=env,
            observation_space=observation_space,
            action_space=action_space,
            data_format="arrow",
            jpeg_encoding=False,
            **metadata,
        )
    except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
        raise ConfigError(f"Minari cannot write {shown(dataset_id)}: {error}. {right}") from error
    except OSError as error:
        raise StoreNotWritten(f"Minari cannot write {shown(dataset_id)}: {error}") from error


def from_minari(dataset: str | MinariDataset, directory: str | Path) -> int:
    """Write the episodes of a Minari dataset to a journal, and return the number of rows.

    For learners without an environment, such as CQL: ``ReplayStore.load(directory)`` samples them,
    with ``NStep`` and true final observations as if they had been collected. Every episode is one
    of environment 0, with version 0; ``directory`` may hold rows already.

    Parameters
    ----------
    dataset
        Its id, such as ``mujoco/halfcheetah/medium-v0``, or what ``minari.load_dataset`` returned.
    directory
        Of a new journal, or one with the same columns.

    Raises
    ------
    ConfigError
        If Minari has no such dataset here, or what it holds does not fit its own spaces.
    EmptyStore
        If it has no episode.
    StoreNotWritten
        If the disk is full or gone.
    """
    try:
        import minari
    except ImportError as error:
        raise ConfigError("from_minari needs Minari: pip install 'clusterenv[minari]'") from error
    right = "from_minari('mujoco/halfcheetah/medium-v0', 'rows')"
    path = check_path("directory", directory, right)
    if isinstance(dataset, str):
        try:
            dataset = minari.load_dataset(dataset)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"Minari cannot load {shown(dataset)}: {error}; "
                "minari.download_dataset(…) fetches one"
            ) from error
    check_instance("dataset", dataset, minari.MinariDataset, right)
    if not dataset.total_episodes:
        raise EmptyStore(f"the Minari dataset {dataset.id} has no episode")
    layouts = Layout(dataset.observation_space), Layout(dataset.action_space)
    run, rows = secrets.randbits(62), 0
    journal = Journal(path)
    try:
        for number, episode in enumerate(dataset.iterate_episodes()):
            try:
                batch = _batch_of(episode, number, run, *layouts)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"episode {episode.id} of {dataset.id} does not fit its spaces: {error}"
                ) from error
            journal.append(batch)
            rows += batch.num_rows
        journal.commit()
    finally:
        journal.close()
    return rows


def _batch_of(
    episode: EpisodeData, number: int, run: int, observations: Layout, actions: Layout
) -> Batch:
    """Return an episode as a batch of one environment."""
    n = len(episode.rewards)
    seen = observations.columns(episode.observations, n + 1, "obs")
    names = [leaf.name("obs") for leaf in observations.leaves]
    (action,) = actions.columns(episode.actions, n, "action")
    columns: dict[str, Column] = {
        **{name: column[:-1] for name, column in zip(names, seen, strict=True)},
        "action": action,
        "reward": np.asarray(episode.rewards, np.float32),
        "terminated": np.asarray(episode.terminations, np.bool_),
        "truncated": np.asarray(episode.truncations, np.bool_),
        "env": np.zeros(n, np.int32),
        "episode": np.full(n, number, np.int32),
        "step": np.arange(n, dtype=np.int32),
        "version": np.zeros(n, np.int32),
    }
    return Batch(
        columns,
        1,
        tail_rows=np.array([n - 1]),
        tail={name: column[-1:] for name, column in zip(names, seen, strict=True)},
        state={},
        run=run,
        shard=0,
        incarnation=0,
        policy_version=0,
    )


def _made(env: Any, right: str) -> gym.Env[Any, Any]:
    try:
        made = gym.make(env) if isinstance(env, (str, EnvSpec)) else env
    except (gym.error.Error, ImportError, TypeError, ValueError) as error:
        raise UnknownEnv(f"{error}: {right}") from error
    check_instance("env", made, gym.Env, right)
    return made


def _check_space(
    argument: str, space: spaces.Space[Any], root: str, rows: Mapping[str, Column], right: str
) -> None:
    wanted = [f"{leaf.name(root)} of shape {leaf.shape}" for leaf in Layout(space).leaves]
    found = [f"{name} of shape {column.shape[1:]}" for name, column in rows.items()]
    if sorted(wanted) != sorted(found):
        raise ConfigError(
            f"{argument}={space} has {', '.join(wanted)} in each row, but the rows have "
            f"{', '.join(found)}; give the space that they are from, or their environment: {right}"
        )
