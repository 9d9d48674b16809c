"""What a policy does wrong."""

from __future__ import annotations

from torch import Tensor

from clusterenv.schema import Column

__all__ = ["PolicyFault", "as_array"]


class PolicyFault(Exception):
    """A policy returned something that cannot be used; the message says what and where."""


def as_array(tensor: Tensor, name: str) -> Column:
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
            f"the policy's {name} are {tensor.dtype} on {tensor.device}, of which there is no "
            f"array ({error}); return them as .float().cpu(), or .long().cpu()"
        ) from error
    return array
