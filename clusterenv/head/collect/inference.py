"""Evaluates the policy at the head, for the environments of all shards."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector.utils import batch_space
from torch import Tensor

from clusterenv import config
from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_choice
from clusterenv.data.fragment import Fragment
from clusterenv.data.pickling import dumps, loads
from clusterenv.data.spaces import Array, Column, Layout
from clusterenv.errors import ConfigError, PolicyError, shown
from clusterenv.head.collect.batcher import Batcher
from clusterenv.head.fleet.handle import ShardHandle
from clusterenv.policies.policy import Context, Decision, Policy
from clusterenv.simulation.decisions import (
    PolicyFault,
    annotate,
    as_array,
    check_decision,
    initial_state,
)
from clusterenv.simulation.head_policy import HeadPolicy
from clusterenv.sync.rules import SyncRule
from clusterenv.sync.weights import Weights, load, manifest_of
from clusterenv.transport.messages import ActionField, ActionsMeta, MessageKind, ObservationsMeta

__all__ = ["Inference", "InferenceOptions", "stand_in"]

Send = Callable[..., bool]


@dataclass(frozen=True)
class InferenceOptions:
    """How a policy is evaluated at the head; raises ``ConfigError`` if it cannot be."""

    device: torch.device
    rows: int
    """Of a batch, at most."""
    wait: float
    """Seconds that a request waits for others, at most."""
    groups: int
    """Of a shard's environments: one steps while the head evaluates the policy for another."""

    @classmethod
    def of(
        cls, inference: str, device: Any, sync: SyncRule | None, overlap: bool
    ) -> InferenceOptions | None:
        """Return the options of ``Collector(inference=…)``; ``None`` for inference by workers."""
        right = "inference='head' evaluates the policy at the head, inference='worker' on workers"
        check_choice("inference", inference, ("worker", "head"), right)
        if inference == "worker":
            if device is not None:
                raise ConfigError(
                    f"device={shown(device)} is where the head evaluates the policy; workers use "
                    f"their CPU: Collector(…, inference='head', device={shown(device)})"
                )
            return None
        if sync is not None:
            raise ConfigError(
                f"sync={shown(sync)} decides when workers pull weights; with inference='head' they "
                "have none, and the newest version acts in every step: leave sync out"
            )
        if overlap:
            raise ConfigError(
                "overlap=True promises rollouts exactly one version old; with inference='head' the "
                "newest version acts in every step. Use one of the two: "
                "Collector(…, inference='head') and iterate, or Collector(…, overlap=True)"
            )
        return cls(
            _device(device),
            config.count("inference.rows"),
            config.positive("inference.wait"),
            config.count("inference.groups"),
        )


def _device(given: Any) -> torch.device:
    try:
        device = torch.device("cpu" if given is None else given)
        torch.zeros(1, device=device)
    except Exception as error:
        raise ConfigError(
            f"device={shown(given)} is not there: {str(error).splitlines()[0]}. "
            "Collector(…, inference='head', device='cpu')"
        ) from error
    return device


class _Request(NamedTuple):
    handle: ShardHandle
    meta: ObservationsMeta
    arrays: Sequence[Array]


