"""Which rows a sampler draws, how often, and what it gathers of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from batches import Fleet, Frames, Row, TwoLeaves, all_of, changed, fill, observations, same
from stores import n_step

from clusterenv import Batch
from clusterenv.errors import ConfigError, EmptyStore
from clusterenv.store import (
    Draw,
    NStep,
    Prioritized,
    Recent,
    ReplayStore,
    Sampler,
    Sequences,
    Stack,
    Uniform,
)
from clusterenv.store.table.ring import Ring
from clusterenv.store.table.slots import Block


def squared_deviation(counts: np.ndarray, expected: np.ndarray) -> float:
    """Chi square, per degree of freedom; about 1 where the expectation is right."""
    return float(((counts - expected) ** 2 / expected).sum() / (len(counts) - 1))


# Uniform


def test_uniform_draws_every_row_alike() -> None:
    store = ReplayStore(70, seed=1)
    fill(store, Fleet(), 12)
    first = store.stats.evicted_rows
    drawn = np.concatenate([store.sample(500)["indices"] for _ in range(40)])
    counts = np.bincount(drawn - first, minlength=len(store))
    assert len(counts) == len(store) < 144
    assert squared_deviation(counts, np.full(len(counts), 20_000 / len(counts))) < 1.6


def test_without_replacement_no_row_is_there_twice() -> None:
    store = ReplayStore(70, sampler=Uniform(replace=False), seed=1)
    fill(store, Fleet(), 5)
    sample = store.sample(60)
    assert sorted(sample["indices"].tolist()) == list(range(60))
    assert len(set(store.sample(30)["indices"].tolist())) == 30


def test_more_rows_than_there_are_without_replacement_names_the_number() -> None:
    store = ReplayStore(70, sampler=Uniform(replace=False))
    fill(store, Fleet(), 2)
    with pytest.raises(EmptyStore, match=r"sample\(25\).*holds 24 rows: sample\(24\)"):
        store.sample(25)


def test_a_seed_repeats_and_another_differs() -> None:
    stores = [ReplayStore(70, seed=seed) for seed in (3, 3, 4)]
    for store in stores:
        fill(store, Fleet(), 5)
    drawn = [store.sample(50)["indices"].tolist() for store in stores]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_sample_may_be_tensors() -> None:
    store = ReplayStore(70)
    fill(store, Fleet(TwoLeaves()), 5)
    sample = store.sample(8, tensors=True)
    assert all(isinstance(value, torch.Tensor) for value in sample.values())
    assert sample["obs.a"].shape == (8, 2)
    assert sample["terminated"].dtype == torch.bool
    assert sample["weights"].tolist() == [1.0] * 8


def test_uniform_has_no_priorities_and_says_who_has() -> None:
    store = ReplayStore(70)
    fill(store, Fleet(), 1)
    with pytest.raises(ConfigError, match=r"Uniform has no priorities.*sampler=Prioritized\(\)"):
        store.update_priorities([0], [1.0])


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(), NStep(2, 0.9), Sequences(2)])
def test_the_number_of_rows_is_required(sampler: Sampler) -> None:
    store = ReplayStore(70, sampler=sampler)
    fill(store, Fleet(), 1)
    with pytest.raises(ConfigError, match=r"needs the number of rows: store\.sample\(256\)"):
        store.sample()


def test_a_sampler_serves_one_store() -> None:
    sampler = Prioritized()
    fill(ReplayStore(70, sampler=sampler), Fleet(), 1)
    with pytest.raises(ConfigError, match="sampler of another store"):
        fill(ReplayStore(70, sampler=sampler), Fleet(), 1)


# Prioritized


def prioritized(rows: int = 48, capacity: int = 60, **options: Any) -> ReplayStore:
    store = ReplayStore(capacity, sampler=Prioritized(**options), seed=2)
    fill(store, Fleet(), rows // 12)
    return store


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_rows_are_drawn_in_proportion_to_the_power_of_their_priorities(alpha: float) -> None:
    store = prioritized(rows=120, alpha=alpha)
    first = store.stats.evicted_rows
    errors = np.random.default_rng(0).random(len(store)) * 5
    store.update_priorities(np.arange(first, first + len(store)), errors)
    drawn = np.concatenate([store.sample(100)["indices"] for _ in range(200)])
    counts = np.bincount(drawn - first, minlength=len(store))
    powers = (errors + 1e-6) ** alpha
    assert squared_deviation(counts, 20_000 * powers / powers.sum()) < 1.6


def test_weights_are_those_of_the_paper() -> None:
    store = prioritized(alpha=0.7, beta=0.5)
    errors = np.linspace(0.1, 4, 48)
    store.update_priorities(np.arange(48), errors)
    sample = store.sample(32)
    share = (errors + 1e-6) ** 0.7
    share /= share.sum()
    expected = (48 * share[sample["indices"]]) ** -0.5
    np.testing.assert_allclose(sample["weights"], expected / expected.max(), rtol=1e-5)
    assert sample["weights"].dtype == np.float32


def test_beta_may_change_while_learning() -> None:
    sampler = Prioritized(beta=0.4)
    store = ReplayStore(60, sampler=sampler)
    fill(store, Fleet(), 4)
    store.update_priorities(np.arange(48), np.linspace(0, 1, 48))
    sampler.beta = 0.0
    assert store.sample(32)["weights"].tolist() == [1.0] * 32


def test_of_an_index_that_is_updated_twice_the_later_counts() -> None:
    store = prioritized(alpha=1.0)
    store.update_priorities(np.arange(48), np.zeros(48))
    store.update_priorities([5, 9, 5], [0.0, 100.0, 300.0])
    drawn = Counter(store.sample(400)["indices"].tolist())
    assert drawn.keys() == {5, 9}
    assert abs(drawn[5] - 300) <= 2


def test_priorities_of_rows_that_left_are_ignored() -> None:
    fleet = Fleet(shards=1, envs=2, horizon=6)
    store = ReplayStore(24, sampler=Prioritized(alpha=1.0), seed=0)
    fill(store, fleet, 2)
    indices = np.arange(24)
    fill(store, fleet, 1)  # the first twelve leave, and their slots have other rows
    store.update_priorities(indices, np.where(indices < 12, 1e9, 1.0))
    assert store.sampler.state()["largest"].item() == pytest.approx(1.0)
    drawn = np.bincount(store.sample(2400)["indices"], minlength=36)
    assert not drawn[:12].any()
    assert (abs(drawn[12:] - 100) <= 2).all()


def test_a_new_row_has_the_largest_priority_so_far() -> None:
    fleet = Fleet()
    store = ReplayStore(60, sampler=Prioritized(alpha=1.0, epsilon=1e-9), seed=2)
    fill(store, fleet, 1)
    store.update_priorities(np.arange(12), np.arange(12) / 2)  # the largest is 5.5
    store.update_priorities([11], [0.0])
    fill(store, fleet, 1)
    total = np.arange(11).sum() / 2 + 12 * 5.5
    drawn = np.bincount(store.sample(10_000)["indices"], minlength=24)
    np.testing.assert_allclose(drawn[12:], 10_000 * 5.5 / total, atol=2.1)


def test_rows_come_with_their_own_priorities_if_the_batch_has_them() -> None:
    fleet = Fleet(priority=True)
    store = ReplayStore(60, sampler=Prioritized(alpha=1.0), seed=2)
    rows = fill(store, fleet, 9)
    first = store.stats.evicted_rows
    wanted = np.array([abs(row.reward) + 1e-6 for row in rows[first:]])
    drawn = np.bincount(store.sample(20_000)["indices"] - first, minlength=len(wanted))
    np.testing.assert_allclose(drawn, 20_000 * wanted / wanted.sum(), atol=2.1)


@pytest.mark.parametrize("seed", range(4))
def test_only_rows_that_are_there_are_drawn_whatever_leaves(seed: int) -> None:
    rng = np.random.default_rng(seed)
    store = ReplayStore(41, sampler=Prioritized(alpha=1.0), seed=seed, side=1.0)
    fleets = [Fleet(seed=seed, shards=1, envs=envs) for envs in (1, 4, 3)]
    for _ in range(80):
        store.add(fleets[int(rng.integers(3))].next(0, horizon=int(rng.integers(1, 6)))[0])
        stats = store.stats
        drawn = store.sample(64)["indices"]
        assert drawn.min() >= stats.evicted_rows
        assert drawn.max() < stats.added_rows
        store.update_priorities(drawn, rng.random(64))
        powers = store.sampler.state()["powers"]
        tree = store.sampler._tree  # type: ignore[attr-defined]
        np.testing.assert_allclose(tree.total, powers.sum())
        assert np.count_nonzero(tree.leaves) == len(store)


def test_priorities_may_be_tensors_of_a_loss() -> None:
    store = prioritized()
    sample = store.sample(8, tensors=True)
    error = torch.ones(8, requires_grad=True) * 2
    store.update_priorities(sample["indices"], error.abs())
    assert store.sampler.state()["largest"].item() == pytest.approx(2)


@pytest.mark.parametrize(
    ("indices", "priorities", "message"),
    [
        ([0, 1], [1.0, -0.5], r"priorities\[1\] is -0\.5.*error\.abs\(\)"),
        ([0, 1], [float("nan"), 1], r"priorities\[0\] is nan.*error\.abs\(\)"),
        ([0, 1], [float("inf"), 1], r"priorities\[0\] is inf.*error\.abs\(\)"),
        ([0, 1], [1.0], r"\(2,\) indices and \(1,\) priorities.*sample\['indices'\]"),
        ([[0], [1]], [[1.0], [1.0]], r"\(2, 1\) indices"),
        ([0, 48], [1.0, 1.0], r"from 0 to 47, got \[ 0 48\]"),
        ([-1, 3], [1.0, 1.0], r"from 0 to 47"),
        ([0.5, 3], [1.0, 1.0], r"from 0 to 47"),
    ],
)
def test_priorities_that_are_none_are_refused_and_change_nothing(
    indices: Any, priorities: Any, message: str
) -> None:
    store = prioritized()
    before = store.sampler.state()
    with pytest.raises(ConfigError, match=message):
        store.update_priorities(indices, priorities)
    same(store.sampler.state(), before)


def test_a_batch_with_a_priority_that_is_none_is_refused_and_changes_nothing() -> None:
    fleet = Fleet(priority=True)
    store = ReplayStore(20, sampler=Prioritized(), seed=2)
    fill(store, fleet, 3)
    before, rows = store.sampler.state(), store.stats
    batch = fleet.next()[0]
    values = batch.flat("priority").copy()
    values[7] = np.nan
    with pytest.raises(ConfigError, match=r"'priority'\[7\] is nan"):
        store.add(changed(batch, priority=values))
    same(store.sampler.state(), before)
    assert store.stats == rows


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": -0.1}, r"alpha must be a number, .*got -0\.1: .*Prioritized\(alpha=0\.6\)"),
        ({"alpha": 1.5}, r"alpha must be a number, .*got 1\.5: "),
        ({"alpha": float("nan")}, r"alpha must be a number, .*got nan: "),
        ({"beta": -1}, r"beta must be a number, .*got -1: .*Prioritized\(beta=0\.4\)"),
        ({"beta": 1.01}, r"beta must be a number, .*got 1\.01: "),
        ({"epsilon": 0}, r"epsilon must be a number, .*got 0: .*Prioritized\(epsilon=1e-6\)"),
        ({"epsilon": float("inf")}, r"epsilon must be a number, .*got inf: "),
        ({"alpha": "a"}, r"alpha must be a number, .*got 'a': .*Prioritized\(alpha=0\.6\)"),
        ({"beta": None}, r"beta must be a number, .*got None: .*Prioritized\(beta=0\.4\)"),
        (
            {"epsilon": "1e-6"},
            r"epsilon must be a number, .*got '1e-6': .*Prioritized\(epsilon=1e-6\)",
        ),
    ],
)
def test_settings_of_priorities_outside_their_range_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Prioritized(**settings)


# NStep


@pytest.mark.parametrize("tracks", [False, True])
@pytest.mark.parametrize("n", range(1, 6))
def test_returns_of_n_steps_are_those_of_brute_force(n: int, tracks: bool) -> None:
    fleet = Fleet(seed=n, envs=3, horizon=4, episode=8, tracks=tracks)
    sampler = NStep(n, 0.9, Uniform(replace=False))
    store, added = ReplayStore(67, sampler=sampler), []
    for turn in range(30):
        if turn % 7 == 6:
            fleet.restart(turn % 2)
        batch, rows = fleet.next()
        if turn % 5 == 4:
            continue  # a fragment that never arrived
        store.add(batch)
        added += rows
        there = added[-len(store) :]
        found = all_of(store)
        expected = [n_step(there, at, n, 0.9) for at in range(len(there))]
        last = [row for _, row, _ in expected]
        np.testing.assert_allclose(found["reward"], [total for total, _, _ in expected], 1e-5, 1e-6)
        np.testing.assert_allclose(found["discount"], [0.9**k for _, _, k in expected], 1e-6)
        assert found["terminated"].tolist() == [row.terminated for row in last]
        assert found["truncated"].tolist() == [row.truncated for row in last]
        same({"obs": found["next_obs"]}, observations(last, fleet.content, 1))
        same(found, observations(there, fleet.content))
    assert any(k == n for _, _, k in expected)


def test_returns_of_n_steps_work_on_priorities() -> None:
    store = ReplayStore(60, sampler=NStep(3, 0.9, Prioritized(alpha=1.0)), seed=0)
    fill(store, Fleet(), 4)
    store.update_priorities(np.arange(48), np.where(np.arange(48) == 7, 1.0, 0.0))
    assert set(store.sample(50)["indices"].tolist()) == {7}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NStep(0, 0.9), r"n must be .*got 0: NStep\(3, gamma=0\.99\)"),
        (lambda: NStep(2.5, 0.9), r"n must be .*got 2\.5"),  # type: ignore[arg-type]
        (lambda: NStep(3, 1.1), r"gamma must be a number, .*got 1\.1: .*NStep\(3, gamma=0\.99\)"),
        (lambda: NStep(3, float("nan")), r"gamma must be a number, .*got nan: "),
        (lambda: NStep(3, 0.9, Recent(1, 1)), r"base=Recent.*base=Prioritized\(\)"),  # type: ignore[arg-type]
        (lambda: Sequences(0), r"length must be .*got 0: Sequences\(80, burn_in=40, overlap=40\)"),
        (lambda: Sequences(4, burn_in=-1), r"burn_in must be .*got -1"),
        (lambda: Sequences(4, overlap=4), r"overlap must be .*at most 3 .*got 4"),
        (lambda: Sequences(10**9), r"length must be .*at most 65,536, got 1000000000"),
        (lambda: Uniform(replace="no"), r"replace must be True or False, got 'no'"),  # type: ignore[arg-type]
        (lambda: Sequences(4, base=Uniform()), r"base=Uniform.*base=Prioritized\(\)"),  # type: ignore[arg-type]
        (lambda: Recent(0, 1), r"n must be .*got 0: Recent\(4, uses=2\)"),
        (lambda: Recent(2, 0), r"uses must be .*got 0"),
        (
            lambda: NStep(3, "0.9"),
            r"gamma must be a number, .*got '0\.9': .*NStep\(3, gamma=0\.99\)",
        ),  # type: ignore[arg-type]
        (lambda: Sequences("80"), r"length must be .*got '80': Sequences\(80, "),  # type: ignore[arg-type]
        (lambda: Recent("4", 2), r"n must be .*got '4': Recent\(4, uses=2\)"),  # type: ignore[arg-type]
        (lambda: Stack("4"), r"stack='4' .*stack=4"),  # type: ignore[arg-type]
        (lambda: Stack(4, axis="last"), r"axis='last' .*Stack\(4, axis=-1\)"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# Sequences


def sequence(rows: list[Row], at: int, total: int) -> list[Row]:
    """Return the rows that follow each other in the episode."""
    there = {row.key: row for row in rows}
    chain = [rows[at]]
    while len(chain) < total and chain[-1].after in there:
        chain.append(there[chain[-1].after])
    return chain


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("priority", [False, True])
@pytest.mark.parametrize("tracks", [False, True])
@pytest.mark.parametrize(("length", "burn_in", "overlap"), [(4, 0, 0), (4, 2, 2), (3, 3, 2)])
def test_sequences_stay_in_their_episode_and_begin_where_they_should(
    length: int, burn_in: int, overlap: int, tracks: bool, priority: bool, state: bool
) -> None:
    total, period = length + burn_in, length + burn_in - overlap
    fleet = Fleet(
        seed=length, shards=2, envs=3, horizon=period, episode=9, tracks=tracks, state=state
    )
    base = Prioritized() if priority else None
    store = ReplayStore(150, sampler=Sequences(length, burn_in, overlap, base), seed=1)
    added: list[Row] = []
    firsts: set[int] = set()  # rows of a fragment's first time row
    for turn in range(40):
        if turn % 9 == 8:
            fleet.restart(turn % 2)
        batch, rows = fleet.next()
        firsts |= set(range(len(added), len(added) + 3))
        store.add(batch)
        added += rows
        if turn < 6 or turn % 6:
            continue
        gone = len(added) - len(store)
        there = added[gone:]
        sample = store.sample(20, columns=("env", "episode", "step"))
        assert sample["obs"].shape == (20, total, 6)
        assert sample["mask"].shape == (20, total)
        for i, number in enumerate(sample["indices"].tolist()):
            row = added[number]
            begins = row.step == 0 or number in firsts if state else row.step % period == 0
            assert begins
            chain = sequence(there, number - gone, total)
            assert len(chain) == total or chain[-1].terminated or chain[-1].truncated
            assert sample["mask"][i].tolist() == [k < len(chain) for k in range(total)]
            part = {name: column[i, : len(chain)] for name, column in sample.items()
                    if name not in ("indices", "weights", "state.h")}  # fmt: skip
            same(part, observations(chain, fleet.content))
            same({"obs": part["next_obs"]}, observations(chain, fleet.content, 1))
            assert part["step"].tolist() == [row.step for row in chain]
            assert not sample["obs"][i, len(chain) :].any()
            assert not sample["reward"][i, len(chain) :].any()
            learn = [k >= burn_in or not row.step for k in range(len(chain))]
            assert sample["learn"][i, : len(chain)].tolist() == learn
            assert not sample["learn"][i, len(chain) :].any()
            if state:
                assert sample["state.h"][i].tolist() == row.state().tolist()
    if state:
        assert sample["state.h"].any()


def test_all_complete_sequences_are_drawn_and_no_other() -> None:
    fleet = Fleet(shards=1, envs=3, horizon=5, episode=12)
    store = ReplayStore(200, sampler=Sequences(4, overlap=1), seed=0)
    rows = fill(store, fleet, 12)
    expected = set()
    for at, row in enumerate(rows):
        chain = sequence(rows, at, 4)
        ended = chain[-1].terminated or chain[-1].truncated
        if row.step % 3 == 0 and (len(chain) == 4 or ended):
            expected.add(at)
    assert set(store.sample(3000)["indices"].tolist()) == expected


def test_sequences_by_priority_are_drawn_by_priority_even_one_at_a_time() -> None:
    fleet = Fleet(shards=1, envs=3, horizon=4, episode=1e9)
    store = ReplayStore(200, sampler=Sequences(8, base=Prioritized(alpha=1.0)), seed=0)
    fill(store, fleet, 3)  # beginnings are rows 0 to 2, complete, and 24 to 26, not complete
    store.update_priorities([0, 1, 2], [0.0, 0.0, 1e-3])
    drawn = [int(store.sample(1)["indices"][0]) for _ in range(50)]
    assert set(drawn) <= {0, 1, 2}
    assert Counter(drawn)[2] > 45


def test_a_store_without_a_complete_sequence_says_so() -> None:
    for base, priority in ((None, False), (Prioritized(), False), (Prioritized(), True)):
        store = ReplayStore(200, sampler=Sequences(80, base=base))
        fill(store, Fleet(episode=1e9, priority=priority), 2)
        with pytest.raises(EmptyStore, match=r"no sequence of 80 rows is complete yet.*add more"):
            store.sample(2)


def test_sequences_of_a_recurrent_policy_ask_for_the_right_horizon_before_any_row_is_in() -> None:
    store = ReplayStore(200, sampler=Sequences(8, burn_in=2, overlap=2))
    with pytest.raises(ConfigError, match=r"every 8 rows.*every 4: Collector\(\.\.\., horizon=8\)"):
        store.add(Fleet(state=True).next()[0])
    assert len(store) == 0


def test_a_sequence_gets_its_priority_from_its_rows_when_it_is_complete() -> None:
    fleet = Fleet(seed=1, shards=2, envs=3, horizon=4, episode=9, state=True, priority=True)
    base = Prioritized(alpha=1.0, epsilon=1e-9)
    store = ReplayStore(120, sampler=Sequences(4, burn_in=2, overlap=2, base=base), seed=0)
    rows: list[Row] = []
    seen = set()
    for _ in range(25):
        batch, more = fleet.next()
        store.add(batch)
        rows += more
        gone = len(rows) - len(store)
        powers = base.state()["powers"]
        for number in range(gone, len(rows)):
            row = rows[number]
            chain = sequence(rows, number, 6)
            begins = row.step == 0 or number % 12 < 3
            ended = chain[-1].terminated or chain[-1].truncated
            if not begins or not (len(chain) == 6 or ended):
                assert powers[number - gone] == 0
                continue
            errors = [abs(each.reward) for each in (chain if row.step == 0 else chain[2:])]
            mean = sum(errors) / max(1, len(errors))
            expected = 0.9 * max(errors, default=0) + 0.1 * mean
            assert powers[number - gone] == pytest.approx(expected, abs=1e-6)
            seen.add((bool(row.step), len(chain) == 6))
    assert len(seen) == 4  # whole and padded, at the start of an episode and later
    drawn = set(store.sample(2_000)["indices"].tolist())
    assert all(powers[number - gone] for number in drawn)


@pytest.mark.parametrize("cut", [3, 11])
def test_priorities_of_incomplete_sequences_are_made_after_a_restart_too(
    tmp_path: Any, cut: int
) -> None:
    fleet = Fleet(seed=2, shards=1, envs=3, horizon=4, episode=30, state=True, priority=True)
    batches = [fleet.next()[0] for _ in range(14)]

    def sampler() -> Sequences:
        return Sequences(8, burn_in=2, overlap=6, base=Prioritized())

    def new(journal: Any) -> ReplayStore:
        return ReplayStore(90, sampler=sampler(), journal=journal, seed=0)

    whole = ReplayStore(90, sampler=sampler(), seed=0)
    for batch in batches:
        whole.add(batch)
    with new(tmp_path / "cut") as first:
        for batch in batches[:cut]:
            first.add(batch)
        first.commit()
    with new(tmp_path / "cut") as later:
        for batch in batches[cut:]:
            later.add(batch)
        same(later.sampler.state(), whole.sampler.state())


def test_bad_priorities_of_rows_are_refused_before_any_is_in() -> None:
    batch = Fleet(priority=True).next()[0]
    bad = batch.flat("priority").copy()
    bad[5] = -1.0
    store = ReplayStore(70, sampler=Sequences(4, base=Prioritized()))
    with pytest.raises(ConfigError, match=r"the column 'priority'\[5\] is -1\.0"):
        store.add(changed(batch, priority=bad))
    assert len(store) == 0


def test_sequences_that_are_longer_than_the_store_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"of 48 rows.*capacity=40: ReplayStore\(4_800, "):
        ReplayStore(40, sampler=Sequences(40, burn_in=8))
    assert ReplayStore(48, sampler=Sequences(40, burn_in=8)).capacity == 48


def test_a_state_of_one_number_per_environment_is_saved(tmp_path: Any) -> None:
    batch = Fleet(state=True, horizon=4).next()[0]
    state = {**batch.state, "last_reward": np.arange(3, dtype=np.float32)}
    with ReplayStore(70, sampler=Sequences(4), journal=tmp_path) as store:
        store.add(changed(batch, state=state))
        store.commit()
        before = store.sampler.state()
    for _ in range(2):  # what was loaded can be saved
        with ReplayStore(70, sampler=Sequences(4), journal=tmp_path) as again:
            assert again.sampler.state()["initial.last_reward"].shape == ()
            same(again.sampler.state(), before)
            again.commit(turn=len(again))


INITIAL = np.array([7, -8, 9], np.float32)


class Beginning(Fleet):
    """Shards whose policy begins an episode with a state that is not zero."""

    def batch(self, rows: Sequence[Row], num_envs: int | None = None, **more: Any) -> Batch:
        batch = super().batch(rows, num_envs, **more)
        for at, row in enumerate(rows[: batch.num_envs]):
            if row.step == 0:
                batch.state["h"][at] = INITIAL
        return batch


def check_states(store: ReplayStore, rows: list[Row]) -> int:
    """Check the state of each sequence; return how many begin an episode inside a fragment."""
    sample = store.sample(200)
    inside = 0
    for number, state in zip(sample["indices"].tolist(), sample["state.h"], strict=True):
        row = rows[number]
        assert state.tolist() == (row.state() if row.step else INITIAL).tolist()
        inside += row.step == 0 and number % 12 >= 3
    return inside


@pytest.mark.parametrize("base", [None, Prioritized], ids=["alike", "by priority"])
def test_sequences_that_begin_an_episode_have_the_policys_initial_state(
    base: Any, tmp_path: Any
) -> None:
    fleet = Beginning(state=True, episode=9)
    sampler = Sequences(4, base=base and base())
    store = ReplayStore(80, side=1.0, sampler=sampler, seed=0)
    rows = fill(store, fleet, 4)
    assert check_states(store, rows)
    later: list[Batch] = []
    while len(later) < 10:  # none of which begins with an episode
        batch, more = fleet.next()
        if batch.flat("step")[:3].all():
            later.append(batch)
            rows += more
    for batch in later:
        store.add(batch)
    assert store.stats.evicted_rows >= 48
    assert check_states(store, rows)
    store.save(tmp_path)
    loaded = ReplayStore.load(tmp_path)
    same(loaded.sampler.state(), store.sampler.state())
    assert check_states(loaded, rows)


def test_sequences_begin_with_zeros_as_long_as_no_fragment_began_with_an_episode() -> None:
    fleet = Beginning(state=True, episode=4, shards=1)
    store = ReplayStore(500, side=1.0, sampler=Sequences(4), seed=0)
    rows: list[Row] = []
    while len(rows) < 120:
        batch, more = fleet.next()
        if batch.flat("step")[:3].all():
            store.add(batch)
            rows += more
    sample = store.sample(200)
    begins = [rows[number].step == 0 for number in sample["indices"].tolist()]
    assert any(begins)
    assert not sample["state.h"][begins].any()
    while batch.flat("step")[:3].all():
        batch, more = fleet.next()
    store.add(batch)
    assert check_states(store, rows + more)


# Recent


def test_each_batch_is_handed_out_so_often_and_then_the_sampler_asks_for_more() -> None:
    fleet = Fleet(envs=3, horizon=4)
    store = ReplayStore(100, sampler=Recent(3, uses=2), seed=0)
    fill(store, fleet, 3)
    used = Counter(int(store.sample()["indices"][0]) for _ in range(6))
    assert used == {0: 2, 12: 2, 24: 2}
    with pytest.raises(EmptyStore, match=r"used 2 times; add one before sampling"):
        store.sample()
    fill(store, fleet, 1)
    assert store.sample()["indices"].tolist() == list(range(36, 48))


def test_when_there_are_too_many_the_oldest_batch_leaves_unused() -> None:
    fleet = Fleet(envs=3, horizon=4)
    store = ReplayStore(100, sampler=Recent(3, uses=1), seed=0)
    fill(store, fleet, 5)
    assert {int(store.sample()["indices"][0]) for _ in range(3)} == {24, 36, 48}


def test_a_batch_of_which_rows_have_left_is_not_handed_out() -> None:
    fleet = Fleet(envs=3, horizon=4)
    store = ReplayStore(30, sampler=Recent(9, uses=5), seed=0)
    fill(store, fleet, 3)
    assert {int(store.sample()["indices"][0]) for _ in range(10)} == {12, 24}


def test_recent_batches_have_the_shape_they_came_in() -> None:
    fleet = Fleet(TwoLeaves(), envs=3, horizon=4)
    store = ReplayStore(100, sampler=Recent(1, uses=9))
    batch, rows = fleet.next()
    store.add(batch)
    sample = store.sample(columns=("version",))
    same(sample, {name: batch[name] for name in (*batch.tail, "reward", "truncated", "version")})
    following = observations(rows, fleet.content, 1)
    np.testing.assert_array_equal(sample["next_obs.b"], following["obs.b"].reshape(4, 3, 2, 3))


def test_recent_does_not_cut_batches() -> None:
    store = ReplayStore(100, sampler=Recent(1, uses=9))
    fill(store, Fleet(), 1)
    with pytest.raises(ConfigError, match=r"whole batches of 12 rows, not 5: sample\(\)"):
        store.sample(5)
    assert len(store.sample(12)["indices"]) == 12


def test_recent_and_a_ratio_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"Recent counts the uses .*without ratio="):
        ReplayStore(100, sampler=Recent(1, uses=9), ratio=2)


# One's own


class Newest:
    """The newest rows, in order; nothing but the protocol."""

    def __init__(self, skip: int = 0) -> None:
        self.skip = skip
        self.blocks: list[int] = []

    def attach(self, ring: Ring) -> None:
        self.ring = ring

    def check(self, batch: Batch) -> None:
        if batch.shard > 7:
            raise ConfigError("no such shard")

    def added(self, block: Block, batch: Batch) -> None:
        self.blocks.append(block.end - block.start)

    def draw(self, n: int | None, rng: np.random.Generator) -> Draw:
        count = n or 4
        rows = np.arange(self.ring.end - count - self.skip, self.ring.end - self.skip)
        return Draw(rows, np.full(count, 0.5, np.float32))

    def gather(self, rows: np.ndarray, columns: tuple[str, ...]) -> dict[str, np.ndarray]:
        return {"reward": self.ring.columns["reward"][self.ring.slots(rows)]}

    def update(self, rows: np.ndarray, priorities: np.ndarray) -> None:
        self.skip = int(priorities[0])

    def settings(self) -> dict[str, Any]:
        return {"skip": self.skip}

    def state(self) -> dict[str, np.ndarray]:
        return {
            "blocks": np.array(self.blocks, np.int32),
            "grid": np.eye(2, dtype=np.bool_),
            "none": np.empty((0, 3), np.float16),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        self.blocks = state["blocks"].tolist()
        self.restored = dict(state)


def test_a_sampler_of_ones_own_needs_nothing_but_the_protocol(tmp_path: Any) -> None:
    sampler: Sampler = Newest()
    store = ReplayStore(100, sampler=sampler)
    rows = fill(store, Fleet(), 3)
    sample = store.sample(5)
    assert sample["reward"].tolist() == [row.reward for row in rows[-5:]]
    assert sample["weights"].tolist() == [0.5] * 5
    store.update_priorities([3], [2])
    assert store.sample()["indices"].tolist() == [30, 31, 32, 33]
    with pytest.raises(ConfigError, match="no such shard"):
        store.add(changed(Fleet().next()[0], shard=9))
    store.save(tmp_path)
    with pytest.raises(OSError, match=r"sampler 'Newest' of your own; pass it: .*Newest\(\.\.\.\)"):
        ReplayStore.load(tmp_path)
    own = Newest(skip=2)
    loaded = ReplayStore.load(tmp_path, sampler=own)
    same(own.restored, store.sampler.state())
    assert own.blocks == [12, 12, 12]
    assert loaded.sample()["indices"].tolist() == [30, 31, 32, 33]


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(), NStep(3, 0.9)], ids=str)
def test_stacks_come_out_of_every_sampler(sampler: Any) -> None:
    fleet = Fleet(Frames())
    store = ReplayStore(100, sampler=sampler, stack=4, seed=0)
    rows = fill(store, fleet, 6)
    sample = store.sample(20)
    same(sample, observations([rows[at] for at in sample["indices"]], fleet.content))
