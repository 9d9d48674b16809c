"""Says whether a cluster is ready for environments, and what to change if it is not."""

from __future__ import annotations

from clusterenv.doctor.examination import examine, main, show

__all__ = ["examine", "main", "show"]
