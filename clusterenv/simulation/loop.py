"""The env loop: a policy and an engine fill fragments, with no cluster in sight.

A fragment holds ``horizon`` consecutive rows of each of ``num_envs`` tracks, time-major. Every
row is a real step: where an engine spends a step on resetting, that step is left out, and the
true final observation of every episode is kept beside the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from clusterenv.data.fragment import Fragment
from clusterenv.data.spaces import Layout
from clusterenv.errors import ConfigError
from clusterenv.policies.base import Policy
from clusterenv.simulation.blocks import Block
from clusterenv.simulation.decisions import annotate
from clusterenv.simulation.engines import Engine, Slot
from clusterenv.simulation.engines.gymnasium import GymnasiumEngine
from clusterenv.simulation.env_faults import EnvFaults
from clusterenv.simulation.filler import Filler
from clusterenv.simulation.in_place import InPlace
from clusterenv.simulation.policy_runner import Acting, PolicyRunner
from clusterenv.simulation.random_stream import RandomStream
from clusterenv.simulation.rebuilding import Rebuilder
from clusterenv.simulation.recorded import Recorded
from clusterenv.simulation.space_check import SpaceCheck

__all__ = ["TEXT", "EnvLoop", "check_spaces"]

TEXT = ("refuse", "drop", "keep")
"""What may become of text in observations."""
_SPARE = 4  # blocks that are kept for the next fragments


def check_spaces(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any], text: str = "refuse"
) -> None:
    """Raise unless a policy can act in these spaces.

    Parameters
    ----------
    text
        One of :data:`TEXT`. A policy gets tensors, so it never gets text.
    """
    names = set()
    layout = Layout(observation_space)
    for leaf in layout.leaves:
        if leaf.name("obs") in names:
            raise ConfigError(
                f"two parts of the observation would both be the column {leaf.name('obs')}; "
                "rename a key of the Dict space with a wrapper"
            )
        names.add(leaf.name("obs"))
        if leaf.is_text and text == "refuse":
            raise ConfigError(
                f"{leaf.name('obs')} is text, which has no tensor form: Collector(…, text='keep') "
                "collects it as a column of strings, Collector(…, text='drop') leaves it out; the "
                "policy acts on the rest of the observation"
            )
        if not leaf.is_array and not leaf.is_text:
            raise ConfigError(
                f"{leaf.name('obs')} has no tensor form; leave it out with a wrapper: "
                "wrappers=(lambda env: FilterObservation(env, ['image']),)"
            )
        if 0 in leaf.shape:
            raise ConfigError(
                f"{leaf.name('obs')} has no numbers, its shape is {leaf.shape}; leave it out with "
                "a wrapper: wrappers=(lambda env: FilterObservation(env, ['image']),)"
            )
    if not layout.arrays:
        raise ConfigError(
            f"a policy acts on tensors, and nothing in {observation_space} has a tensor form; "
            "encode it with a wrapper such as gymnasium.wrappers.TransformObservation"
        )
    if isinstance(action_space, (spaces.Dict, spaces.Tuple)) or not Layout(action_space).arrays:
        raise ConfigError(
            f"a policy acts in one array, but the action space is {action_space}; flatten it with "
            "a wrapper such as gymnasium.wrappers.TransformAction"
        )


class EnvLoop:
    """Fills fragments.

    Parameters
    ----------
    engine
        The environments. If it resets in the same step, observations are written straight
        into the fragment; otherwise steps are recorded first and the dead ones left out.
    policy
        Acts on all environments at once.
    first
        Global index of the first environment.
    horizon
        Time rows of a fragment.
    seeds
        One per environment.
    faults
        What becomes of environments that fail. Engines that cannot rebuild a single one
        raise; so does every engine if nothing is given.
    drawing
        The random numbers of the policy; without it, those of the process.
    text
        What becomes of text in observations, one of :data:`TEXT`: ``"keep"`` makes it a column
        of strings, ``"drop"`` leaves it out.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        first: int,
        horizon: int,
        seeds: Sequence[int | None],
        faults: EnvFaults | None = None,
        drawing: RandomStream | None = None,
        text: str = "refuse",
    ) -> None:
        about = engine.description
        check_spaces(about.observation_space, about.action_space, text)
        layout = Layout(about.observation_space)
        texts = [leaf.name("obs") for leaf in layout.leaves if leaf.is_text]
        self._dropped = texts if text == "drop" else []
        self._policy = policy
        self._annotates = type(policy).annotate is not Policy.annotate
        self._free: list[Block] = []
        envs = np.arange(first, first + engine.num_envs, dtype=np.int32)
        self._drawing = drawing or contextlib.nullcontext()
        self._chooser = PolicyRunner(policy, about, envs, self._drawing)
        if self._chooser.checks_all:
            engine.trust_actions()
        guard = None
        if faults is not None:
            guard = SpaceCheck(about.observation_space, faults.bounds, text=text == "keep")
        slot = Slot.empty(layout, engine.num_envs)
        self._chooser.mask.note(engine.reset(slot, list(seeds), None, None))
        self._chooser.mask.settled = True
        self._filler: Filler
        if about.autoreset_mode is AutoresetMode.DISABLED:
            raise ConfigError(
                "these environments do not reset by themselves (autoreset_mode is DISABLED), and a "
                "Collector does not either; make them with AutoresetMode.SAME_STEP or NEXT_STEP"
            )
        if about.autoreset_mode is AutoresetMode.SAME_STEP:
            mender = None
            if isinstance(engine, GymnasiumEngine) and faults is not None:
                mender = Rebuilder(engine, faults, first, seeds)
            in_place = InPlace(engine, self._chooser, envs, horizon, guard, mender, slot.obs)
            if isinstance(engine, GymnasiumEngine):
                engine.check_final = in_place.check_final
            self._filler = in_place
        else:
            self._filler = Recorded(engine, self._chooser, envs, horizon, guard, slot.obs)

    @property
    def steps(self) -> int:
        """Steps of all environments so far; tells whoever asks that they move."""
        return self._chooser.steps

    @property
    def waiting_rows(self) -> int:
        """Rows that were recorded and are in no fragment."""
        return self._filler.waiting_rows

    def interrupt(self) -> None:
        """Give up the fragment in hand, which raises ``Interrupted``; from any thread."""
        self._chooser.interrupted = True

    def fragment(
        self, acting: Acting, fresh: bool = False, between: Callable[[], Acting] | None = None
    ) -> Fragment:
        """Step until a fragment is full, and return it.

        Parameters
        ----------
        acting
            With what the policy acts; every row remembers the version.
        fresh
            Leave out rows that were recorded before this call (they are counted), so that
            the whole fragment is of this version.
        between
            Called before every step; with what it returns the policy acts from there on.
        """
        self._chooser.begin(acting, between)
        block = self._free.pop() if self._free else {}
        with torch.inference_mode():
            fragment = self._filler.fragment(block, fresh)
            for name in self._dropped:
                del fragment.columns[name], fragment.tail[name]
            if self._annotates:
                with self._drawing:
                    annotate(fragment, self._policy)
        return fragment

    def recycle(self, fragment: Fragment) -> None:
        """Take back the buffers of a fragment that nobody reads any more."""
        if fragment.block is not None and len(self._free) < _SPARE:
            self._free.append(fragment.block)
