"""The Dask actor that evaluates policy versions, in a thread of its own on a worker.

Weights arrive with each call, returns and lengths go back; rows never leave the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch.distributions import Categorical

from clusterenv.data.fragment import Fragment
from clusterenv.data.pickling import loads
from clusterenv.data.processes import this_process
from clusterenv.data.seeds import env_seeds
from clusterenv.data.spaces import Layout
from clusterenv.errors import ConfigError
from clusterenv.policies.policy import Context, Policy
from clusterenv.simulation.decisions import PolicyFault
from clusterenv.simulation.engines import build
from clusterenv.simulation.engines.base import Engine, EnvDescription
from clusterenv.simulation.env_faults import EnvFaults
from clusterenv.simulation.loop import EnvLoop
from clusterenv.simulation.policy_rng import PolicyRNG
from clusterenv.simulation.policy_runner import Acting
from clusterenv.simulation.quotas import play
from clusterenv.sync.weights import Weights, load, manifest_of
from clusterenv.transport.messages import Failure
from clusterenv.worker.failures import failure_of
from clusterenv.worker.tuning import Tune, may_tune, tune_process

__all__ = ["EvaluationActor", "EvaluationSpec", "Played"]

logger = logging.getLogger("clusterenv")

_TIME_ROWS = 16  # of a fragment: how often it is checked whether all episodes have ended

Played = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]
"""Returns and lengths of the episodes."""


@dataclass(frozen=True)
class EvaluationSpec:
    """What an evaluation plays."""

    policy: Policy
    quotas: tuple[int, ...]
    """Episodes of each environment."""
    seed: int
    deterministic: bool
    tune: Tune = "auto"
    head: tuple[int, int] = field(default_factory=this_process)
    """The head's process, which may be the worker's too."""


class EvaluationActor:
    """Hands calls to the thread that evaluates; nothing slow runs on the event loop."""

    def __init__(self) -> None:
        self._player = _Player()
        # Dask drops the actor of a head that was killed, and the thread must end with it.
        weakref.finalize(self, self._player.stop)

    async def open(self, recipe: bytes, spec: bytes) -> EnvDescription | Failure:
        """Make the environments, and try the policy of a pickled ``EvaluationSpec`` on them."""
        opened: EnvDescription | Failure
        opened = await self._call(lambda player: player.open(recipe, spec))
        return opened

    async def evaluate(
        self, version: int, buffer: npt.NDArray[np.uint8], scalars: dict[str, float]
    ) -> Played | Failure:
        """Play the episodes with these weights."""
        played: Played | Failure
        played = await self._call(lambda player: player.evaluate(version, buffer, scalars))
        return played

    async def steps(self) -> int:
        """Return the steps of the running evaluation, which grow unless an environment hangs."""
        return self._player.steps

    async def close(self, timeout: float) -> bool:
        """Stop the thread; return whether it ended in time."""
        self._player.stop()
        try:
            ended = asyncio.wrap_future(self._player.ended)
            await asyncio.wait_for(asyncio.shield(ended), timeout)
        except TimeoutError:
            return False
        return True

    async def _call(self, function: Callable[[_Player], Any]) -> Any:
        result: Future[Any] = Future()
        self._player.calls.put((function, result))
        return await asyncio.wrap_future(result)


class _Player:
    """The thread, the environments and the policy; knows nothing of the actor."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[Callable[[_Player], Any], Future[Any]] | None]
        self.calls = queue.SimpleQueue()
        self.ended: Future[None] = Future()
        self._engine: Engine | None = None
        self._loop: EnvLoop | None = None
        self._stopping = False
        threading.Thread(target=self._run, name="clusterenv-evaluation", daemon=True).start()

    @property
    def steps(self) -> int:
        """Steps of the running evaluation."""
        loop = self._loop
        return 0 if loop is None else loop.steps

    def stop(self) -> None:
        """Abandon what is running, and end the thread; from any thread."""
        self._stopping = True
        if self._loop is not None:
            self._loop.interrupt()
        self.calls.put(None)

    def _run(self) -> None:
        try:
            while (call := self.calls.get()) is not None and not self._stopping:
                function, result = call
                try:
                    answer = function(self)
                except BaseException as error:  # sys.exit() of an environment too
                    answer = failure_of(error, 0, "evaluate")
                with contextlib.suppress(asyncio.CancelledError):
                    result.set_result(answer)
        finally:
            try:
                if self._engine is not None:
                    self._engine.close()
            except Exception:
                logger.exception("an environment raised in close() after its evaluation")
            finally:
                self.ended.set_result(None)

    def open(self, recipe: bytes, pickled: bytes) -> EnvDescription:
        """Make environments and policy, and check that they fit."""
        self._spec: EvaluationSpec = loads(pickled)
        spec = self._spec
        if may_tune(spec.tune, spec.head):
            tune_process()
        elif spec.head != this_process():
            torch.set_num_threads(1)  # one core, whatever else the process does
        self._policy = spec.policy.eval()
        self._manifest = manifest_of(self._policy)
        self._engine = build(loads(recipe), 0, len(spec.quotas))
        about = self._engine.description
        try:
            fragment = self._make_loop(1).fragment(Acting(0, {}))
            _check_choices(self._policy, about, fragment)
        except PolicyFault as fault:
            name, shape = next(
                ((entry.name, entry.shape) for entry in self._manifest.entries), ("none", ())
            )
            raise ConfigError(
                f"the policy, a {type(self._policy).__name__} whose first tensor is {name!r} of "
                f"shape {shape}, does not fit the environment, whose observations are "
                f"{about.observation_space} and whose actions are {about.action_space}: {fault}. "
                "Evaluate a policy in the environment that it was made for: "
                "Evaluator(env, policy, episodes=20, num_envs=10)"
            ) from fault
        return about

    def evaluate(
        self, version: int, buffer: npt.NDArray[np.uint8], scalars: Mapping[str, float]
    ) -> Played:
        """Load weights and play the episodes, with the same seeds each time."""
        load(self._policy, self._manifest, Weights(version, np.array(buffer)))
        self._loop = self._make_loop(_TIME_ROWS)
        if self._stopping:
            self._loop.interrupt()
        try:
            return play(self._loop, self._spec.quotas, Acting(version, scalars))
        finally:
            self._loop = None

    def _make_loop(self, time_rows: int) -> EnvLoop:
        """Reset all environments and the policy's random numbers."""
        spec, engine = self._spec, self._engine
        assert engine is not None
        # In the head's process, the random numbers are the learner's.
        rng = None if spec.head == this_process() else PolicyRNG(spec.seed)
        return EnvLoop(
            engine,
            self._policy,
            0,
            time_rows,
            env_seeds(spec.seed, 0, 0, engine.num_envs),
            EnvFaults(0),
            rng,
            "drop",
            deterministic=spec.deterministic,
            annotate=False,
        )


def _check_choices(policy: Policy, about: EnvDescription, fragment: Fragment) -> None:
    """Raise ``PolicyFault`` if a policy chooses among more or fewer actions than there are."""
    if not isinstance(about.action_space, spaces.Discrete):
        return  # the shape of its actions was checked
    layout = Layout(about.observation_space)
    leaves = (layout.leaves[k] for k in layout.arrays)
    obs = [torch.from_numpy(fragment.columns[leaf.name("obs")]) for leaf in leaves]
    n = fragment.num_envs
    try:
        with torch.inference_mode():
            context = Context(torch.arange(n), {}, policy.initial_state(n))
            choices = policy.distribution(layout.nest_arrays(obs), context)
    except Exception:
        return  # a policy needs no distribution to be evaluated
    if isinstance(choices, Categorical) and choices.logits.shape[-1] != about.action_space.n:
        raise PolicyFault(
            f"the policy chooses among {choices.logits.shape[-1]} actions, and there are "
            f"{about.action_space.n}"
        )
