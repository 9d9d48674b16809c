"""The recurrent state of a policy: what an episode begins with, and whether it stays like that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from clusterenv.policies.base import Policy
from clusterenv.simulation.policy_faults import PolicyFault, Where

__all__ = ["check_state", "initial_state"]


def initial_state(policy: Policy, n: int) -> dict[str, Tensor]:
    """Return the state of ``n`` environments that begin an episode.

    Raises
    ------
    PolicyFault
        If the policy raises, or its state has no row for each environment.
    """
    try:
        state = policy.initial_state(n)
    except (Exception, SystemExit) as error:
        raise PolicyFault(
            f"the policy raised {type(error).__name__} in initial_state({n}): {error}"
        ) from error
    kinds = _kinds(state)
    if kinds is None or any(shape[:1] != (n,) for _, shape in kinds.values()):
        raise PolicyFault(
            f"initial_state({n}) returned {_say(state)}; expected tensors by name, each with a "
            f"row for each of the {n} environments: {{'h': torch.zeros({n}, 64)}}"
        )
    # Rows are written one by one later on; a parameter, or one row for all, must not change.
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def check_state(given: Any, before: Mapping[str, Tensor], where: Where) -> None:
    """Raise unless a state is nothing, or as the one before."""
    if given is None or (type(given) is dict and not given):
        return
    kinds = _kinds(given)
    if kinds != {} and (kinds is None or kinds != _kinds(before)):
        raise PolicyFault(
            f"the policy's state after act() on {where} is {_say(given)}; it was {_say(before)} "
            "before, and must stay as initial_state() gives it"
        )


def _kinds(state: Any) -> dict[str, tuple[Any, tuple[int, ...]]] | None:
    """Return dtypes and shapes by name; ``None`` if these are no tensors by name."""
    if isinstance(state, Mapping) and all(isinstance(t, Tensor) for t in state.values()):
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    return None


def _say(state: Any) -> str:
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__}"
    said = (
        f"{name!r}: {value.dtype} of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"{name!r}: a {type(value).__name__}"
        for name, value in state.items()
    )
    return f"{{{', '.join(said)}}}"
