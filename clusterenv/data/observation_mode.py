"""``observation_mode``: whether observation spaces must be equal, or agree in shape and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from gymnasium import Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from clusterenv.errors import ArgumentTypeError, ConfigError, SpaceMismatch

__all__ = ["ObservationMode", "batch_observations", "check_observation_mode", "check_same_spaces"]

ObservationMode: TypeAlias = str | tuple[Space[Any], Space[Any]]
"""``"same"``, ``"different"``, or the batched space and that of one environment."""


def check_observation_mode(mode: Any) -> None:
    """Raise ``ConfigError`` unless ``mode`` is an observation mode."""
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, Space) for space in mode):
            raise ArgumentTypeError(
                f"observation_mode={mode!r} must be two spaces, that of all environments and that "
                "of one: observation_mode=(batch_space(space, num_envs), space)"
            )
    elif not isinstance(mode, str) or mode not in ("same", "different"):
        raise ConfigError(
            f"observation_mode={mode!r} is unknown; one of 'same', 'different', "
            "or a tuple of two spaces: (batch_space(space, num_envs), space)"
        )


def check_same_spaces(
    mode: ObservationMode,
    names: Sequence[str],
    observation_spaces: Sequence[Space[Any]],
    action_spaces: Sequence[Space[Any]],
) -> None:
    """Raise ``SpaceMismatch`` unless the spaces of environments, or of shards, can be batched.

    There is one space of each kind per name; the error names the first that does not fit.

    Examples
    --------
    >>> from gymnasium.spaces import Box, Discrete
    >>> boxes, actions = [Box(0, 1, (2,)), Box(0, 9, (2,))], [Discrete(2)] * 2
    >>> check_same_spaces("different", ["environment 0", "environment 1"], boxes, actions)
    """
    expected, of = observation_spaces[0], names[0]
    if isinstance(mode, tuple):
        expected, of = mode[1], "observation_mode"
    for name, space in zip(names, observation_spaces, strict=True):
        if mode == "same" and space != expected:
            raise SpaceMismatch(
                f"all environments must have the same observation_space: {of} has {expected}, "
                f"{name} has {space}. If they differ in their bounds alone: "
                "make_vec(…, observation_mode='different')"
            )
        if mode != "same" and not _alike(expected, space):
            raise SpaceMismatch(
                "all observation spaces must have the same structure, shapes and dtypes: "
                f"{of} has {expected}, {name} has {space}"
            )
    for name, space in zip(names, action_spaces, strict=True):
        if space != action_spaces[0]:
            raise SpaceMismatch(
                f"all environments must have the same action_space: {names[0]} has "
                f"{action_spaces[0]}, {name} has {space}"
            )


def _alike(left: Space[Any], right: Space[Any]) -> bool:
    try:
        return bool(is_space_dtype_shape_equiv(left, right))
    except NotImplementedError:  # a space that is not one of Gymnasium's
        return False


def batch_observations(
    mode: ObservationMode, spaces: Sequence[Space[Any]]
) -> tuple[Space[Any], Space[Any]]:
    """Return the observation space of one environment, and the batched space of all."""
    if isinstance(mode, tuple):
        return mode[1], mode[0]
    if mode == "different":
        return spaces[0], batch_differing_spaces(spaces)
    return spaces[0], batch_space(spaces[0], len(spaces))
