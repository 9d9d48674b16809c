"""The env loop: a policy and an engine fill fragments, without a cluster.

A fragment holds ``horizon`` consecutive rows of each of ``num_envs`` tracks, time-major. Every
row is a real step: a step that only resets an environment is left out, and the true final
observation of every episode is kept beside the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from clusterenv.data.fragment import Fragment
from clusterenv.data.spaces import Layout
from clusterenv.errors import ConfigError
from clusterenv.policies.policy import Policy
from clusterenv.simulation import decisions
from clusterenv.simulation.engines.base import Engine, Slot
from clusterenv.simulation.engines.gymnasium import GymnasiumEngine
from clusterenv.simulation.env_faults import EnvFaults, Rebuilder
from clusterenv.simulation.fragment_builder import Block, BuilderInputs, FragmentBuilder
from clusterenv.simulation.head_policy import runner_of
from clusterenv.simulation.masks import InfoMask
from clusterenv.simulation.next_step import NextStepBuilder
from clusterenv.simulation.policy_rng import PolicyRNG
from clusterenv.simulation.policy_runner import Acting
from clusterenv.simulation.policy_spaces import check_spaces
from clusterenv.simulation.same_step import SameStepBuilder
from clusterenv.simulation.space_check import SpaceCheck

__all__ = ["EnvLoop"]

_SPARE_BLOCKS = 4


class EnvLoop:
    """Fills fragments of ``horizon`` time rows.

    ``first`` is the global index of the first environment. Without ``faults``, and with engines
    that cannot rebuild a single environment, a fault of an environment is raised. The policy draws
    from ``rng``, or without it from the random numbers of the process. Text in observations
    becomes a column of strings (``"keep"``), is left out (``"drop"``) or raises (``"refuse"``).
    A ``deterministic`` policy does not explore. Without ``annotate`` its annotations are left out.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        first: int,
        horizon: int,
        seeds: Sequence[int | None],
        faults: EnvFaults | None = None,
        rng: PolicyRNG | None = None,
        text: str = "refuse",
        *,
        deterministic: bool = False,
        annotate: bool = True,
    ) -> None:
        about = engine.description
        check_spaces(about.observation_space, about.action_space, text)
        if about.autoreset_mode is AutoresetMode.DISABLED:
            raise ConfigError(
                "these environments do not reset by themselves (autoreset_mode is DISABLED), and a "
                "Collector does not either; make them with AutoresetMode.SAME_STEP or NEXT_STEP"
            )
        layout = Layout(about.observation_space)
        texts = [leaf.name("obs") for leaf in layout.leaves if leaf.is_text]
        self._dropped = texts if text == "drop" else []
        self._annotates = annotate and type(policy).annotate is not Policy.annotate
        self._spare: list[Block] = []
        envs = np.arange(first, first + engine.num_envs, dtype=np.int32)
        self._runner = runner_of(policy, about, envs, rng=rng, deterministic=deterministic)
        if self._runner.checks_actions:
            engine.skip_action_checks()
        check = None
        if faults is not None:
            check = SpaceCheck(about.observation_space, faults.bounds, text=text == "keep")
        slot, mask = Slot.empty(layout, engine.num_envs), InfoMask(engine.num_envs)
        mask.update(engine.reset(slot, list(seeds), None, None))
        mask.settled = True
        self._builder: FragmentBuilder
        inputs = BuilderInputs(engine, self._runner, horizon, slot.obs, mask, check)
        if about.autoreset_mode is AutoresetMode.NEXT_STEP:
            self._builder = NextStepBuilder(inputs)
            return
        rebuilder = None
        if isinstance(engine, GymnasiumEngine) and faults is not None:
            rebuilder = Rebuilder(engine, faults, first, seeds)
        self._builder = same_step = SameStepBuilder(inputs, rebuilder)
        if isinstance(engine, GymnasiumEngine):
            engine.check_final = same_step.check_final

    @property
    def steps(self) -> int:
        """Steps of each environment so far."""
        return self._runner.steps

    @property
    def waiting_rows(self) -> int:
        """Rows that were recorded and are in no fragment."""
        return self._builder.waiting_rows

    def interrupt(self) -> None:
        """Abandon the current fragment, which raises ``Interrupted``; from any thread."""
        self._builder.interrupted = True

    def fragment(
        self, acting: Acting, fresh: bool = False, between: Callable[[], Acting] | None = None
    ) -> Fragment:
        """Step until a fragment is full, and return it.

        With ``fresh``, rows that were recorded before this call are dropped and counted, so that
        the whole fragment is of this version. ``between`` is called before every step and returns
        what the policy acts with from there on.
        """
        self._runner.acting, self._builder.between = acting, between
        block = self._spare.pop() if self._spare else {}
        with torch.inference_mode():
            fragment = self._builder.fragment(block, fresh)
            for name in self._dropped:
                del fragment.columns[name], fragment.tail[name]
            if self._annotates:
                with self._runner.rng:
                    decisions.annotate(fragment, self._runner.policy)
        return fragment

    def recycle(self, fragment: Fragment) -> None:
        """Take back the buffers of a fragment that is not read any more."""
        if fragment.block is not None and len(self._spare) < _SPARE_BLOCKS:
            self._spare.append(fragment.block)
