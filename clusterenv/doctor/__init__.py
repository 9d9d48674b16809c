"""Checks whether a cluster is ready for environments, and says what to change if it is not.

``python -m clusterenv.doctor --cluster cluster.yaml --env LunarLander-v3``
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from clusterenv.doctor.diagnosis import Finding, Report, judge, show

if TYPE_CHECKING:
    from clusterenv.doctor.examination import examine

__all__ = ["Finding", "Report", "examine", "judge", "main", "show"]


def __getattr__(name: str) -> Any:
    if name == "examine":  # imported when it is used: --help need not wait for Dask
        return importlib.import_module("clusterenv.doctor.examination").examine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(argv: Sequence[str] | None = None, *, wording: Callable[[str], str] = str) -> int:
    """Examine a cluster and print the findings; return 0 if it is ready and 1 if not.

    ``wording`` turns a finding into what is printed.
    """
    parser = argparse.ArgumentParser(
        "clusterenv doctor",
        description="Check whether a cluster is ready for environments, and say what to change.",
    )
    parser.add_argument("--cluster", default="local", help="anything that clusterenv.connect takes")
    parser.add_argument("--env", help="id of an environment to step on the workers")
    parser.add_argument("--workers", type=int, help="to start, where a cluster is started")
    parser.add_argument("--timeout", type=float, default=120, help="seconds to wait for workers")
    args = parser.parse_args(argv)

    from clusterenv.doctor.examination import examine

    report = examine(args.cluster, args.env, args.workers, args.timeout)
    print(show(report))
    findings = judge(report)
    for finding in sorted(findings, key=lambda finding: not finding.blocking):
        print(f"{'change' if finding.blocking else 'note'}: {wording(finding.text)}")
    ready = not any(finding.blocking for finding in findings)
    print("ready" if ready else "not ready")
    return 0 if ready else 1
