"""A policy and a group of environments fill fragments; nothing here knows of a cluster."""

from clusterenv.env_loop.chooser import Acting, Interrupted
from clusterenv.env_loop.loop import TEXT, EnvLoop, check_spaces

__all__ = ["TEXT", "Acting", "EnvLoop", "Interrupted", "check_spaces"]
