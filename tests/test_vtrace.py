"""V-trace: known values, a direct double sum, and what becomes of ends and masks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from clusterenv.returns import VTrace, next_values, vtrace

NAN = float("nan")


def never(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bool)


def from_rewards(
    log_ratios: Tensor, rewards: Tensor, values: Tensor, bootstrap: Tensor, **options: Any
) -> VTrace:
    """V-trace of a fragment in which no episode ends."""
    following = torch.cat([values[1:], bootstrap.unsqueeze(0)])
    ends = never(*rewards.shape), never(*rewards.shape)
    return vtrace(log_ratios, rewards, values, following, *ends, **options)


def columns(envs: int) -> dict[str, Tensor]:
    """The rows of a published test, for any number of environments."""
    steps = torch.arange(5 * envs, dtype=torch.float64)
    grid = steps.view(5, envs)
    return {
        "log_ratios": 5 * (grid / (5 * envs) - 0.5),
        "rewards": grid,
        "values": grid / envs,
        "bootstrap": torch.arange(envs, dtype=torch.float64) + 1,
        "gamma": (0.9 / (torch.arange(envs, dtype=torch.float64) + 1)).expand(5, envs),
    }


@pytest.mark.parametrize(
    ("envs", "targets", "advantages"),
    [
        (
            1,
            [0.20018, 2.70968, 8.51363, 11.93240, 7.33],
            [0.20018, 1.70968, 6.51363, 10.87661, 1.98],
        ),
        (5, [0.92982, 12.58608, 53.25023, 84.99705, 66.53], None),
    ],
)
def test_known_values(envs: int, targets: list[float], advantages: list[float] | None) -> None:
    found = from_rewards(**columns(envs), rho_bar=3.7, rho_pg=2.2)
    assert found.targets[:, 0].tolist() == pytest.approx(targets, abs=1e-4)
    if advantages is not None:
        assert found.advantages[:, 0].tolist() == pytest.approx(advantages, abs=1e-4)


def test_known_values_from_logits() -> None:
    behaviour = torch.tensor([[8.9, 0.7], [5, 1], [0.6, 0.1], [-0.9, -0.1]])
    learner = torch.tensor([[0.4, 0.5], [9.2, 8.8], [0.7, 4.4], [7.9, 1.4]])
    actions = torch.tensor([0, 1, 0, 0]).unsqueeze(-1)
    both = (logits.log_softmax(-1).gather(-1, actions) for logits in (learner, behaviour))
    log_ratios = torch.sub(*both)
    found = from_rewards(
        log_ratios,
        torch.tensor([[-1.3], [-1.3], [2.3], [42.0]]),
        values := torch.tensor([[2.1], [1.1], [-3.1], [0.0]]),
        torch.tensor([8.4]),
        gamma=torch.tensor([[0.0], [0.89], [0.85], [0.99]]),
    )
    known = [-1.61551, -3.49732, 1.86705, 50.316]
    assert (found.targets - values).flatten().tolist() == pytest.approx(known, abs=1e-3)
    assert found.advantages.flatten().tolist() == pytest.approx(known, abs=1e-3)


def double_sum(rows: dict[str, Tensor], gamma: float, lam: float, rho_bar: float) -> Tensor:
    """``vs`` as the paper writes it: a sum over later rows of products up to them."""
    weights = rows["log_ratios"].exp()
    time, envs = weights.shape
    targets = rows["values"].clone()
    for env in range(envs):
        for s in range(time):
            product = 1.0
            for t in range(s, time):
                over = bool(rows["terminated"][t, env])
                following = 0.0 if over else gamma * float(rows["next_values"][t, env])
                error = float(rows["rewards"][t, env]) + following - float(rows["values"][t, env])
                targets[s, env] += product * min(rho_bar, float(weights[t, env])) * error
                if over or rows["truncated"][t, env]:
                    break
                product *= gamma * lam * min(1.0, float(weights[t, env]))
    return targets


@pytest.mark.parametrize("lam", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_targets_are_a_direct_double_sum(lam: float, seed: int) -> None:
    torch.manual_seed(seed)
    shape = (13, 4)
    rows = {
        name: torch.randn(shape, dtype=torch.float64)
        for name in ("log_ratios", "rewards", "values", "next_values")
    }
    rows |= {name: torch.rand(shape) < 0.15 for name in ("terminated", "truncated")}
    ends = (rows["terminated"] | rows["truncated"])[:-1]
    rows["next_values"][:-1] = rows["next_values"][:-1].where(ends, rows["values"][1:])
    found = vtrace(**rows, gamma=0.9, lam=lam, rho_bar=1.3)
    torch.testing.assert_close(found.targets, double_sum(rows, 0.9, lam, 1.3))
    # rho (q - V) is what the target adds, if both bounds are the same.
    again = vtrace(**rows, gamma=0.9, lam=lam, rho_bar=1.0, rho_pg=1.0)
    torch.testing.assert_close(again.advantages, again.targets - rows["values"])


def test_on_policy_the_targets_are_n_step_returns() -> None:
    rewards, values = torch.tensor([[1.0], [2.0], [3.0]]), torch.randn(3, 1)
    found = from_rewards(torch.zeros(3, 1), rewards, values, torch.tensor([10.0]), gamma=0.9)
    returns = [1 + 1.8 + 0.81 * 3 + 0.729 * 10, 2 + 2.7 + 0.81 * 10, 3 + 9.0]
    assert found.targets.flatten().tolist() == pytest.approx(returns, rel=1e-5)


def test_a_terminated_row_has_no_future_and_a_truncated_one_its_final_value() -> None:
    ones, zero = torch.ones(3, 1), torch.zeros(3, 1)
    following = next_values(ones, torch.tensor([1, 2]), torch.tensor([7.0, 5.0]))
    middle = torch.tensor([[False], [True], [False]])
    cut = vtrace(zero, ones, ones, following, never(3, 1), middle, gamma=0.5).targets
    assert cut.flatten().tolist() == [1 + 0.5 * (1 + 3.5), 1 + 3.5, 1 + 2.5]
    following[1] = NAN  # nothing of it is used
    over = vtrace(zero, ones, ones, following, middle, never(3, 1), gamma=0.5)
    assert over.targets.flatten().tolist() == [1.5, 1.0, 3.5]
    assert over.advantages.flatten().tolist() == [0.5, 0.0, 2.5]


def test_without_bounds_the_weights_count_whole() -> None:
    ones, ratio = torch.ones(1, 1), torch.full((1, 1), math.log(5.0))
    ends = never(1, 1), never(1, 1)
    found = vtrace(ratio, ones, 0 * ones, ones, *ends, gamma=1.0, rho_bar=None, rho_pg=None)
    assert found.targets.item() == pytest.approx(10.0)
    assert found.advantages.item() == pytest.approx(10.0)


def test_masked_rows_have_no_advantage_and_end_the_sums() -> None:
    torch.manual_seed(1)
    rows = {name: torch.randn(6, 2) for name in ("log_ratios", "rewards", "values", "next_values")}
    rows |= {"terminated": never(6, 2), "truncated": never(6, 2)}
    mask = torch.ones(6, 2, dtype=torch.bool)
    mask[4:, 1] = False
    found = vtrace(**rows, gamma=0.9, mask=mask)
    assert torch.equal(found.targets[4:, 1], rows["values"][4:, 1])
    assert not found.advantages[4:, 1].any()
    rows["rewards"][4:, 1] = rows["values"][5, 1] = NAN  # padding may hold anything
    padded = vtrace(**rows, gamma=0.9, mask=mask)
    assert padded.targets[:5].isfinite().all()
    assert not padded.advantages[4:, 1].any()
    shorter = vtrace(**{name: column[:4, 1:] for name, column in rows.items()}, gamma=0.9)
    torch.testing.assert_close(found.targets[:4, 1:], shorter.targets)


def test_no_gradient_goes_through_the_targets() -> None:
    values = torch.randn(3, 1, requires_grad=True)
    found = from_rewards(values, values, values, torch.ones(1, requires_grad=True), gamma=0.9)
    assert not found.targets.requires_grad
    assert not found.advantages.requires_grad


def test_wrong_shapes_and_bounds_are_refused() -> None:
    good, flags = torch.ones(3, 1), never(3, 1)
    with pytest.raises(ValueError, match=r"log_ratios is not: rewards \[3, 1\], log_ratios \[3\]"):
        vtrace(good[:, 0], good, good, good, flags, flags, 0.9)
    with pytest.raises(ValueError, match=r"gamma is not"):
        vtrace(good, good, good, good, flags, flags, good[:2])
    with pytest.raises(ValueError, match=r"mask must be boolean, got torch.float32: mask.bool\(\)"):
        vtrace(good, good, good, good, flags, flags, 0.9, mask=good)
    with pytest.raises(ValueError, match="rho_bar must be above 0, or None for no bound, got 0"):
        vtrace(good, good, good, good, flags, flags, 0.9, rho_bar=0)
