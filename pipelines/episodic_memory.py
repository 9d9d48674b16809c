"""Train by IMPALA with a momentum boosted episodic memory, for tasks of which most are rare.

``python -m pipelines.episodic_memory --env clusterenv/ZipfGridworldSmall-v0 --engine native``

After Momentum Boosted Episodic Memory (2022, 2025), which has no public code. From the
publications: a circular familiarity buffer of items; NT-Xent of temperature 0.2 between an item
and its copy with Gaussian noise and a random cutout; the momentum of each item's loss and the
rarity that follows from it; a prioritised memory that evicts the least rare; neighbours whose
recurrent state is gated into the policy's own. Our choices, where they leave it open:

- Items are ``--items`` random rows of every update; the state of an item is the LSTM's cell
  after it. The contrastive loss reaches the convolutions, whose features are the keys.
- An item is offered to the memory when it leaves the familiarity buffer: it has had its losses.
- Images that are equal to the last pixel do not have to be told apart.
- What is held becomes less rare by the factor ``--fading`` with every update, or keys and states
  of an early network would stay for ever.
- The gate is a fifth one of the LSTM's cell, as in a differentiable neural dictionary: see
  :class:`pipelines.networks.episodic_memory.MemoryCell`. Neighbours answer with the mean of
  their states; an empty memory answers zeros. No gradient goes into keys, states or queries.

Keys and states are buffers of the policy, so they travel to the workers with its weights and by
the same rules: ``4 * memory * (features + units + 1) + 8`` bytes of every pull, which the metric
``memory_bytes`` says. The familiarity buffer, ``familiarity`` images, stays at the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium as gym
import torch
from torch import Tensor, nn

from clusterenv.errors import ConfigError
from clusterenv.store import Rollout
from pipelines.experiment import Losses, main
from pipelines.experiment.checks import Count, Fraction, Inside, NotNegative, Positive, Share
from pipelines.impala import IMPALA, PRESETS, VTraceArgs
from pipelines.impala import Args as IMPALAArgs
from pipelines.networks.actor_critic import Unrolled
from pipelines.networks.episodic_memory import (
    EpisodicMemory,
    Familiarity,
    MemoryCell,
    nt_xent,
    perturb,
)
from pipelines.networks.recurrent import RecurrentActorCritic

__all__ = ["Args", "MemoryActorCritic", "MemoryIMPALA"]


@dataclass(frozen=True)
class Args(IMPALAArgs):
    """Options; ``MemoryIMPALA.preset`` returns those of IMPALA for the environment."""

    recurrent: Count = 128  # units of the LSTM
    memory: Count = 512  # items that the memory holds
    nearest: Count = 1  # neighbours that answer together, at most 5
    fading: Fraction = 0.999  # of the rarity of what is held, with every update
    familiarity: Count = 1_024  # items of the familiarity buffer
    items: Count = 4  # rows of an update that enter it
    beta: Inside = 0.95  # share of the old momentum of a loss in the new one
    contrasted: Count = 64  # items of the contrastive loss of an update
    contrast: NotNegative = 0.02  # weight of the contrastive loss
    temperature: Positive = 0.2  # of the contrastive loss
    embedding: Count = 64  # numbers that the contrastive loss compares
    noise: NotNegative = 0.1  # of an item's copy: standard deviation, as a share of white
    cutout: Share = 0.3  # of an item's copy: side of a black square, as a share of the image's

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.contrasted > self.familiarity:
            raise ConfigError(
                f"--contrasted {self.contrasted} items are never in --familiarity "
                f"{self.familiarity}: --contrasted {self.familiarity}"
            )
        if self.contrasted < 2:
            raise ConfigError("--contrasted 1 leaves nothing to tell apart: --contrasted 64")
        if self.items > self.familiarity:
            raise ConfigError(
                f"--items {self.items} of an update do not fit into --familiarity "
                f"{self.familiarity}: --items {self.familiarity}"
            )


class MemoryActorCritic(RecurrentActorCritic):
    """Actor and critic with an LSTM that recalls the states of similar, rare observations."""

    def __init__(
        self, args: Args, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        options = args.hidden, args.recurrent, args.normalize_obs, args.cnn
        super().__init__(observation_space, action_space, *options)
        if self.observations.image is None or self.observations.numbers:
            raise ConfigError(
                f"an episodic memory is made of images, and observations are {observation_space}; "
                "without one: clusterenv train impala --recurrent 64"
            )
        features = self.inputs - self.head.outputs - 1
        self.core = MemoryCell(self.inputs, self.units)
        self.memory = EpisodicMemory(args.memory, features, self.units, args.nearest)
        self.embed = nn.Sequential(
            nn.Linear(features, features), nn.ReLU(), nn.Linear(features, args.embedding)
        )

    def features(self, obs: Any) -> Tensor:
        keys = super().features(obs)
        return torch.cat([self.memory.read(keys), keys], -1)

    def keys(self, images: Tensor) -> Tensor:
        """Return what images are looked up by."""
        return super().features(images)


class MemoryIMPALA(IMPALA):
    """IMPALA with a momentum boosted episodic memory."""

    name, title, presets = "episodic_memory", "IMPALA with episodic memory", PRESETS
    args_type: ClassVar[type[VTraceArgs]] = Args
    args: Args
    agent: MemoryActorCritic

    def __init__(
        self, args: Args, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        super().__init__(args, observation_space, action_space)
        image = self.agent.observations.image
        assert image is not None
        self.familiarity = Familiarity(args.familiarity, image, args.recurrent, args.beta)
        self.parts = {**self.parts, "familiarity": self.familiarity}

    def make_agent(self) -> MemoryActorCritic:
        return MemoryActorCritic(self.args, self.observation_space, self.action_space)

    def loss(self, rows: Rollout, unrolled: Unrolled) -> tuple[Tensor, Losses]:
        loss, said = super().loss(rows, unrolled)
        self.remember(rows, unrolled)
        contrast = self.contrast()
        memory = self.agent.memory
        held = int(memory.held)
        return loss + self.args.contrast * contrast, {
            **said,
            "contrast": contrast,
            "memory_items": held,
            "memory_rarity": float(memory.rarity[:held].mean()) if held else 0.0,
            "memory_bytes": memory.nbytes,
        }

    @torch.no_grad()
    def remember(self, rows: Rollout, unrolled: Unrolled) -> None:
        """Take items from a fragment; offer those that make place for them to the memory."""
        images, cells = self.agent.observed(rows.columns).flatten(0, 1), unrolled.cell
        assert cells is not None
        chosen = torch.randperm(len(images))[: self.args.items]
        left = self.familiarity.add(images[chosen], cells.flatten(0, 1)[chosen])
        judged = left.momentum >= 0
        keys = self.agent.keys(left.image[judged])
        rarity = self.familiarity.rarity(left.momentum[judged])
        self.agent.memory.write(keys, left.value[judged], rarity, self.args.fading)

    def contrast(self) -> Tensor:
        """Return the mean contrastive loss of some items, whose momenta it updates."""
        args, familiarity = self.args, self.familiarity
        places = familiarity.sample(args.contrasted)
        if len(places) < 2:
            return torch.zeros(())
        images, codes = familiarity.items.image[places], familiarity.items.code[places]
        both = torch.cat([images, perturb(images, args.noise, args.cutout)])
        items, copies = self.agent.embed(self.agent.keys(both)).chunk(2)
        losses = nt_xent(items, copies, args.temperature, codes)
        familiarity.judge(places, losses)
        return losses.mean()


if __name__ == "__main__":
    main(MemoryIMPALA)
