"""The command line of a study."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from clusterenv.errors import ClusterEnvError
from pipelines.experiment import options
from pipelines.experiment.checks import Options

__all__ = ["main"]

Args = TypeVar("Args", bound=Options)


def main(study: Callable[[Args], object], kind: type[Args]) -> None:
    """Run a study with the options of a command line; errors and interruptions are one line."""
    name = Path(inspect.getfile(study)).stem
    try:
        study(options.read(kind, None, description=sys.modules[study.__module__].__doc__))
    except (ClusterEnvError, KeyboardInterrupt) as error:
        sys.exit(f"{name}: {str(error) or 'interrupted'}")
