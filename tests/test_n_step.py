"""Returns of several steps, R2D2's scale of values, and priorities of sequences: known values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from clusterenv.returns import (
    inverse_rescale,
    n_step_returns,
    rescale,
    sequence_priorities,
)

LAST = 7


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def ends(*at: int, time: int = LAST) -> Tensor:
    flags = torch.zeros(time, 1, dtype=torch.bool)
    flags[list(at)] = True
    return flags


REWARDS = column(*range(1, 8))
NEXT = column(*range(100, 800, 100))  # values of the next observations


def test_rewards_after_an_end_are_cut_and_the_last_returns_are_shorter() -> None:
    found = n_step_returns(REWARDS, NEXT, ends(3), ends(), 0.9, 3)
    expected = [
        1 + 1.8 + 2.43 + 0.729 * 300,
        2 + 2.7 + 3.24,
        3 + 3.6,
        4,
        5 + 5.4 + 5.67 + 0.729 * 700,
        6 + 6.3 + 0.81 * 700,
        7 + 0.9 * 700,
    ]
    assert found.flatten().tolist() == pytest.approx(expected)


def test_a_truncated_episode_goes_on_being_worth_something() -> None:
    found = n_step_returns(REWARDS, NEXT, ends(), ends(3), 0.9, 3).flatten()
    assert found[1:4].tolist() == pytest.approx(
        [2 + 2.7 + 3.24 + 0.729 * 400, 3 + 3.6 + 0.81 * 400, 4 + 0.9 * 400]
    )


@pytest.mark.parametrize("n", [1, 2, 5, 20])
def test_returns_are_those_of_a_loop_over_rows(n: int) -> None:
    torch.manual_seed(n)
    rewards, following = torch.randn(2, 12, 4, dtype=torch.float64)
    terminated, truncated = torch.rand(2, 12, 4) < 0.15
    found = n_step_returns(rewards, following, terminated, truncated, 0.8, n)
    for env in range(4):
        for time in range(12):
            total, discount = 0.0, 1.0
            for at in range(time, min(12, time + n)):
                total += discount * float(rewards[at, env])
                discount *= 0.8
                if terminated[at, env] or truncated[at, env]:
                    break
            total += discount * float(following[at, env] * ~terminated[at, env])
            assert float(found[time, env]) == pytest.approx(total)


def test_nan_behind_an_end_is_not_seen() -> None:
    following = NEXT.clone()
    following[3] = torch.nan
    assert n_step_returns(REWARDS, following, ends(3), ends(), 0.9, 3).isfinite().all()


def test_values_on_the_scale_of_r2d2() -> None:
    values = torch.tensor([3, -3, 1, 10, 100, 1000, 0], dtype=torch.float64)
    known = [1.003, -1.003, 0.415214, 2.326625, 9.149876, 31.638584, 0]
    assert rescale(values).tolist() == pytest.approx(known, abs=1e-6)


@pytest.mark.parametrize("eps", [1e-3, 1e-2, 1e-5])
def test_the_scale_is_inverted(eps: float) -> None:
    values = torch.cat([torch.logspace(-6, 6, 200), -torch.logspace(-6, 6, 200), torch.zeros(1)])
    again = inverse_rescale(rescale(values.double(), eps), eps)
    torch.testing.assert_close(again, values.double(), rtol=1e-9, atol=1e-12)
    # Single precision: no difference of nearly equal numbers loses more than a few digits.
    again = inverse_rescale(rescale(values, eps), eps)
    torch.testing.assert_close(again, values, rtol=1e-5, atol=1e-6)


def test_transformed_errors_of_two_steps() -> None:
    taken, following = column(1.1, 1.1, 3.1), inverse_rescale(column(1.2, 0.2, 2.2))
    never = ends(time=3)
    discounts = column(0, 0.89, 0.85)
    returns = n_step_returns(column(-1.3, -1.3, 2.3), following, never, never, discounts, 2)
    errors = rescale(returns) - taken
    assert errors.flatten().tolist() == pytest.approx([-1.61788, 0.85602, -0.75762], abs=1e-5)


def test_a_sequence_is_ranked_by_its_largest_error_and_a_little_by_their_mean() -> None:
    errors = torch.tensor([[50.0, 1.0, 7.0], [-4.0, 2.0, 7.0], [2.0, -3.0, 7.0]])
    mask = torch.tensor([[False, True, False], [True, True, False], [True, True, False]])
    found = sequence_priorities(errors, mask)
    assert found.tolist() == pytest.approx([0.9 * 4 + 0.1 * 3, 0.9 * 3 + 0.1 * 2, 0.0])
    assert sequence_priorities(errors, mask, eta=0.0).tolist() == pytest.approx([3, 2, 0])


def test_nothing_has_a_gradient() -> None:
    ones = torch.ones(3, 1, requires_grad=True)
    never = ends(time=3)
    assert not n_step_returns(ones, ones, never, never, 0.9, 2).requires_grad
    assert not rescale(ones).requires_grad
    assert not inverse_rescale(ones).requires_grad
    assert not sequence_priorities(ones, ~never).requires_grad


def test_shapes_that_do_not_fit_are_refused() -> None:
    never = ends()
    with pytest.raises(ValueError, match=r"\[time, env\] alike, and next_values is not"):
        n_step_returns(REWARDS, NEXT[1:], never, never, 0.9, 3)
    with pytest.raises(ValueError, match=r"terminated must be boolean.*terminated\.bool\(\)"):
        n_step_returns(REWARDS, NEXT, never.float(), never, 0.9, 3)
    with pytest.raises(ValueError, match="n must be 1 or more, got 0"):
        n_step_returns(REWARDS, NEXT, never, never, 0.9, 0)
    with pytest.raises(ValueError, match=r"mask must be boolean"):
        sequence_priorities(REWARDS, REWARDS)
