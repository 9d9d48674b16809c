"""Spread reinforcement-learning simulation over a Dask cluster; keep the learner as it is."""

from __future__ import annotations

from clusterenv import config as _config  # loads the defaults into Dask's configuration
from clusterenv import errors
from clusterenv.cluster import connect
from clusterenv.vector import ClusterEnv, make_vec

__all__ = ["ClusterEnv", "__version__", "connect", "errors", "make_vec"]
__version__ = "0.1.0"
del _config
