"""Rows of episodes side by side: of a sample of sequences, or of a fragment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clusterenv.policies import Fragment

__all__ = ["EpisodeRows", "episodes_of"]


@dataclass(frozen=True)
class EpisodeRows:
    """Consecutive rows of one episode in each column, ``[time, n]``; after its end, anything."""

    obs: Tensor
    """``[time + 1, n, …]``: what follows the last row too."""
    action: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    state: Mapping[str, Tensor]
    """Before the first row, ``[n, …]``."""

    @classmethod
    def of(cls, sample: Mapping[str, Tensor]) -> EpisodeRows:
        """Return the rows of a sample of :class:`clusterenv.store.Sequences`."""
        names = ("action", "reward", "terminated", "truncated")
        columns = {name: sample[name].transpose(0, 1) for name in names}
        obs = torch.cat([sample["obs"][:, :1], sample["next_obs"]], 1).transpose(0, 1)
        state = {
            name.removeprefix("state."): column
            for name, column in sample.items()
            if name.startswith("state.")
        }
        return cls(obs, **columns, state=state)

    def to(self, device: torch.device) -> EpisodeRows:
        """Return the rows on a device."""
        columns = {name: part for name, part in vars(self).items() if name != "state"}
        moved = {name: column.to(device) for name, column in columns.items()}
        return EpisodeRows(
            **moved, state={name: part.to(device) for name, part in self.state.items()}
        )


def episodes_of(
    fragment: Fragment, initial: Mapping[str, Tensor]
) -> tuple[EpisodeRows, npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the parts of episodes in a fragment side by side, where each row is from, and a mask.

    ``initial`` is the state of one environment at the start of an episode. The last row of a part
    is as if truncated there.
    """
    columns, envs = fragment.columns, fragment.num_envs
    begins = columns["step"].reshape(-1, envs) == 0
    begins[0] = True
    env, start = np.nonzero(begins.T)  # environment by environment, in order of time
    end = np.append(start[1:], 0)
    end[end == 0] = len(begins)
    time = start + np.arange(len(begins))[:, None]
    mask, last = time < end, time >= end - 1
    at = np.minimum(time, end - 1) * envs + env
    following = np.empty_like(columns["obs"])
    following[:-envs] = columns["obs"][envs:]
    following[fragment.tail_rows] = fragment.tail["obs"]
    obs = np.concatenate([columns["obs"][at[:1]], following[at]])
    goes_on = torch.from_numpy(start == 0)
    state = {}
    for name, before in initial.items():
        state[name] = before.repeat(len(env), *[1] * (before.ndim - 1))
        state[name][goes_on] = torch.from_numpy(fragment.state[name])
    names = ("action", "reward", "terminated")
    given = {name: torch.from_numpy(columns[name][at]) for name in names}
    given["truncated"] = torch.from_numpy(columns["truncated"][at] | last)
    return EpisodeRows(torch.from_numpy(obs), **given, state=state), at, mask
