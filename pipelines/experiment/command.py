"""The command line of a learner."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Sequence
from typing import Any

from clusterenv.errors import ClusterEnvError
from pipelines.experiment import options
from pipelines.experiment.algorithm import Algorithm, check_algorithm
from pipelines.experiment.runner import Result, run
from pipelines.messages import Wording, without_traceback

__all__ = ["main", "train"]


def train(algorithm: type[Algorithm[Any, Any]], argv: Sequence[str] | None = None) -> Result:
    """Read the options of a learner from a command line, and run it."""
    kind = check_algorithm(algorithm)
    module = inspect.getmodule(kind)
    args = options.read(
        kind.args_type,
        argv,
        presets=kind.presets,
        description=module.__doc__ if module else None,
        prog=f"clusterenv train {kind.name}",
    )
    return run(kind, args)


def main(algorithm: type[Algorithm[Any, Any]]) -> None:
    """Run ``python my_learner.py``; print errors and interruptions as one line."""
    try:
        train(algorithm)
    except ClusterEnvError as error:
        wording = Wording([field.name for field in dataclasses.fields(algorithm.args_type)])
        sys.exit(f"{algorithm.name}: {wording.of(without_traceback(str(error)))}")
    except KeyboardInterrupt as error:
        print(f"{algorithm.name}: {str(error) or 'interrupted'}", file=sys.stderr)
        sys.exit(130)
