"""What both ways to fill a fragment have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from clusterenv.data.fragment import Fragment
from clusterenv.data.spaces import Layout
from clusterenv.simulation.blocks import Block
from clusterenv.simulation.engines import Engine
from clusterenv.simulation.episodes import Ledger
from clusterenv.simulation.policy_runner import PolicyRunner
from clusterenv.simulation.space_check import SpaceCheck

__all__ = ["Filler"]


class Filler(ABC):
    """Steps environments until a fragment is full.

    Parameters
    ----------
    engine
        The environments.
    chooser
        Chooses actions.
    envs
        Global indices of the environments.
    horizon
        Time rows of a fragment.
    guard
        Looks at what environments return.
    """

    def __init__(
        self,
        engine: Engine,
        chooser: PolicyRunner,
        envs: npt.NDArray[np.int32],
        horizon: int,
        guard: SpaceCheck | None,
    ) -> None:
        self._engine = engine
        self._chooser = chooser
        self._envs = envs
        self._n = len(envs)
        self._horizon = horizon
        self._guard = guard
        self._layout = Layout(engine.description.observation_space)
        self._obs_names = [leaf.name("obs") for leaf in self._layout.leaves]
        self._ledger = Ledger.begin(self._n)

    @property
    @abstractmethod
    def waiting_rows(self) -> int:
        """Rows of real steps that are in no fragment yet."""

    @abstractmethod
    def fragment(self, block: Block, fresh: bool) -> Fragment:
        """Step until a fragment is full, and return it.

        Parameters
        ----------
        block
            Holds the columns of an earlier fragment, to be used again, or nothing.
        fresh
            Let go of rows that wait, before and after, and count them.
        """
