"""Export the policy of a run as a file that loads without ClusterEnv.

``clusterenv export runs/mine policy.pt2``
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
import tyro
from torch import Tensor, nn

from clusterenv.errors import ConfigError
from clusterenv.policies import Context, Policy
from pipelines.experiment import options
from pipelines.experiment.checks import Options
from pipelines.experiment.directories import check_writable
from pipelines.tools.saved_policies import Version, load_run

__all__ = ["Args", "export"]

_ROWS = 5  # of the batch that is tried


@dataclass(frozen=True)
class Args(Options):
    """Which policy to export, and where to."""

    run: tyro.conf.Positional[Path]  # directory of a run
    out: tyro.conf.Positional[Path]  # .pt2 for torch.export, .onnx for ONNX; needs clusterenv[onnx]
    version: Version | None = None  # default: the best if the run was evaluated, else the last

    def __post_init__(self) -> None:
        super().__post_init__()
        _writer(self.out)
        check_writable(self.out, "", f"runs/policy{self.out.suffix}")


class _BestAction(nn.Module):
    """A policy as a function from observations to actions."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, obs: Tensor) -> Tensor:
        context = Context(torch.arange(obs.shape[0]), deterministic=True)
        return self.policy.act(obs, context).action


def export(policy: Policy, observation_space: gym.Space[Any], out: Path) -> None:
    """Write a policy as a function from a batch of observations to a batch of best actions.

    Parameters
    ----------
    policy
        Its ``act`` honours ``context.deterministic``.
    observation_space
        A space of one array.
    out
        ``.pt2`` for ``torch.export.load``, ``.onnx`` for ONNX runtimes.

    Raises
    ------
    ConfigError
        If the suffix is unknown, or the policy cannot be exported; the message says why.
    """
    write = _writer(out)
    name = type(policy).__name__
    if policy.initial_state(1):
        raise ConfigError(
            f"{name} is recurrent, and cannot be exported: an exported policy maps observations "
            "to actions and keeps no state between calls. Save its weights instead: "
            "torch.save(policy.state_dict(), 'policy.pt')"
        )
    if not isinstance(observation_space, (gym.spaces.Box, gym.spaces.Discrete)):
        raise ConfigError(
            f"{name} acts on {observation_space}, which is not one array, and cannot be "
            "exported; flatten the observations with a wrapper before training: "
            "gymnasium.wrappers.FlattenObservation(env)"
        )
    obs = torch.stack([torch.as_tensor(observation_space.sample()) for _ in range(_ROWS)])
    module = _BestAction(policy).eval()
    batch = torch.export.Dim("batch", min=1)
    try:
        with torch.no_grad(), _quiet():
            wanted = module(obs)
            program = torch.export.export(module, (obs,), dynamic_shapes=({0: batch},))
            found = program.module()(obs)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be exported: torch.export follows act() without running it, and came "
            f"to: {_first_line(error)}. act() must not branch on numbers in tensors, nor take "
            "len(obs), for which obs.shape[0] works, nor call what is not torch"
        ) from error
    if not torch.equal(wanted, found):
        raise ConfigError(
            f"{name} cannot be exported: its actions differ from call to call. act() must choose "
            "the best action if context.deterministic"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.tmp{out.suffix}")
    try:
        with _quiet():
            write(program, beside)
        beside.replace(out)
    finally:
        beside.unlink(missing_ok=True)


def _write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    torch.onnx.export(
        program,
        f=path,
        input_names=["obs"],
        output_names=["action"],
        external_data=False,
        verbose=False,
    )


def _writer(out: Path) -> Callable[[torch.export.ExportedProgram, Path], None]:
    """Return what writes files of this suffix."""
    if out.suffix == ".pt2":
        return torch.export.save
    if out.suffix != ".onnx":
        raise ConfigError(
            f"{out} ends neither in .pt2 (for torch) nor in .onnx: "
            "clusterenv export runs/mine policy.pt2"
        )
    if importlib.util.find_spec("onnxscript") is None:
        raise ConfigError(f"{out} needs packages that are not here: pip install 'clusterenv[onnx]'")
    return _write_onnx


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide the warnings of torch's exporters about themselves, and about packages they miss."""
    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        exporter.setLevel(level)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and export."""
    args = options.read(Args, argv, description=__doc__, prog="clusterenv export")
    saved = load_run(args.run, args.version, "export")
    export(saved.policy, saved.observation_space, args.out)
    print(f"{args.out}: {saved.path}, after {saved.steps:,} steps on {saved.env}")
