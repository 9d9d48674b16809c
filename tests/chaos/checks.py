"""What must hold of the rows of a run, whatever happened to it: by their provenance alone."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import clusterenv

__all__ = ["Account", "check_rows"]


class Account(NamedTuple):
    """What a dataset holds."""

    rows: int
    episodes: int
    incarnations: int


def check_rows(dataset: Path) -> Account:
    """Raise unless every row is there once, in episodes without a gap, none across a crash."""
    keys = ["run", "shard", "incarnation", "env", "episode"]
    columns = [*keys, "step", "obs", "terminated", "truncated"]
    arrow = clusterenv.open_dataset(dataset).to_table(columns=columns)
    lists = arrow["obs"].combine_chunks()
    obs = getattr(lists, "storage", lists).flatten().to_numpy().reshape(len(arrow), -1)
    table = arrow.drop_columns(["obs"]).to_pandas()
    assert not table.duplicated([*keys, "step"]).any(), "a row is there twice"
    table["mark"], table["count"] = obs[:, 0], obs[:, 1]
    assert (table["count"] == table["step"]).all(), "a row is not what it says"
    table = table.sort_values([*keys, "step"], kind="stable")
    groups = table.groupby(keys, sort=False)
    first, size, last = groups["step"].min(), groups.size(), groups["step"].max()
    assert (last - first + 1 == size).all(), "an episode has a gap"
    assert (groups["mark"].nunique() == 1).all(), "an episode is of two streams"
    # An episode begins with its first step, unless the store had been given its end alone.
    assert (first == 0).all(), "an episode has no beginning"
    over = table["terminated"] | table["truncated"]
    inner = over & (table["step"] < groups["step"].transform("max"))
    assert not inner.any(), "an episode goes on after its end"
    marks = groups["mark"].first()
    assert marks.duplicated().mean() < 0.001, "a stream is repeated"
    return Account(len(table), len(size), len(table[keys[:3]].drop_duplicates()))
