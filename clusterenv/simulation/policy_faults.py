"""What a policy does wrong, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from clusterenv.data.spaces import Column

__all__ = ["PolicyFault", "StepOf", "Where", "as_array"]

StepOf = Callable[[int, int], str]
"""Says which step of its episode an environment is at, given its row and the time row."""


class PolicyFault(Exception):
    """A policy returned something that cannot be used; the message says what and where."""


class Where:
    """Where a policy acts; put into words only if something is wrong, as it changes every step.

    Parameters
    ----------
    envs
        Global indices of the environments.

    Examples
    --------
    >>> where = Where(range(8, 12))
    >>> where.steps = 5
    >>> str(where), where.env(3)
    ('environments 8–11 at step 5 of the shard', 'environment 11 at step 5 of the shard')
    """

    def __init__(self, envs: Sequence[int]) -> None:
        self._envs = envs
        self.steps = 0
        """That the shard has made."""
        self.t = 0
        """The time row of a fragment, for :attr:`step_of`."""
        self.step_of: StepOf | None = None
        """Knows the steps of episodes, if somebody does."""

    def __str__(self) -> str:
        return f"environments {self._envs[0]}–{self._envs[-1]} at step {self.steps} of the shard"

    def env(self, row: int) -> str:
        """Name one environment, and its step."""
        step = self.step_of(row, self.t) if self.step_of else f"{self.steps} of the shard"
        return f"environment {self._envs[row]} at step {step}"


def as_array(tensor: Tensor, name: str, where: Where) -> Column:
    """Return a policy's tensor as an array; ``name`` says which it is.

    Raises
    ------
    PolicyFault
        If NumPy has no form of it.
    """
    try:
        array: Column = tensor.numpy()
    except (TypeError, RuntimeError) as error:  # bfloat16, other devices, sparse ones
        raise PolicyFault(
            f"the policy's {name!r} on {where} is {tensor.dtype} on {tensor.device}, of which "
            f"there is no array ({error}); return it as .float().cpu(), or .long().cpu()"
        ) from error
    return array
