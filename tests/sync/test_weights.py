"""Weights as one buffer: nothing lost on the way, nothing unpickled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from clusterenv.data.buffer_pool import BufferPool
from clusterenv.errors import ConfigError
from clusterenv.sync.weights import Weights, assign_views, load, manifest_of, pack


def module(width: int = 3) -> nn.Module:
    net = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 1).double())
    net.register_buffer("flags", torch.tensor([True, False]))
    net.register_buffer("empty", torch.zeros(0, 4))
    return net


def test_all_tensors_come_back_buffers_and_dtypes_included() -> None:
    ours, theirs = module(), module()
    manifest = manifest_of(ours)
    weights = pack(ours, manifest, 5, BufferPool())
    load(theirs, manifest, weights)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name
    assert weights.version == 5
    assert weights.buffer.nbytes == manifest.nbytes


def test_equal_weights_have_equal_digests() -> None:
    net = module()
    manifest = manifest_of(net)
    first = pack(net, manifest, 1, BufferPool())
    assert pack(net, manifest, 2, BufferPool()).digest == first.digest
    with torch.no_grad():
        net[0].weight[0, 0] += 1e-6  # type: ignore[index,operator]
    assert pack(net, manifest, 3, BufferPool()).digest != first.digest


def test_a_module_that_does_not_match_is_named_by_its_first_difference() -> None:
    manifest = manifest_of(module())
    with pytest.raises(
        ConfigError, match=r"'0.weight' is float32\[4, 2\], and was float32\[3, 2\]"
    ):
        pack(module(4), manifest, 1, BufferPool())
    with pytest.raises(ConfigError, match=r"'flags' is missing"):
        pack(nn.Sequential(*module()), manifest, 1, BufferPool())  # type: ignore[misc]


def test_a_damaged_buffer_has_another_digest() -> None:
    weights = pack(module(), manifest_of(module()), 1, BufferPool())
    damaged = weights.buffer.copy()
    damaged[0] ^= 1
    assert Weights(1, damaged).digest != weights.digest


def test_a_policy_without_weights_has_an_empty_buffer() -> None:
    net = nn.Identity()
    manifest = manifest_of(net)
    weights = pack(net, manifest, 1, BufferPool())
    assert weights.buffer.shape == (0,)
    load(net, manifest, weights)
    assert weights.buffer.dtype == np.uint8


def test_assigned_tensors_are_views_of_the_buffer() -> None:
    """An LSTM keeps a list of its tensors of its own, which has to follow."""
    torch.manual_seed(0)
    ours, theirs = nn.LSTM(3, 4), nn.LSTM(3, 4)
    manifest = manifest_of(ours)
    weights = pack(ours, manifest, 1, BufferPool())
    assign_views(theirs, manifest, weights)
    start = weights.buffer.ctypes.data
    for parameter in theirs.parameters():
        assert start <= parameter.data_ptr() < start + weights.buffer.nbytes
    obs = torch.randn(5, 2, 3)
    with torch.no_grad():
        assert torch.equal(ours(obs)[0], theirs(obs)[0])
