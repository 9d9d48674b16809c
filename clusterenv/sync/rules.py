"""Rules for when a worker pulls: plain objects with one pure function each."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from clusterenv.data.checks import is_number, is_whole
from clusterenv.data.summary import Summary
from clusterenv.errors import ConfigError
from clusterenv.policies.policy import Policy

__all__ = ["Divergence", "Every", "EveryVersion", "Never", "SyncRule", "check_rule"]


class SyncRule(Protocol):
    """Decides whether a worker pulls the newest version."""

    @property
    def needs_divergence(self) -> bool:
        """Whether the head must compute divergences for this rule."""

    def should_pull(self, lag: int, divergence: float | None) -> bool:
        """Return whether to pull.

        Parameters
        ----------
        lag
            How many versions the worker is behind; 0 if it has the newest.
        divergence
            Divergence of the worker's version from the newest; ``None`` if it is not known.
        """


class _Rule(Summary):
    """Base of the rules here; a rule needs no base."""

    def _summary(self) -> Mapping[str, Any]:
        return {}

    def _says(self) -> str:
        """Return when a worker pulls."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>: {html.escape(self._says())}"


@dataclass(frozen=True, repr=False)
class EveryVersion(_Rule):
    """Pull every version: the most expensive control."""

    needs_divergence: bool = field(default=False, init=False)

    def _says(self) -> str:
        return "pull every version"

    def should_pull(self, lag: int, divergence: float | None) -> bool:
        return lag >= 1


@dataclass(frozen=True, repr=False)
class Every(_Rule):
    """Pull when ``n`` versions behind."""

    n: int
    needs_divergence: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not is_whole(self.n) or self.n < 1:
            raise ConfigError(f"Every(n) needs an integer of at least 1, got {self.n!r}: Every(4)")

    def _summary(self) -> Mapping[str, Any]:
        return {"": self.n}

    def _says(self) -> str:
        return f"pull when {self.n:,} versions behind"

    def should_pull(self, lag: int, divergence: float | None) -> bool:
        return lag >= self.n


@dataclass(frozen=True, repr=False)
class Divergence(_Rule):
    """Adaptive policy synchronization: pull when the worker's version has diverged too far.

    Parameters
    ----------
    threshold
        Pull when the mean Kullback–Leibler divergence of the worker's version from the newest,
        on the same observations, is larger than this.
    max_lag
        Pull also when more versions behind than this, whatever the divergence.

    Examples
    --------
    >>> rule = Divergence(0.05, max_lag=10)
    >>> rule.should_pull(lag=3, divergence=0.01), rule.should_pull(lag=3, divergence=0.2)
    (False, True)
    """

    threshold: float
    max_lag: int | None = None
    needs_divergence: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if not is_number(self.threshold) or not self.threshold >= 0:
            raise ConfigError(
                f"threshold must be a number, not below 0, got {self.threshold!r}: Divergence(0.05)"
            )
        if self.max_lag is not None and (not is_whole(self.max_lag) or self.max_lag < 1):
            raise ConfigError(
                f"max_lag must be an integer, at least 1, got {self.max_lag!r}: "
                "Divergence(0.05, max_lag=10)"
            )

    def _summary(self) -> Mapping[str, Any]:
        lag = {} if self.max_lag is None else {"max_lag": self.max_lag}
        return {"": repr(self.threshold), **lag}

    def _says(self) -> str:
        lag = "" if self.max_lag is None else f", or more than {self.max_lag:,} versions behind"
        return f"pull above a divergence of {self.threshold}{lag}"

    def should_pull(self, lag: int, divergence: float | None) -> bool:
        if self.max_lag is not None and lag > self.max_lag:
            return True
        return divergence is None or divergence > self.threshold


@dataclass(frozen=True, repr=False)
class Never(_Rule):
    """Keep the first version: the control that must fail to learn.

    A shard that is restarted begins with the newest.
    """

    needs_divergence: bool = field(default=False, init=False)

    def _says(self) -> str:
        return "never pull"

    def should_pull(self, lag: int, divergence: float | None) -> bool:
        return False


def check_rule(rule: Any, policy: Policy) -> None:
    """Raise ``ConfigError`` unless this is a rule that the policy has what it needs for."""
    if (
        isinstance(rule, type)
        or not callable(getattr(rule, "should_pull", None))
        or not hasattr(rule, "needs_divergence")
    ):
        raise ConfigError(
            f"sync={rule!r} is no rule, which has should_pull(lag, divergence) and "
            "needs_divergence: sync=clusterenv.Divergence(0.05)"
        )
    if rule.needs_divergence and type(policy).distribution is Policy.distribution:
        raise ConfigError(
            f"sync={rule} compares distributions, and {type(policy).__name__} has none: define "
            "distribution(obs, context), or count versions: sync=clusterenv.Every(4)"
        )
