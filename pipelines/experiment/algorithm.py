"""What a learner gives to the runner: base classes, by how a learner gets its rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import gymnasium as gym
import torch
from torch import Tensor, nn

from clusterenv.errors import ConfigError
from clusterenv.policies import Policy
from clusterenv.store import NStep, Prioritized, Recent, Rollout, Sampler, Uniform
from pipelines.experiment.args import ReplayArgs, RolloutArgs, RunArgs, StreamArgs

__all__ = [
    "Algorithm",
    "Losses",
    "ReplayAlgorithm",
    "RolloutAlgorithm",
    "StreamAlgorithm",
    "check_algorithm",
    "shuffled",
]

Losses = Mapping[str, float | Tensor]
"""What to log of a step of learning, by name; the means are logged."""
A = TypeVar("A", bound=RunArgs)
R = TypeVar("R", bound=ReplayArgs)
O = TypeVar("O", bound=RolloutArgs)  # noqa: E741
S = TypeVar("S", bound=StreamArgs)
D = TypeVar("D")


class Stateful(Protocol):
    """A module, an optimizer, or whatever else can be saved."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class Algorithm(ABC, Generic[A, D]):
    """A learner; :func:`pipelines.experiment.run` does everything around it.

    A subclass builds its networks in ``__init__(args, observation_space, action_space)`` and sets
    :attr:`policy` and :attr:`parts`.

    Parameters
    ----------
    args
        Of the class's :attr:`args_type`.
    observation_space, action_space
        Of one environment.
    """

    name: ClassVar[str]
    """Of the command: ``clusterenv train NAME``."""
    title: ClassVar[str]
    """For people."""
    args_type: ClassVar[type[RunArgs]]
    """The dataclass of its options."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """What suits an environment, by its id."""

    policy: Policy
    """What workers act with; published as it is after a step of learning."""
    parts: Mapping[str, Stateful]
    """All that a checkpoint has to keep: networks, optimizers, statistics."""

    def __init__(
        self, args: A, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        self.args = args
        self.observation_space = observation_space
        self.action_space = action_space

    @classmethod
    def preset(cls, env: str, **changes: Any) -> Any:
        """Return the options tuned for an environment, with ``changes``."""
        return cls.args_type(**{"env": env, **cls.presets.get(env, {}), **changes})

    def scalars(self, steps: int) -> dict[str, float]:
        """Return numbers that are published with the policy after so many steps, and logged."""
        return {}

    def judged(self) -> Iterable[int]:
        """Return the environments whose returns tell when the goal is reached."""
        return range(self.args.num_envs)

    def anneal(self, optimizer: torch.optim.Optimizer, progress: float) -> float:
        """Set the learning rate to what it is after this share of the run, and return it."""
        left = max(0.0, 1 - progress) if self.args.anneal else 1.0
        optimizer.param_groups[0]["lr"] = lr = self.args.lr * left
        return lr

    def state_dict(self) -> dict[str, Any]:
        """Return what another one goes on from."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    def load_weights(self, state: Mapping[str, Any]) -> None:
        """Take the weights in the state of another run: of networks, not of optimizers.

        Of the :attr:`parts`, these are the modules that both have, with their buffers. Buffers
        that a module names in ``of_envs`` belong to the environments of a run, and stay.
        """
        taken = {
            name: part
            for name, part in self.parts.items()
            if isinstance(part, nn.Module) and name in state
        }
        if not taken:
            raise KeyError(f"no part is one of {', '.join(self.parts)}")
        for name, part in taken.items():
            own = part.state_dict()
            stay = {key: own[key] for key in getattr(part, "of_envs", ())}
            part.load_state_dict({**state[name], **stay})

    @abstractmethod
    def learn(self, rows: D, progress: float) -> Any:
        """Make one step of learning, after this share of the run."""


