"""What a policy does wrong."""

from __future__ import annotations

__all__ = ["PolicyFault"]


class PolicyFault(Exception):
    """A policy returned something that cannot be used; the message says what and where."""
