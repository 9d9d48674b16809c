"""Certificates for the clusters that ClusterEnv starts, so that nobody else can join them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distributed.security import Security

from clusterenv import config
from clusterenv.errors import ConfigError

__all__ = ["LOOPBACK", "NO_PAGES", "choose_security", "in_files"]

# Without a dashboard Dask still listens for HTTP, which knows no certificates and which anybody
# on the machine can ask: on loopback, and with nothing to say.
LOOPBACK = "127.0.0.1:0"
NO_PAGES: dict[str, Any] = {
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}

_FIELDS = (
    "tls_ca_file",
    *(
        f"tls_{role}_{part}"
        for role in ("client", "scheduler", "worker")
        for part in ("key", "cert")
    ),
)


def choose_security(wanted: Any = None) -> Security | None:
    """Return the certificates of a cluster that is about to be started.

    Parameters
    ----------
    wanted
        - ``True``: those that Dask's configuration names (``distributed.comm.tls``), or else
          new ones that exist in memory only and end with the cluster.
        - ``False``: none; whoever reaches a port of the cluster can run code in it.
        - A ``distributed.security.Security``: these.
        - ``None``: as the setting ``clusterenv.security`` says, which is ``True`` by default.

    Raises
    ------
    ConfigError
        If ``wanted`` is none of these.

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
    """Return the same certificates, those in memory written to files that only we can read.

    The jobs of a batch system are given the files' names.
    """
    written: dict[str, str | None] = {}
    for name in _FIELDS:
        value = getattr(security, name)
        if value is not None and "\n" in value:
            path = directory / f"{name.removeprefix('tls_')}.pem"
            path.touch(mode=0o600, exist_ok=False)
            path.write_text(value)
            value = str(path)
        written[name] = value
    return Security(
        require_encryption=security.require_encryption,
        tls_ciphers=security.tls_ciphers,
        tls_min_version=security.tls_min_version,
        tls_max_version=security.tls_max_version,
        extra_conn_args=security.extra_conn_args,
        **written,
    )
