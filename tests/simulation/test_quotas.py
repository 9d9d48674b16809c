"""Each environment plays its own number of episodes, whichever end first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from agents import Counter, Cycle
from gymnasium.vector import AutoresetMode
from worlds import CountsSteps, Masked

from clusterenv.policies import Categorical, Policy
from clusterenv.simulation.engines import build
from clusterenv.simulation.engines.base import Recipe
from clusterenv.simulation.loop import EnvLoop
from clusterenv.simulation.policy_runner import Acting
from clusterenv.simulation.quotas import play, split_episodes

BOTH = (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP)


def played(envs: Any, policy: Policy, quotas: tuple[int, ...], mode: AutoresetMode) -> Any:
    engine = build(Recipe(envs, autoreset_mode=mode), 0, len(quotas))
    loop = EnvLoop(engine, policy, 0, 4, list(range(len(quotas))), deterministic=True)
    returns, lengths = play(loop, quotas, Acting(3, {}))
    return returns.tolist(), lengths.tolist()


@pytest.mark.parametrize("mode", BOTH)
def test_short_episodes_are_not_favoured(mode: AutoresetMode) -> None:
    envs = (lambda: CountsSteps(1), lambda: CountsSteps(7))
    policy = Cycle(actions=1, start=2)  # each step gives 2
    returns, lengths = played(envs, policy, (2, 3), mode)
    assert lengths == [1, 1, 7, 7, 7]
    assert returns == [2.0, 2.0, 14.0, 14.0, 14.0]


@pytest.mark.parametrize("mode", BOTH)
def test_truncations_end_episodes_and_masks_hold(mode: AutoresetMode) -> None:
    def net(obs: torch.Tensor) -> torch.Tensor:
        return obs.repeat(1, 4)

    module = torch.nn.Module()
    module.forward = net  # type: ignore[method-assign]
    _, lengths = played(lambda: Masked("info"), Categorical(module), (2, 2), mode)
    assert lengths == [7, 7, 6, 7]  # the second begins at its seed


def test_recurrent_state_begins_anew() -> None:
    returns, lengths = played(lambda: CountsSteps(3), Counter(), (3,), AutoresetMode.SAME_STEP)
    assert (returns, lengths) == ([0.0] * 3, [3] * 3)


def test_episodes_are_split_evenly() -> None:
    assert sum(split_episodes(20, 7)) == 20
    assert np.ptp(split_episodes(20, 7)) == 1
