"""Inserts and samples per second of the replay store, against other replay buffers.

Small rows are 8 floats of observation, an action, a reward and two flags; frames are stacks of
four 84 x 84 uint8 images. Every contender holds the same rows and returns observations, actions,
rewards, next observations and ends of a sample; all run in turn, in one process, on this machine,
and the best of many short rounds counts. Peers that are not installed are left out: ``make
bench-replay`` installs them in an environment of their own.

    python benchmarks/replay.py                      # everything
    python benchmarks/replay.py small-500k frames    # some
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from clusterenv import Batch
from clusterenv.store import Prioritized, ReplayStore, Uniform

ENVS, HORIZON = 64, 64
BLOCK = ENVS * HORIZON
SIZES = {"small-500k": 500_000, "small-5M": 5_000_000, "frames": 100_000}
SAMPLES = (256, 4096)
ROUND = 0.001  # seconds


def small_block(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "obs": rng.random((BLOCK, 8), np.float32),
        "next_obs": rng.random((BLOCK, 8), np.float32),
        "action": rng.integers(0, 4, BLOCK),
        "reward": rng.random(BLOCK, np.float32),
        "terminated": np.zeros(BLOCK, np.bool_),
        "truncated": np.zeros(BLOCK, np.bool_),
    }


def frame_block(seed: int) -> dict[str, Any]:
    """Stacks that go on from row to row, as frame stacking gives them."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(0, 255, (HORIZON + 4, 1, 84, 84), np.uint8)
    stacks = np.stack([frames[t : t + 4, 0] for t in range(HORIZON + 1)])
    rows = np.repeat(stacks[:, None], ENVS, 1)
    return small_block(seed) | {
        "obs": rows[:-1].reshape(BLOCK, 4, 84, 84),
        "next_obs": rows[1:].reshape(BLOCK, 4, 84, 84),
    }


class Numpy:
    """Plain columns and plain indexing: what is hard to beat."""

    def __init__(self, capacity: int, block: dict[str, Any], prioritized: bool) -> None:
        if prioritized:
            raise NotImplementedError
        self.columns = {k: np.empty((capacity, *v.shape[1:]), v.dtype) for k, v in block.items()}
        self.rng = np.random.default_rng(0)
        self.capacity, self.at, self.filled = capacity, 0, 0

    def insert(self, block: dict[str, Any]) -> None:
        if self.at + BLOCK > self.capacity:
            self.at = 0
        for name, column in self.columns.items():
            column[self.at : self.at + BLOCK] = block[name]
        self.at += BLOCK
        self.filled = max(self.filled, self.at)

    def sample(self, n: int) -> object:
        rows = self.rng.integers(0, self.filled, n)
        return {name: column[rows] for name, column in self.columns.items()}


class ClusterEnv:
    """``ReplayStore``; it is given fragments as a collector gives them."""

    def __init__(
        self, capacity: int, block: dict[str, Any], prioritized: bool, directory: str | None = None
    ) -> None:
        sampler = Prioritized(0.6, 0.4) if prioritized else Uniform()
        stack = 4 if block["obs"].ndim == 4 else None
        self.store = ReplayStore(
            capacity, sampler=sampler, seed=0, stack=stack, directory=directory
        )
        self.time = 0
        self.batches = [self.batch(block) for _ in range(8)]

    def insert(self, block: dict[str, Any]) -> None:
        self.batches.append(self.batches.pop(0))
        self.store.add(self.batches[0])

    def batch(self, block: dict[str, Any]) -> Batch:
        """Return a block as the next fragment of all environments."""
        step = np.repeat(np.arange(self.time, self.time + HORIZON, dtype=np.int32), ENVS)
        self.time += HORIZON
        names = ("obs", "action", "reward", "terminated", "truncated")
        columns = {name: block[name] for name in names}
        columns["env"] = np.tile(np.arange(ENVS, dtype=np.int32), HORIZON)
        columns["episode"] = np.zeros(BLOCK, np.int32)
        columns["step"] = step
        columns["version"] = np.zeros(BLOCK, np.int32)
        last = np.arange(BLOCK - ENVS, BLOCK)
        origin = {"run": 0, "shard": 0, "incarnation": 0, "policy_version": 0}
        tail = {"obs": block["next_obs"][last]}
        return Batch(columns, ENVS, tail_rows=last, tail=tail, state={}, **origin)

    def sample(self, n: int) -> object:
        return self.store.sample(n)

    def update(self, sample: Any, errors: Any) -> None:
        self.store.update_priorities(sample["indices"], errors)

    def close(self) -> None:
        self.store.close()


class ClusterEnvFiles(ClusterEnv):
    """The same with ``directory=``."""

    def __init__(self, capacity: int, block: dict[str, Any], prioritized: bool) -> None:
        if prioritized:
            raise NotImplementedError
        self.directory = tempfile.TemporaryDirectory()
        super().__init__(capacity, block, prioritized, self.directory.name)

    def close(self) -> None:
        super().close()
        self.directory.cleanup()


class Cpprb:
    """cpprb's ``ReplayBuffer`` and ``PrioritizedReplayBuffer``."""

    def __init__(self, capacity: int, block: dict[str, Any], prioritized: bool) -> None:
        import cpprb

        names = {"obs": "obs", "next_obs": "next_obs", "act": "action", "rew": "reward"}
        self.names = names | {"terminated": "terminated", "truncated": "truncated"}
        spec = {
            name: {"shape": block[column].shape[1:] or 1, "dtype": block[column].dtype}
            for name, column in self.names.items()
        }
        kind = cpprb.PrioritizedReplayBuffer if prioritized else cpprb.ReplayBuffer
        self.buffer = kind(capacity, spec, **({"alpha": 0.6} if prioritized else {}))
        self.options = {"beta": 0.4} if prioritized else {}

    def insert(self, block: dict[str, Any]) -> None:
        self.buffer.add(**{name: block[column] for name, column in self.names.items()})

    def sample(self, n: int) -> object:
        return self.buffer.sample(n, **self.options)

    def update(self, sample: Any, errors: Any) -> None:
        self.buffer.update_priorities(sample["indexes"], errors)