class Inference:
    """Answers shards that ask for actions; the receiver's thread alone calls it.

    The recurrent state of an environment travels with its observations, so a shard that is lost
    takes it along, and nothing of it is kept here.
    """

    def __init__(
        self,
        policy: Policy,
        version: int,
        space: gym.Space[Any],
        options: InferenceOptions,
    ) -> None:
        self._device, self.groups = options.device, options.groups
        self._batcher: Batcher[_Request] = Batcher(options.rows, options.wait)
        self._own: Policy = loads(dumps(policy)).eval()  # annotates fragments, on the CPU
        self._acts = self._own
        if self._device.type != "cpu":
            self._acts = loads(dumps(policy)).eval().to(self._device)
        self._manifest = manifest_of(policy)
        self._layout = Layout(space)
        self._leaves = [self._layout.leaves[k] for k in self._layout.arrays]
        self._state = {
            name: (tensor.numpy().dtype, tuple(tensor.shape[1:]))
            for name, tensor in initial_state(self._own, 1).items()
        }
        self._annotates = type(policy).annotate is not Policy.annotate
        self._fields: dict[ShardHandle, tuple[ActionField, ...]] = {}
        self._scalars: Mapping[str, float] = {}
        self.version = version
        """Of the policy that acts."""
        self._try(space)

    def _try(self, space: gym.Space[Any]) -> None:
        """Raise ``ConfigError`` if the policy does not answer for as many environments as it gets.

        What it raises here does not count: samples of a space may be no real observations.
        """
        n, decision = 3, None
        with (
            torch.random.fork_rng(devices=[]),  # leave the learner's random numbers alone
            torch.inference_mode(),
            contextlib.suppress(Exception),
        ):
            columns = self._layout.columns(batch_space(copy.deepcopy(space), n).sample(), n)
            arrays = [np.ascontiguousarray(columns[k]) for k in self._layout.arrays]
            obs = self._layout.nest_arrays([self._tensor([array]) for array in arrays])
            state = {k: tensor.to(self._device) for k, tensor in self._own.initial_state(n).items()}
            decision = self._acts.act(obs, Context(self._tensor([np.arange(n)]), {}, state))
        if isinstance(decision, Decision):
            with contextlib.suppress(PolicyFault):
                self._arrays(decision, n)

    def place(self, handle: ShardHandle, meta: ObservationsMeta) -> list[Array]:
        """Return memory for the body of ``OBSERVATIONS``."""
        share, n = handle.share, meta.num_envs
        fits = share.first <= meta.first and meta.first + n <= share.first + share.count
        if not (fits and n > 0 and meta.group < self.groups and meta.choices < 2**20):
            raise ValueError(f"{meta} does not fit environments of {share}")
        arrays = [np.empty((n, *leaf.shape), leaf.dtype) for leaf in self._leaves]
        if meta.choices:
            arrays.append(np.empty((n, meta.choices), np.bool_))
        arrays += [np.empty((n, *shape), dtype) for dtype, shape in self._state.values()]
        return arrays

    def add(self, handle: ShardHandle, meta: ObservationsMeta, arrays: Sequence[Array]) -> None:
        """Let a request wait for others."""
        self._batcher.add(_Request(handle, meta, arrays), meta.num_envs, time.monotonic())

    def forget(self, handle: ShardHandle) -> None:
        """Drop the requests of a shard that has left."""
        self._batcher.forget(lambda request: request.handle is handle)
        self._fields.pop(handle, None)

    def left(self, groups: int) -> float | None:
        """Return the seconds until requests are due; ``None`` if there are none."""
        return self._batcher.left(time.monotonic(), groups)

    def use(self, weights: Weights, scalars: Mapping[str, float]) -> None:
        """Act with these weights and scalars from now on."""
        self._scalars = scalars
        if weights.version != self.version:
            for module in {self._own, self._acts}:
                load(module, self._manifest, weights)
            self.version = weights.version

    @torch.inference_mode()
    def evaluate(self, send: Send) -> int:
        """Choose the actions of a batch of requests, and send each shard its own.

        Return the number of environments.
        """
        requests = self._batcher.take()
        for choices in {request.meta.choices for request in requests}:  # one number, normally
            self._answer([each for each in requests if each.meta.choices == choices], send)
        return sum(request.meta.num_envs for request in requests)

    def _answer(self, requests: Sequence[_Request], send: Send) -> None:
        rows = [request.meta.num_envs for request in requests]
        try:
            decision = self._decide(requests)
            fields, arrays = self._arrays(decision, sum(rows))
        except PolicyFault as fault:
            raise PolicyError(str(fault)) from fault
        start = 0
        for request, count in zip(requests, rows, strict=True):
            handle = request.handle
            known = self._fields.get(handle) == fields
            self._fields[handle] = fields
            told = None if known else tuple(tuple(field) for field in fields)
            blob = dumps(tuple(ActionsMeta(request.meta.group, self.version, told)))
            body = [array[start : start + count] for array in arrays]
            send(handle, MessageKind.ACTIONS, blob, body)
            start += count

    def _decide(self, requests: Sequence[_Request]) -> Decision:
        """Ask the policy for the actions of all environments of these requests."""
        masked = requests[0].meta.choices > 0
        columns = [self._tensor(parts) for parts in zip(*(r.arrays for r in requests), strict=True)]
        obs = columns[: len(self._leaves)]
        nested = self._layout.nest_arrays(obs)
        mask = columns[len(self._leaves)] if masked else None
        state = dict(zip(self._state, columns[len(self._leaves) + masked :], strict=True))
        envs = [np.arange(meta.first, meta.first + meta.num_envs) for _, meta, _ in requests]
        context = Context(self._tensor(envs), self._scalars, state, mask)
        where = f"{sum(map(len, envs))} environments, at the head"
        try:
            decision: Decision = self._acts.act(nested, context)
        except (Exception, SystemExit) as error:
            raise PolicyFault(
                f"the policy raised {type(error).__name__} on {where}: {error}"
            ) from error
        check_decision(decision, self._acts, where)
        return decision

    def _tensor(self, parts: Sequence[Column]) -> Tensor:
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return torch.from_numpy(whole).to(self._device)

    def _arrays(
        self, decision: Decision, rows: int
    ) -> tuple[tuple[ActionField, ...], list[Column]]:
        """Return a decision as arrays, and what they are."""
        parts = {"action": {"action": decision.action}, "extras": decision.extras}
        fields, arrays = [], []
        for part, tensors in {**parts, "state": decision.state}.items():
            for name, tensor in tensors.items():
                if not isinstance(tensor, Tensor) or tensor.shape[:1] != (rows,):
                    got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor)
                    raise ConfigError(
                        f"the policy's {name!r} is {got} for {rows} environments. At the head it "
                        "answers for the environments of several shards at once, so each tensor "
                        "needs a row for each; or evaluate it on the workers: "
                        "Collector(…, inference='worker')"
                    )
                array = np.ascontiguousarray(as_array(tensor.cpu(), name, "the head"))
                arrays.append(array)
                fields.append(ActionField(part, name, array.dtype.str, array.shape[1:]))
        return tuple(fields), arrays

    def annotate(self, batch: Batch) -> Batch:
        """Add the columns that the policy computes from a whole fragment."""
        if not self._annotates:
            return batch
        columns = {name: batch.flat(name) for name in batch.names}
        fragment = Fragment(dict(columns), batch.num_envs, batch.tail_rows, batch.tail, batch.state)
        with torch.inference_mode():
            try:
                annotate(fragment, self._own)
            except PolicyFault as fault:
                raise PolicyError(str(fault)) from fault
        return batch.with_columns(
            {name: column for name, column in fragment.columns.items() if name not in columns}
        )


def stand_in(policy: Policy) -> HeadPolicy:
    """Return what shards have in place of a policy that acts at the head."""
    try:
        # Of two, which shows whether the state has a row for each.
        return HeadPolicy({k: rows[:1].clone() for k, rows in initial_state(policy, 2).items()})
    except PolicyFault as fault:
        raise ConfigError(str(fault)) from fault
