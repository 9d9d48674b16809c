"""Plays a fixed number of episodes of each environment, and returns their returns and lengths."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clusterenv.simulation.loop import EnvLoop
from clusterenv.simulation.policy_runner import Acting

__all__ = ["play", "split_episodes"]


def split_episodes(episodes: int, num_envs: int) -> tuple[int, ...]:
    """Return how many episodes each environment plays.

    They are assigned beforehand. The first ``episodes`` that end anywhere would favour short ones.

    Examples
    --------
    >>> split_episodes(7, 3)
    (3, 2, 2)
    """
    least, more = divmod(episodes, num_envs)
    return tuple(least + (env < more) for env in range(num_envs))


def play(
    loop: EnvLoop, quotas: tuple[int, ...], acting: Acting
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Step a new loop until every environment has ended its quota of episodes.

    Returns the returns and the lengths, those of the first environment first. Environments that
    are done earlier go on, and what they do then does not count.
    """
    counts = np.array(quotas)
    wanted = np.arange(counts.max()) < counts[:, None]
    returns = np.zeros(wanted.shape)
    lengths = np.zeros(wanted.shape, np.int64)
    over = ~wanted
    while not over.all():
        fragment = loop.fragment(acting)
        columns = fragment.columns
        env, episode = columns["env"], columns["episode"]
        counted = episode < counts[env]
        at = env[counted], episode[counted]
        np.add.at(returns, at, columns["reward"][counted].astype(np.float64))
        np.add.at(lengths, at, 1)
        ended = columns["terminated"] | columns["truncated"]
        over[env[counted & ended], episode[counted & ended]] = True
        loop.recycle(fragment)
    return returns[wanted], lengths[wanted]
