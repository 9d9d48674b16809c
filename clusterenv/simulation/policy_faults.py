"""The error for an unusable answer of a policy, and the place in the run that it names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from clusterenv.data.spaces import Column

__all__ = ["Location", "PolicyFault", "as_array"]


class PolicyFault(Exception):
    """A policy raised, or returned something unusable; the message says what and where."""


class Location:
    """Environments and step that a policy acts at; formatted only for an error message.

    Parameters
    ----------
    envs
        Global indices of the environments.

    Examples
    --------
    >>> location = Location(range(8, 12))
    >>> location.steps = 5
    >>> str(location), location.env(3)
    ('environments 8–11 at step 5 of the shard', 'environment 11 at step 5 of the shard')
    """

    def __init__(self, envs: Sequence[int]) -> None:
        self._envs = envs
        self.steps = 0
        """Steps that the shard has made."""
        self.episode_step: Callable[[int], int] | None = None
        """Returns an environment's step within its episode, given its row, if that is known."""

    def __str__(self) -> str:
        return f"environments {self._envs[0]}–{self._envs[-1]} at step {self.steps} of the shard"

    def env(self, row: int) -> str:
        """Name one environment and its step."""
        step = f"{self.steps} of the shard"
        if self.episode_step is not None:
            step = f"{self.episode_step(row)} of its episode"
        return f"environment {self._envs[row]} at step {step}"


def as_array(tensor: Tensor, name: str, location: Location) -> Column:
    """Return the policy's tensor called ``name`` as an array.

    Raises
    ------
    PolicyFault
        If it cannot be converted.
    """
    try:
        array: Column = tensor.numpy()
    except (TypeError, RuntimeError) as error:  # bfloat16, other devices, sparse tensors
        raise PolicyFault(
            f"the policy's {name!r} on {location} is {tensor.dtype} on {tensor.device}, which "
            f"NumPy cannot represent ({error}); return it as .float().cpu(), or .long().cpu()"
        ) from error
    return array
