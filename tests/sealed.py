"""Fragments with every kind of column, and what the head expects of their shard."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from clusterenv.data.fragment import Fragment
from clusterenv.data.fragment_decoder import ExpectedRows
from clusterenv.data.fragment_encoder import FragmentEncoder
from clusterenv.data.record_batch import Origin
from clusterenv.data.spaces import Layout

ORIGIN = Origin(run=2**61 + 5, shard=3, incarnation=1, num_envs=2, first_env=6)
HORIZON = 3
OBSERVATIONS = spaces.Dict(
    frame=spaces.Box(0, 255, (2, 2), np.uint8),
    speed=spaces.Box(-1, 1, (3,), np.float32),
    buttons=spaces.MultiBinary(2),
    level=spaces.Discrete(4),
    mission=spaces.Text(9),
)
ACTIONS = spaces.Discrete(4)
OBS_NAMES = [leaf.name("obs") for leaf in Layout(OBSERVATIONS).leaves]


def expected(**changes: Any) -> ExpectedRows:
    rows = ExpectedRows(ORIGIN, HORIZON, Layout(OBSERVATIONS), Layout(ACTIONS), text=True)
    return rows._replace(**changes)


def fragment(
    seed: int = 0, horizon: int = HORIZON, origin: Origin = ORIGIN, version: int = 7
) -> Fragment:
    """Two environments; an episode of the first ends after the first step."""
    rng, width = np.random.default_rng(seed), origin.num_envs
    rows = width * horizon
    words = np.array(["go", "", "links", "über", "naïve", "x"], object)
    columns = {
        "obs.buttons": rng.integers(0, 2, (rows, 2)).astype(np.int8),
        "obs.frame": rng.integers(0, 256, (rows, 2, 2)).astype(np.uint8),
        "obs.level": rng.integers(0, 4, rows),
        "obs.mission": rng.choice(words, rows),
        "obs.speed": rng.random((rows, 3)).astype(np.float32),
        "reward": rng.random(rows).astype(np.float32),
        "terminated": np.arange(rows) == 0,
        "truncated": np.zeros(rows, np.bool_),
        "action": rng.integers(0, 4, rows),
        "action_mask": rng.integers(0, 2, (rows, 4)).astype(np.bool_),
        "log_prob": rng.random(rows).astype(np.float32),
        "episode": np.zeros(rows, np.int32),
        "step": np.repeat(np.arange(horizon, dtype=np.int32), width),
        "env": np.tile(origin.first_env + np.arange(2, dtype=np.int32), horizon),
        "version": np.full(rows, version, np.int32),
    }
    last = [row for row in range(rows - width, rows) if row]
    tail_rows = np.array([0, *last[::-1]])  # as an env loop gives them: not in order
    tail = {name: columns[name][rng.permutation(rows)[: len(tail_rows)]] for name in OBS_NAMES}
    state = {"h": rng.random((width, 3)).astype(np.float32), "done": np.array([True, False])}
    return Fragment(columns, width, tail_rows, tail, state, [1.5], [1])


def sealed(encoder: FragmentEncoder, given: Fragment) -> tuple[bytes | None, np.ndarray]:
    """Return the schema's message, if there is one, and that of the fragment, as received."""
    schema, pieces = encoder.encode(given)
    return schema, np.frombuffer(b"".join(pieces), np.uint8).copy()
