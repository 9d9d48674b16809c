"""Advantages and next values, computed by hand."""

from __future__ import annotations

import pytest
import torch

from clusterenv.returns import discounted_sums, gae, next_values

GAMMA, LAM = 0.9, 0.8


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


def flags(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool).unsqueeze(1)


NEVER = flags(0, 0, 0)


def test_next_values_are_shifted_and_patched_at_the_tail() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    # Row 3 is (time 1, env 1); the last time step is always in the tail.
    following = next_values(values, torch.tensor([3, 4, 5]), torch.tensor([40.0, 50.0, 60.0]))
    assert following.tolist() == [[3, 4], [5, 40], [50, 60]]


def test_a_last_row_without_a_tail_value_shows() -> None:
    assert next_values(column(1, 2), torch.tensor([], dtype=torch.int64), torch.tensor([]))[
        1
    ].isnan()


def test_the_last_row_bootstraps() -> None:
    got = gae(column(1, 1, 1), column(2, 2, 2), column(2, 2, 5), NEVER, NEVER, GAMMA, LAM)
    last = 1 + 0.9 * 5 - 2
    middle = 1 + 0.9 * 2 - 2 + 0.72 * last
    first = 1 + 0.9 * 2 - 2 + 0.72 * middle
    torch.testing.assert_close(got, column(first, middle, last))


def test_termination_neither_bootstraps_nor_looks_past_the_end() -> None:
    got = gae(column(1, 1, 1), column(2, 2, 2), column(2, 99, 5), flags(0, 1, 0), NEVER, GAMMA, LAM)
    middle = 1 - 2
    first = 1 + 0.9 * 2 - 2 + 0.72 * middle
    torch.testing.assert_close(got, column(first, middle, 1 + 0.9 * 5 - 2))


def test_truncation_bootstraps_from_the_true_final_observation_only() -> None:
    # The value one row below, 2, is of the next episode; that of the final observation is 7.
    following = next_values(column(2, 2, 2), torch.tensor([1, 2]), torch.tensor([7.0, 5.0]))
    got = gae(column(1, 1, 1), column(2, 2, 2), following, NEVER, flags(0, 1, 0), GAMMA, LAM)
    middle = 1 + 0.9 * 7 - 2
    first = 1 + 0.9 * 2 - 2 + 0.72 * middle
    torch.testing.assert_close(got, column(first, middle, 1 + 0.9 * 5 - 2))


def test_terminated_wins_where_an_episode_is_also_truncated() -> None:
    got = gae(column(1), column(2), column(7), flags(1), flags(1), GAMMA, LAM)
    torch.testing.assert_close(got, column(-1))


def test_environments_do_not_touch_each_other() -> None:
    torch.manual_seed(0)
    rewards, values, following = torch.randn(3, 6, 4)
    terminated, truncated = torch.rand(2, 6, 4) < 0.2
    both = gae(rewards, values, following, terminated, truncated, GAMMA, LAM)
    for env in range(4):
        alone = gae(
            *(x[:, [env]] for x in (rewards, values, following, terminated, truncated)), GAMMA, LAM
        )
        torch.testing.assert_close(both[:, [env]], alone)


def test_with_lam_1_it_is_the_n_step_return() -> None:
    rewards, values = column(1, 2, 3), column(4, 5, 6)
    following = next_values(values, torch.tensor([2]), torch.tensor([10.0]))
    got = gae(rewards, values, following, NEVER, NEVER, GAMMA, lam=1.0)
    returns = [
        1 + 0.9 * 2 + 0.81 * 3 + 0.729 * 10,
        2 + 0.9 * 3 + 0.81 * 10,
        3 + 0.9 * 10,
    ]
    torch.testing.assert_close(got + values, column(*returns))


def test_with_lam_0_it_is_the_temporal_difference() -> None:
    rewards, values, following = column(1, 2, 3), column(4, 5, 6), column(5, 6, 10)
    got = gae(rewards, values, following, NEVER, NEVER, GAMMA, lam=0.0)
    torch.testing.assert_close(got, rewards + 0.9 * following - values)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_nothing_of_a_terminated_rows_next_value_is_used(lam: float) -> None:
    nan = column(float("nan"))
    got = gae(column(1), column(0), nan, flags(1), flags(0), GAMMA, lam)
    torch.testing.assert_close(got, column(1))


def test_targets_carry_no_gradient() -> None:
    values = column(1, 2, 3).requires_grad_()
    following = next_values(values, torch.tensor([2]), torch.ones(1, requires_grad=True))
    assert not following.requires_grad
    assert not gae(values, values, values, NEVER, NEVER, GAMMA, LAM).requires_grad


def test_values_of_a_transposed_rollout_are_followed_all_the_same() -> None:
    values = torch.arange(6.0).reshape(3, 2).t().contiguous().t()
    following = next_values(values, torch.tensor([4, 5]), torch.tensor([7.0, 8.0]))
    assert following.tolist() == [[2, 3], [4, 5], [7, 8]]


def test_a_critics_last_dimension_is_refused_not_broadcast() -> None:
    rows = torch.tensor([2])
    with pytest.raises(ValueError, match=r"values must be \[time, env\], got \[3, 1, 1\].*squeeze"):
        next_values(torch.ones(3, 1, 1), rows, torch.ones(1))
    with pytest.raises(ValueError, match=r"tail_values must be \[k\].* got \[1, 1\].*squeeze"):
        next_values(column(1, 2, 3), rows, torch.ones(1, 1))
    good = column(1, 2, 3)
    with pytest.raises(ValueError, match=r"values is not: rewards \[3, 1\], values \[3\]"):
        gae(good, good[:, 0], good, NEVER, NEVER, GAMMA, LAM)
    with pytest.raises(ValueError, match=r"truncated must be boolean, got torch.float32"):
        gae(good, good, good, NEVER, good, GAMMA, LAM)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 128, 200])
def test_sums_over_many_rows_are_those_of_a_loop(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    values, discounts = torch.randn(2, rows, 3, generator=generator, dtype=torch.float64)
    discounts = discounts.sigmoid().masked_fill(discounts > 1.2, 0.0)
    expected, last = torch.empty_like(values), torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(rows)):
        last = expected[t] = values[t] + discounts[t] * last
    before = values.clone(), discounts.clone()
    torch.testing.assert_close(discounted_sums(values, discounts), expected)
    assert torch.equal(values, before[0])
    assert torch.equal(discounts, before[1])


def test_sums_need_a_discount_for_every_value() -> None:
    with pytest.raises(ValueError, match=r"got \[3\] and \[2\]: discounted_sums"):
        discounted_sums(torch.zeros(3), torch.zeros(2))