class RolloutAlgorithm(Algorithm[O, Rollout]):
    """A learner that takes every row once, in rollouts of all environments."""

    @abstractmethod
    def learn(self, rows: Rollout, progress: float) -> Losses:
        """Learn from a rollout.

        Parameters
        ----------
        rows
            Columns of shape ``[time, env]``.
        progress
            Share of the run that is over, from 0 to 1.

        Returns
        -------
        Losses
            What to log.
        """


class StreamAlgorithm(Algorithm[S, Rollout]):
    """A learner that takes fragments as they arrive, while the shards go on with older versions."""

    draws: int = 1
    """Samples of recent fragments before the next one is taken, unless they are used up."""

    def recent(self) -> Recent | None:
        """Return a buffer of recent fragments to learn from more than once; ``None`` for none."""
        return None

    @abstractmethod
    def learn(self, rows: Rollout, progress: float) -> Losses:
        """Learn from a fragment of one shard, as from a rollout."""


class ReplayAlgorithm(Algorithm[R, Mapping[str, Tensor]]):
    """A learner that samples from a replay store."""

    stack: int | None = None
    """Frames that are stacked in an observation, which the store then keeps once."""

    def sampler(self) -> Sampler:
        """Return what chooses the rows: n-step returns, uniform or prioritised.

        A learner of sequences returns :class:`clusterenv.store.Sequences`; ``--batch`` is then
        the number of sequences of an update.
        """
        args = self.args
        base = Prioritized(args.alpha, args.beta) if args.prioritized else Uniform()
        return NStep(args.n_step, args.gamma, base)

    @abstractmethod
    def learn(self, rows: Mapping[str, Tensor], progress: float) -> tuple[Losses, Tensor | None]:
        """Learn from a sample.

        Parameters
        ----------
        rows
            As :meth:`clusterenv.store.ReplayStore.sample` returns them, as tensors.
        progress
            Share of the run that is over, from 0 to 1.

        Returns
        -------
        losses
            What to log.
        errors
            Absolute error of each row, for prioritised sampling; of sequences, the priority of
            each.
        """


def shuffled(columns: Sequence[Tensor], minibatches: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield the rows of some columns in random order, in minibatches, if there are so many rows.

    Each is copied when it is taken: a copy of all images would be large, and new memory each time.

    Examples
    --------
    >>> numbers = torch.arange(5)
    >>> [(len(a), (b - a).tolist()) for a, b in shuffled([numbers, numbers + 1], 2)]
    [(3, [1, 1, 1]), (2, [1, 1])]
    """
    order = torch.randperm(len(columns[0]))
    for part in order.tensor_split(min(minibatches, len(order))):
        yield tuple(column[part] for column in columns)


def check_algorithm(kind: Any) -> type[Algorithm[Any, Any]]:
    """Return a class of learners, if the runner can run it.

    Raises
    ------
    ConfigError
        With what it lacks.
    """
    bases: dict[Any, type[RunArgs]] = {
        RolloutAlgorithm: RolloutArgs,
        StreamAlgorithm: StreamArgs,
        ReplayAlgorithm: ReplayArgs,
    }
    if not (
        isinstance(kind, type) and issubclass(kind, Algorithm) and set(bases) & {*kind.__mro__}
    ):
        raise ConfigError(
            f"{kind!r} is no learner; derive a class from RolloutAlgorithm, StreamAlgorithm or "
            "ReplayAlgorithm of pipelines.experiment: class A2C(RolloutAlgorithm): …"
        )
    wanted = next(args for base, args in bases.items() if base in kind.__mro__)
    lacking = sorted(kind.__abstractmethods__)
    lacking += [name for name in ("name", "title", "args_type") if not hasattr(kind, name)]
    if lacking:
        raise ConfigError(
            f"{kind.__name__} lacks {', '.join(lacking)}; docs/own-learner.md shows a whole one"
        )
    if not (isinstance(kind.args_type, type) and issubclass(kind.args_type, wanted)):
        raise ConfigError(
            f"{kind.__name__}.args_type must derive from {wanted.__name__}: "
            f"class Args({wanted.__name__}): …"
        )
    return kind