class TorchRL:
    """TorchRL's tensor storage with its random and prioritised samplers."""

    def __init__(self, capacity: int, block: dict[str, Any], prioritized: bool) -> None:
        import torch
        from tensordict import TensorDict
        from torchrl.data import (
            LazyTensorStorage,
            TensorDictPrioritizedReplayBuffer,
            TensorDictReplayBuffer,
        )

        self.torch, self.dict = torch, TensorDict
        storage = LazyTensorStorage(capacity)
        self.buffer = (
            TensorDictPrioritizedReplayBuffer(alpha=0.6, beta=0.4, storage=storage)
            if prioritized
            else TensorDictReplayBuffer(storage=storage)
        )

    def insert(self, block: dict[str, Any]) -> None:
        tensors = {name: self.torch.from_numpy(column) for name, column in block.items()}
        self.buffer.extend(self.dict(tensors, [BLOCK]))

    def sample(self, n: int) -> object:
        return self.buffer.sample(n)

    def update(self, sample: Any, errors: Any) -> None:
        sample["td_error"] = self.torch.from_numpy(errors)
        self.buffer.update_tensordict_priority(sample)


class SB3:
    """Stable-Baselines3's ``ReplayBuffer``; it takes one step of all environments at a time."""

    def __init__(self, capacity: int, block: dict[str, Any], prioritized: bool) -> None:
        if prioritized:
            raise NotImplementedError
        from stable_baselines3.common.buffers import ReplayBuffer

        obs = block["obs"]
        space = gym.spaces.Box(0, 255, obs.shape[1:], obs.dtype.type)
        self.buffer = ReplayBuffer(capacity, space, gym.spaces.Discrete(4), "cpu", n_envs=ENVS)

    def insert(self, block: dict[str, Any]) -> None:
        shaped = {k: v.reshape(HORIZON, ENVS, *v.shape[1:]) for k, v in block.items()}
        names = ("obs", "next_obs", "action", "reward", "terminated")
        for row in zip(*(shaped[name] for name in names), strict=True):
            self.buffer.add(*row, [{}] * ENVS)

    def sample(self, n: int) -> object:
        return self.buffer.sample(n)


CONTENDERS: dict[str, tuple[type, str | None]] = {
    "ClusterEnv": (ClusterEnv, None),
    "ClusterEnv, directory=": (ClusterEnvFiles, None),
    "NumPy columns": (Numpy, None),
    "cpprb": (Cpprb, "cpprb"),
    "TorchRL": (TorchRL, "torchrl"),
    "Stable-Baselines3": (SB3, "stable_baselines3"),
}


def microseconds(call: Callable[[], object], seconds: float) -> float:
    """Return the time of a call: the best of many short rounds' means.

    Rounds are shorter than the time that a system gives a process before it lets another run, so
    some are undisturbed on a busy machine too.
    """
    call()
    began = time.perf_counter()
    call()
    count = max(1, int(ROUND / (time.perf_counter() - began)))
    best, rounds = float("inf"), 0
    end = time.perf_counter() + seconds
    while rounds < 5 or time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, (time.perf_counter() - began) / count)
        rounds += 1
    return 1e6 * best


def measured(
    work: str, prioritized: bool, seconds: float
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each contender's figures: microseconds of a block insert, and of samples."""
    capacity = SIZES[work]
    block = frame_block(0) if work == "frames" else small_block(0)
    for name, (kind, package) in CONTENDERS.items():
        if package is not None and importlib.util.find_spec(package) is None:
            continue
        try:
            contender = kind(capacity, block, prioritized)
        except (NotImplementedError, RuntimeError) as error:
            if str(error):
                print(f"{name} is left out: {str(error).splitlines()[0]}")
            continue
        for _ in range(-(-capacity // BLOCK)):
            contender.insert(block)
        found = {"insert": microseconds(lambda c=contender: c.insert(block), seconds)}
        for n in SAMPLES:
            found[f"sample {n}"] = microseconds(lambda c=contender, n=n: c.sample(n), seconds)
        if prioritized:
            given = contender.sample(256), np.random.default_rng(0).random(256)
            found["update 256"] = microseconds(lambda c=contender, g=given: c.update(*g), seconds)
        yield name, found
        if hasattr(contender, "close"):
            contender.close()
        del contender
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", nargs="*", choices=[[], *SIZES], default=[])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    options = parser.parse_args()
    for work in options.work or SIZES:
        for prioritized in (False, True):
            if prioritized and work == "frames":
                continue
            print(f"\n{work}, {'prioritised' if prioritized else 'uniform'}\n", flush=True)
            ours: dict[str, float] = {}
            header: list[str] = []
            for name, found in measured(work, prioritized, options.seconds):
                ours = ours or found
                if not header:
                    header = [f"{key}, µs | ours is faster by" for key in found]
                    print(f"| | {' | '.join(header)} |\n|---|{'--:|--:|' * len(found)}")
                cells = [f"{us:,.1f} | {us / ours[key]:.2f} x" for key, us in found.items()]
                print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
