"""An episodic memory that keeps what is rare, for any recurrent agent.

After Momentum Boosted Episodic Memory (2022, 2025), of which there is no public code: items enter
a circular :class:`Familiarity` buffer, where a contrastive loss judges them again and again. What
is rare is learned late, so its loss stays high. Items that leave the buffer are offered to an
:class:`EpisodicMemory`, which evicts the least rare first, and a :class:`MemoryCell` gates what
the nearest of them say into its own state.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from clusterenv.errors import ConfigError

__all__ = ["EpisodicMemory", "Familiarity", "Items", "MemoryCell", "nt_xent", "perturb", "rarity"]

NEAREST = 5
"""The most neighbours that answer together."""
UNJUDGED = -1.0
"""In place of a momentum: the loss is never negative."""


class EpisodicMemory(nn.Module):
    """Keys and values of the rarest items there were, as buffers that travel with the weights.

    Parameters
    ----------
    capacity
        Items that it holds at most, which bounds its size: :attr:`nbytes`.
    features, units
        Numbers of a key and of a value.
    nearest
        How many neighbours answer a query together, 1 to 5.

    Raises
    ------
    ConfigError
        If a number is none of these.

    Examples
    --------
    >>> memory = EpisodicMemory(capacity=2, features=2, units=1)
    >>> memory.read(torch.ones(1, 2)).tolist(), memory.nbytes
    ([[0.0]], 40)
    >>> memory.write(torch.eye(2), torch.tensor([[7.0], [8.0]]), torch.tensor([0.2, 0.9]))
    >>> memory.read(torch.tensor([[0.1, 3.0]])).tolist()
    [[8.0]]
    """

    keys: Tensor
    values: Tensor
    rarity: Tensor
    held: Tensor

    def __init__(self, capacity: int, features: int, units: int, nearest: int = 1) -> None:
        super().__init__()
        if capacity < 1:
            raise ConfigError(f"a memory of {capacity} items holds nothing: --memory 512")
        if not 1 <= nearest <= NEAREST:
            raise ConfigError(f"--nearest must be 1 to {NEAREST}, got {nearest}: --nearest 1")
        self.nearest = nearest
        self.register_buffer("keys", torch.zeros(capacity, features))
        self.register_buffer("values", torch.zeros(capacity, units))
        self.register_buffer("rarity", torch.zeros(capacity))
        self.register_buffer("held", torch.zeros((), dtype=torch.int64))

    @property
    def nbytes(self) -> int:
        """Bytes that a pull of the weights has for the memory, full or not."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    @torch.no_grad()
    def read(self, queries: Tensor) -> Tensor:
        """Return the mean value of the keys nearest to each query by cosine; zeros if empty."""
        held = int(self.held)
        if not held:
            return queries.new_zeros(len(queries), self.values.shape[1])
        keys = nn.functional.normalize(self.keys[:held], dim=-1)
        closeness = queries.detach() @ keys.T  # a query's length changes no order
        if self.nearest == 1:
            return self.values[closeness.argmax(-1)]
        found = closeness.topk(min(self.nearest, held), dim=-1).indices
        return self.values[found].mean(1)

    @torch.no_grad()
    def write(self, keys: Tensor, values: Tensor, rarity: Tensor, fading: float = 1.0) -> None:
        """Take in items; if there are too many, the least rare go, be they old or new.

        Those that are held become less rare by the factor ``fading`` first.
        """
        held, capacity = int(self.held), len(self.keys)
        mine = self.keys[:held], self.values[:held], self.rarity[:held] * fading
        given = keys, values, rarity
        merged = [torch.cat([old, new.detach()]) for old, new in zip(mine, given, strict=True)]
        kept = merged[2].argsort(descending=True, stable=True)[:capacity]
        for buffer, part in zip((self.keys, self.values, self.rarity), merged, strict=True):
            buffer[: len(kept)] = part[kept]
        self.held.fill_(len(kept))


class MemoryCell(nn.Module):
    """An LSTM cell with a gate for what a memory recalls: ``c = f c + i ĉ + r tanh(recalled)``.

    Parameters
    ----------
    inputs
        Numbers of an input, which follow the ``units`` that were recalled.
    units
        Of the cell.

    Examples
    --------
    >>> hidden, cell = MemoryCell(3, 2)(torch.zeros(4, 2 + 3), (torch.zeros(4, 2),) * 2)
    >>> cell.shape
    torch.Size([4, 2])
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.units = units
        self.gates = nn.Linear(inputs + units, 5 * units)
        bound = units**-0.5  # as nn.LSTMCell
        for parameter in self.gates.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, given: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return hidden state and cell after an input."""
        recalled, inputs = given[:, : self.units], given[:, self.units :]
        hidden, cell = state
        out: Tensor = self.gates(torch.cat([inputs, hidden], -1))
        keep, take, show, recall = out[:, self.units :].sigmoid().chunk(4, -1)
        cell = keep * cell + take * out[:, : self.units].tanh() + recall * recalled.tanh()
        return show * cell.tanh(), cell


class Items(NamedTuple):
    """Observations with the recurrent state after each, a row for each item."""

    image: Tensor
    value: Tensor
    momentum: Tensor
    """Of the item's contrastive loss; -1 before the first."""
    code: Tensor
    """The same for images that are the same."""


