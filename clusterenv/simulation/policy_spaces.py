"""Which observation and action spaces a policy can act in."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from clusterenv.data.spaces import Layout
from clusterenv.errors import ConfigError

__all__ = ["TEXT", "check_spaces"]

TEXT = ("refuse", "drop", "keep")
"""How text in observations is treated."""


def check_spaces(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any], text: str = "refuse"
) -> None:
    """Raise unless a policy can act in these spaces; ``text`` is one of :data:`TEXT`."""
    names = set()
    layout = Layout(observation_space)
    for leaf in layout.leaves:
        if leaf.name("obs") in names:
            raise ConfigError(
                f"two parts of the observation would both be the column {leaf.name('obs')}; "
                "rename a key of the Dict space with a wrapper"
            )
        names.add(leaf.name("obs"))
        if leaf.is_text and text == "refuse":
            raise ConfigError(
                f"{leaf.name('obs')} is text, which has no tensor form: Collector(…, text='keep') "
                "collects it as a column of strings, Collector(…, text='drop') leaves it out; the "
                "policy acts on the rest of the observation"
            )
        if not leaf.is_array and not leaf.is_text:
            raise ConfigError(
                f"{leaf.name('obs')} has no tensor form; leave it out with a wrapper: "
                "wrappers=(lambda env: FilterObservation(env, ['image']),)"
            )
        if 0 in leaf.shape:
            raise ConfigError(
                f"{leaf.name('obs')} has no numbers, its shape is {leaf.shape}; leave it out with "
                "a wrapper: wrappers=(lambda env: FilterObservation(env, ['image']),)"
            )
    if not layout.arrays:
        raise ConfigError(
            f"a policy acts on tensors, and nothing in {observation_space} has a tensor form; "
            "encode it with a wrapper such as gymnasium.wrappers.TransformObservation"
        )
    if isinstance(action_space, (spaces.Dict, spaces.Tuple)) or not Layout(action_space).arrays:
        raise ConfigError(
            f"a policy acts in one array, but the action space is {action_space}; flatten it with "
            "a wrapper such as gymnasium.wrappers.TransformAction"
        )
