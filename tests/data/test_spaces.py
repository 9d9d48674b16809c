"""Spaces as columns, without any cluster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compare import assert_same
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from worlds import SPACES

from clusterenv.data.spaces import Layout


@pytest.mark.parametrize("name", SPACES)
def test_written_columns_nest_to_what_gymnasium_concatenates(name: str) -> None:
    space = SPACES[name]
    space.seed(3)
    values = [space.sample() for _ in range(4)]
    layout = Layout(space)
    columns = layout.empty(4)
    for row, value in enumerate(values):
        layout.write(columns, row, value)
    assert_same(
        layout.nest(columns), concatenate(space, values, create_empty_array(space, 4, np.zeros))
    )


@pytest.mark.parametrize("name", SPACES)
def test_columns_of_a_batch_iterate_as_gymnasium_does(name: str) -> None:
    batched = batch_space(SPACES[name], 3)
    batched.seed(4)
    batch = batched.sample()
    layout = Layout(SPACES[name])
    ours = list(layout.rows(layout.columns(batch, 3)))
    for mine, theirs in zip(ours, iterate(batched, batch), strict=True):
        assert_same(mine, dict(theirs) if isinstance(theirs, dict) else theirs)


def test_leaves_are_named_by_their_path() -> None:
    names = [leaf.name("obs") for leaf in Layout(SPACES["nested"]).leaves]
    assert names == ["obs.a.0", "obs.a.1.b", "obs.c"]
    assert [leaf.name("obs") for leaf in Layout(SPACES["box"]).leaves] == ["obs"]


def test_text_is_left_out_of_what_is_made_of_arrays() -> None:
    space = spaces.Dict(
        z=spaces.Tuple([spaces.Text(3), spaces.Discrete(2)]),
        a=spaces.Dict(word=spaces.Text(3)),
        b=spaces.Box(0, 1, (2,)),
    )
    layout = Layout(space)
    columns = layout.empty(2)
    layout.write(columns, 0, {"z": ("one", 1), "a": {"word": "two"}, "b": np.ones(2)})
    names = [leaf.name("obs") for leaf in layout.leaves]
    assert [names[k] for k in layout.objects] == ["obs.z.0", "obs.a.word"]
    assert [leaf.is_text for leaf in layout.leaves] == [True, False, True, False]
    nested = layout.nest_arrays([columns[k] for k in layout.arrays])
    assert (list(nested), nested["a"]) == (["z", "a", "b"], {})
    assert nested["b"] is columns[names.index("obs.b")]
    assert nested["z"] == (columns[names.index("obs.z.1")],)
    value = layout.value(column[0] for column in columns)
    assert value["z"] == ("one", 1)
    assert value["a"] == {"word": "two"}


@pytest.mark.parametrize("value", [np.zeros(1, np.float32), np.float32(0), [0.0], np.zeros((3, 1))])
def test_a_value_of_another_shape_is_refused_not_broadcast(value: Any) -> None:
    layout = Layout(SPACES["box"])
    with pytest.raises(ValueError, match=r"the observation space says \(3,\)"):
        layout.write(layout.empty(2), 0, value)


def test_values_that_would_be_cut_to_fit_are_refused() -> None:
    layout = Layout(spaces.Box(0, 255, (2,), np.uint8))
    with pytest.raises(ValueError, match="dtype float64, but the observation space says uint8"):
        layout.write(layout.empty(1), 0, np.array([0.7, 300.5]))


def test_a_leaf_of_another_shape_is_named() -> None:
    layout = Layout(SPACES["dict"])
    value = {"camera": np.zeros((4, 5), np.uint8), "lives": 1}
    with pytest.raises(ValueError, match=r"observation.camera has shape \(4, 5\)"):
        layout.write(layout.empty(2), 0, value)


def test_integers_may_stand_for_floats_but_not_the_other_way() -> None:
    box = Layout(spaces.Box(-1, 1, (1,), np.float32))
    assert box.columns(np.zeros((2, 1), np.int64), 2)[0].dtype == np.int64
    with pytest.raises(TypeError, match="dtype int64, got float32"):
        Layout(spaces.Discrete(3)).columns(np.zeros(2, np.float32), 2)