class Familiarity:
    """A circular buffer of items, with a momentum of each one's loss.

    Parameters
    ----------
    capacity
        Items.
    shape
        Of an image of uint8.
    units
        Numbers of a value.
    beta
        Share of the old momentum in the new one; an item's first loss is its first momentum.

    Examples
    --------
    >>> familiarity = Familiarity(2, (1,), 1, beta=0.5)
    >>> image, value = torch.tensor([[1], [2]], dtype=torch.uint8), torch.zeros(2, 1)
    >>> familiarity.add(image, value).image.shape, familiarity.held
    (torch.Size([0, 1]), 2)
    >>> familiarity.judge(torch.tensor([1]), torch.tensor([4.0]))
    >>> familiarity.judge(torch.tensor([1]), torch.tensor([2.0]))
    >>> familiarity.items.momentum.tolist()
    [-1.0, 3.0]
    """

    def __init__(self, capacity: int, shape: tuple[int, ...], units: int, beta: float) -> None:
        self.beta, self.capacity = beta, capacity
        self.items = Items(
            torch.zeros((capacity, *shape), dtype=torch.uint8),
            torch.zeros(capacity, units),
            torch.full((capacity,), UNJUDGED),
            torch.zeros(capacity, dtype=torch.int64),
        )
        self.added = 0

    @property
    def held(self) -> int:
        """Items that are in it."""
        return min(self.added, self.capacity)

    def add(self, image: Tensor, value: Tensor) -> Items:
        """Take in items, and return those whose places they take, the oldest."""
        places = torch.arange(self.added, self.added + len(image)) % self.capacity
        taken = places[max(0, self.capacity - self.added) :]
        left = Items(*(part[taken] for part in self.items))
        codes = torch.tensor([zlib.crc32(each.numpy().tobytes()) for each in image])
        fresh = torch.full((len(image),), UNJUDGED)
        for part, new in zip(self.items, (image, value.detach(), fresh, codes), strict=True):
            part[places] = new
        self.added += len(image)
        return left

    def sample(self, count: int) -> Tensor:
        """Return places of items, each at most once."""
        return torch.randperm(self.held)[:count]

    def judge(self, places: Tensor, losses: Tensor) -> None:
        """Update the momentum of items by their losses."""
        before, losses = self.items.momentum[places], losses.detach()
        mixed = self.beta * before + (1 - self.beta) * losses
        self.items.momentum[places] = torch.where(before < 0, losses, mixed)

    def rarity(self, momentum: Tensor) -> Tensor:
        """Return the rarity of momenta among those of all items that have been judged."""
        every = self.items.momentum
        return rarity(momentum, every[every >= 0])

    def state_dict(self) -> dict[str, Any]:
        """Return the items that are held."""
        parts = self.items._asdict().items()
        return {"added": self.added, **{name: part[: self.held].clone() for name, part in parts}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; it must fit."""
        count = min(state["added"], self.capacity)
        for name, part in self.items._asdict().items():
            if state[name].shape != (count, *part.shape[1:]):
                raise ValueError(f"{name} is {[*state[name].shape]} of {[*part.shape]}")
            part[:count] = state[name]
        self.added = state["added"]


def rarity(momentum: Tensor, among: Tensor) -> Tensor:
    """Return ``1/2 + 1/2 z / max |z|`` of momenta, standardised among others: 0 to 1.

    Examples
    --------
    >>> rarity(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1.0, 2.0, 3.0, 2.0])).tolist()
    [0.0, 1.0, 1.0]
    """
    far = among - among.mean()
    most = far.abs().amax() if len(among) else 0.0
    if not most > 0:
        return torch.full_like(momentum, 0.5)
    # The standard deviation cancels: z / max |z|.
    return (0.5 + 0.5 * (momentum - among.mean()) / most).clamp(0, 1)


def nt_xent(
    items: Tensor, copies: Tensor, temperature: float = 0.2, codes: Tensor | None = None
) -> Tensor:
    """Return the normalised temperature-scaled cross entropy of each item and its copy, ``[n]``.

    Each of the 2n embeddings has to tell its partner from the 2n - 2 others; an item's loss is
    the mean of both directions. Others with the item's own code are left out.

    Examples
    --------
    >>> two = torch.eye(2)
    >>> nt_xent(two, two, temperature=1.0)  # log(1 + 2 / e)
    tensor([0.5514, 0.5514])
    """
    count = len(items)
    every = nn.functional.normalize(torch.cat([items, copies]), dim=-1)
    closeness = every @ every.T / temperature
    out = torch.eye(2 * count, dtype=torch.bool)
    partner = torch.arange(2 * count).roll(count)
    if codes is not None:
        twice = codes.repeat(2)
        out = twice == twice.unsqueeze(-1)
        out[torch.arange(2 * count), partner] = False
    losses = nn.functional.cross_entropy(
        closeness.masked_fill(out, -torch.inf), partner, reduction="none"
    )
    return losses.view(2, count).mean(0)


def perturb(images: Tensor, noise: float, cutout: float) -> Tensor:
    """Return copies of images of uint8 with Gaussian noise, and a random square of each black.

    Parameters
    ----------
    images
        ``[n, …]``, of which the two longest axes are height and width.
    noise
        Standard deviation, as a share of white.
    cutout
        Side of the square, as a share of the shorter side.
    """
    shape = list(images.shape[1:])
    height, width = sorted(sorted(range(len(shape)), key=lambda axis: -shape[axis])[:2])
    side = round(cutout * min(shape[height], shape[width]))
    noisy = torch.randn(images.shape).mul_(255 * noise).add_(images).clamp_(0, 255)
    inside = torch.ones((), dtype=torch.bool)
    for axis in (height, width):
        first = torch.randint(shape[axis] - side + 1, (len(images), 1))
        along = torch.arange(shape[axis])
        others = [1] * len(shape)
        others[axis] = shape[axis]
        inside = inside & ((along >= first) & (along < first + side)).view(-1, *others)
    return noisy.masked_fill_(inside, 0).to(torch.uint8)
