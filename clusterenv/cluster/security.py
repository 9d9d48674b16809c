"""Certificates of the clusters that ClusterEnv starts, so that only their owner can join them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distributed.security import Security

from clusterenv import config
from clusterenv.errors import ConfigError

__all__ = ["LOOPBACK", "NO_HTTP_ROUTES", "choose_security", "in_files"]

# Without a dashboard Dask still runs an HTTP server, without TLS and open to every user of the
# machine. It listens on loopback and has no routes.
LOOPBACK = "127.0.0.1:0"
NO_HTTP_ROUTES: dict[str, Any] = {
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}


def choose_security(wanted: Any = None) -> Security | None:
    """Return the certificates for a cluster to start.

    Parameters
    ----------
    wanted
        - ``True``: those in Dask's configuration (``distributed.comm.tls``), or else temporary
          ones that exist in memory only.
        - ``False``: none. Everyone who reaches a port of the cluster can then run code in it.
        - A ``distributed.security.Security``: these certificates.
        - ``None``: the setting ``clusterenv.security``, which is ``True`` by default.

    Raises
    ------
    ConfigError
        If ``wanted`` is something else.

    Examples
    --------
    >>> choose_security(True).require_encryption
    True
    >>> choose_security(False) is None
    True
    """
    if wanted is None:
        wanted = config.get("security")
    if isinstance(wanted, Security):
        return wanted
    if wanted is False:
        return None
    if wanted is not True:
        raise ConfigError(
            f"security={wanted!r} is a {type(wanted).__name__}; pass True for TLS, False for "
            "none, or the certificates: Security(tls_ca_file='ca.pem', …)"
        )
    configured = Security()
    if configured.tls_ca_file and configured.tls_scheduler_cert and configured.tls_worker_cert:
        configured.require_encryption = True
        return configured
    return Security.temporary()


def in_files(security: Security, directory: Path) -> Security:
    """Write certificates that are in memory to files that only their owner can read.

    The jobs of a batch system get the names of the files.
    """
    options = {name: getattr(security, name) for name in Security.__slots__}
    for name, value in options.items():
        if isinstance(value, str) and "\n" in value:
            path = directory / f"{name.removeprefix('tls_')}.pem"
            path.touch(mode=0o600, exist_ok=False)
            path.write_text(value)
            options[name] = str(path)
    return Security(**options)
