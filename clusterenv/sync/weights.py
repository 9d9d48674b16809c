"""Weights as one contiguous buffer and a manifest, without pickling."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from clusterenv.data.buffer_pool import BufferPool
from clusterenv.errors import ConfigError, Diverged

__all__ = [
    "TensorManifest",
    "Weights",
    "assign_views",
    "check_numbers",
    "holds",
    "load",
    "manifest_of",
    "pack",
    "tensors",
]

_ALIGN = 64


@dataclass(frozen=True)
class _Entry:
    """Name, dtype, shape and place in the buffer of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorManifest:
    """The tensors of a module, in the order of its ``state_dict``."""

    entries: tuple[_Entry, ...]
    nbytes: int


@dataclass(frozen=True)
class Weights:
    """A version's tensors in one buffer, which must not change."""

    version: int
    buffer: npt.NDArray[np.uint8]

    @functools.cached_property
    def digest(self) -> int:
        """CRC-32 of the buffer, which is sent with it and compared on arrival.

        It detects damage in transit, and no more is needed: both ends know the token of the
        connection. A cryptographic digest takes several times as long.
        """
        return zlib.crc32(self.buffer.data)


def manifest_of(module: nn.Module) -> TensorManifest:
    """Describe the tensors of a module, parameters and buffers."""
    entries = []
    offset = 0
    for name, tensor in _state(module).items():
        nbytes = tensor.numel() * tensor.element_size()
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append(_Entry(name, dtype, tuple(tensor.shape), offset, nbytes))
        offset += -(-nbytes // _ALIGN) * _ALIGN
    return TensorManifest(tuple(entries), offset)


def pack(module: nn.Module, manifest: TensorManifest, version: int, pool: BufferPool) -> Weights:
    """Copy a module's tensors into one buffer from a pool.

    Raises ``ConfigError`` if the module's tensors do not match the manifest.
    """
    state = _state(module)
    _check(manifest_of(module), manifest)
    buffer = pool.empty((manifest.nbytes,), np.dtype(np.uint8))
    with torch.no_grad():
        for entry, view in _views(manifest, buffer):
            view.copy_(state[entry.name])
            end = entry.offset + entry.nbytes
            buffer[end : end + -entry.nbytes % _ALIGN] = 0
    return Weights(version, buffer)


def tensors(manifest: TensorManifest, weights: Weights) -> dict[str, Tensor]:
    """Return a buffer's tensors by name, as views."""
    return {entry.name: view for entry, view in _views(manifest, weights.buffer)}


def holds(module: nn.Module, given: Mapping[str, Tensor]) -> bool:
    """Whether a module's tensors equal the given ones exactly."""
    state = _state(module)
    return state.keys() == given.keys() and all(
        tensor.dtype == given[name].dtype and torch.equal(tensor.cpu(), given[name])
        for name, tensor in state.items()
    )


def load(module: nn.Module, manifest: TensorManifest, weights: Weights) -> None:
    """Copy a buffer's tensors into a module."""
    state = _state(module)
    with torch.inference_mode():  # tensors that a policy created while acting need it
        for entry, view in _views(manifest, weights.buffer):
            state[entry.name].copy_(view)


def assign_views(module: nn.Module, manifest: TensorManifest, weights: Weights) -> None:
    """Replace a module's tensors by views of a buffer, without a copy.

    Other references to the module's old tensors, such as an optimizer's, are not updated.
    """
    module.load_state_dict(tensors(manifest, weights), strict=False, assign=True)


def _check(given: TensorManifest, expected: TensorManifest) -> None:
    """Raise unless two manifests describe the same tensors; name the first that differs."""
    ours, theirs = (
        {entry.name: f"{entry.dtype}{list(entry.shape)}" for entry in manifest.entries}
        for manifest in (expected, given)
    )
    for name in [*ours, *theirs]:
        was, now = ours.get(name, "missing"), theirs.get(name, "missing")
        if was != now:
            raise ConfigError(
                f"the policy's {name!r} is {now}, and was {was} at first; publish the "
                "policy that the run began with, or a copy of it: collector.publish(policy)"
            )


def check_numbers(module: nn.Module, version: int) -> None:
    """Raise if a parameter or buffer holds NaN."""
    with torch.no_grad():
        for name, tensor in _state(module).items():
            # The sum is NaN if a number is, and takes a tenth of the time.
            if tensor.is_floating_point() and tensor.sum().isnan() and tensor.isnan().any():
                raise Diverged(
                    f"the policy's {name!r} holds NaN: the learner has diverged, and the workers "
                    f"go on with version {version}. Try a smaller learning rate, clipped "
                    "gradients, or a check of the loss"
                )


def _views(
    manifest: TensorManifest, buffer: npt.NDArray[np.uint8]
) -> Iterator[tuple[_Entry, Tensor]]:
    whole = torch.from_numpy(buffer)
    for entry in manifest.entries:
        part = whole[entry.offset : entry.offset + entry.nbytes]
        yield entry, part.view(getattr(torch, entry.dtype)).reshape(entry.shape)


def _state(module: nn.Module) -> Mapping[str, Tensor]:
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
