"""What the peers' programs share: the setting, the policy, the clock and the report."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

ENV = "LunarLander-v3"
INPUTS, ACTIONS = 8, 4
WORKERS, ENVS_PER_WORKER, HORIZON = 2, 16, 128
ROWS_PER_FRAGMENT = ENVS_PER_WORKER * HORIZON
WARM_UP = 3.0  # seconds before a measurement


def seconds(description: str) -> float:
    """Return what ``--seconds`` says: for how long to measure."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0)
    return float(parser.parse_args().seconds)


def tanh_net() -> nn.Sequential:
    """Return the 64-64 tanh network; its output are logits."""
    return nn.Sequential(
        nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, ACTIONS)
    )


def sampler() -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from observations to sampled actions, for peers with none of their own."""
    net = tanh_net()

    def act(obs: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            logits = net(torch.from_numpy(obs))
            noise = torch.empty_like(logits).exponential_().log_()
            return (logits - noise).argmax(-1).numpy()

    return act


def measure(peer: str, package: str, collect: Callable[[], int], seconds: float) -> None:
    """Print the rows per second of calls of ``collect``, which returns rows, after a warm-up."""
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_UP:
        collect()
    rows, spent, began = 0, 0.0, time.perf_counter()
    while spent < seconds:
        rows += collect()
        spent = time.perf_counter() - began
    report = {
        "peer": peer,
        "steps_per_second": round(rows / spent, 1),
        "rows": rows,
        "seconds": round(spent, 3),
        "version": f"{package} {importlib.metadata.version(package)}",
    }
    print(json.dumps(report), flush=True)
