"""Small policies for the tests, importable on the workers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution

from clusterenv.data.fragment import Fragment
from clusterenv.policies import Categorical, Context, Decision, Policy


def cartpole_policy(seed: int = 0) -> Categorical:
    torch.manual_seed(seed)
    return Categorical(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)))


class Cycle(Policy):
    """Acts by env index and the count of its own steps, so that anyone can act the same."""

    def __init__(self, actions: int = 2, start: int = 0) -> None:
        super().__init__()
        self.actions = actions
        self.start = start
        self.calls = 0

    def act(self, obs: Any, context: Context) -> Decision:
        action = self.start + (context.envs + self.calls) % self.actions
        self.calls += 1
        return Decision(action, {"twice": 2.0 * action.float()})


class Counter(Policy):
    """Recurrent: its state counts the steps of the episode; the value column shows it."""

    def initial_state(self, n: int) -> dict[str, Tensor]:
        return {"count": torch.zeros(n, 1)}

    def act(self, obs: Any, context: Context) -> Decision:
        count = context.state["count"]
        action = torch.zeros(len(count), dtype=torch.int64)
        return Decision(action, {"value": count[:, 0].clone()}, {"count": count + 1})

    def distribution(self, obs: Any, context: Context) -> Distribution:
        return CategoricalDistribution(logits=torch.zeros(len(context.envs), 2))


class Earner(Policy):
    """Recurrent: its state is the reward of the step before, which the column ``earned`` shows."""

    def __init__(self, actions: int = 2, start: int = 0) -> None:
        super().__init__()
        self.actions, self.start = actions, start

    def initial_state(self, n: int) -> dict[str, Tensor]:
        return {"last_reward": torch.zeros(n)}

    def act(self, obs: Any, context: Context) -> Decision:
        earned = context.state["last_reward"].clone()
        action = self.start + torch.randint(self.actions, (len(earned),))
        return Decision(action, {"earned": earned}, dict(context.state))


class Recalls(Policy):
    """Recurrent: acts by its memory alone, which is empty only when an episode begins."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(1, 2, bias=False)

    def initial_state(self, n: int) -> dict[str, Tensor]:
        return {"memory": torch.zeros(n, 1)}

    def act(self, obs: Any, context: Context) -> Decision:
        memory = torch.ones_like(context.state["memory"])
        return Decision(self.distribution(obs, context).sample(), {}, {"memory": memory})

    def distribution(self, obs: Any, context: Context) -> Distribution:
        return CategoricalDistribution(logits=self.read(context.state["memory"]))


class Bad(Policy):
    """Returns something wrong after some steps."""

    def __init__(self, fault: str, after: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.fault = fault
        self.after = after
        self.calls = 0

    def act(self, obs: Any, context: Context) -> Decision:
        self.calls += 1
        n = len(context.envs)
        action = torch.zeros(n, dtype=torch.int64)
        log_prob = torch.zeros(n)
        if self.calls > self.after:
            if self.fault == "shape":
                action = action[:1]
            elif self.fault == "dtype":
                action = action.float()
            elif self.fault == "range":
                action[-1] = 7
            elif self.fault == "nan":
                log_prob[-1] = float("nan")
            elif self.fault == "raise":
                raise ValueError("matrix is singular")
            elif self.fault == "column":
                return Decision(action, {"value": torch.zeros(n + 1)})
            elif self.fault == "list":
                return Decision([0] * n)  # type: ignore[arg-type]
            elif self.fault == "tensor":
                return action  # type: ignore[return-value]
            elif self.fault == "nothing":
                return None  # type: ignore[return-value]
            elif self.fault == "number":
                return Decision(action, {"value": 0.5})  # type: ignore[dict-item]
            elif self.fault == "gone":
                return Decision(action)
            elif self.fault == "double":
                return Decision(action, {"log_prob": log_prob.double()})
            elif self.fault == "wide":
                return Decision(action, {"log_prob": log_prob[:, None]})
            elif self.fault == "bfloat16":
                return Decision(action, {"log_prob": log_prob.bfloat16()})
            elif self.fault == "half action":
                return Decision(action.bfloat16(), {"log_prob": log_prob})
            elif self.fault == "extras":
                return Decision(action, [log_prob])  # type: ignore[arg-type]
            elif self.fault == "exit":
                raise SystemExit(3)
            elif self.fault == "in place":
                obs.mul_(0.1)
            elif self.fault == "taken":
                return Decision(action, {"log_prob": log_prob, "reward": log_prob})
        return Decision(action, {"log_prob": log_prob})

    def distribution(self, obs: Any, context: Context) -> Distribution:
        return CategoricalDistribution(logits=self.weight.expand(len(context.envs), 3))


class BadState(Policy):
    """Has a recurrent state that is wrong from the beginning, or becomes so."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def initial_state(self, n: int) -> Any:
        if self.fault == "raise":
            raise ValueError("no such size")
        if self.fault == "lstm":
            return {"h": torch.zeros(1, n, 3)}
        if self.fault == "tuple":
            return torch.zeros(n, 3), torch.zeros(n, 3)
        return {"h": torch.zeros(n, 3).numpy() if self.fault == "array" else torch.zeros(n, 3)}

    def act(self, obs: Any, context: Context) -> Decision:
        n = len(context.envs)
        state: Any = {"h": context.state["h"] + 1}
        if self.fault == "rows":
            state = {"h": state["h"][:1]}
        elif self.fault == "names":
            state = {"c": state["h"]}
        elif self.fault == "list":
            state = [state["h"]]
        return Decision(torch.zeros(n, dtype=torch.int64), {}, state)


class LearnedState(Policy):
    """Begins episodes with a parameter, the same for all environments."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((2,), 5.0))

    def initial_state(self, n: int) -> dict[str, Tensor]:
        return {"h": self.first.expand(n, 2)}

    def act(self, obs: Any, context: Context) -> Decision:
        h = context.state["h"]
        context.state["h"].add_(1)  # in place, as some do
        return Decision(torch.zeros(len(h), dtype=torch.int64), {"value": h[:, 0].clone()})


class Reassigning(Categorical):
    """Makes one of its tensors anew whenever it acts."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 2))
        self.register_buffer("calls", torch.zeros(()))

    def act(self, obs: Any, context: Context) -> Decision:
        self.calls = self.calls + 1
        return super().act(obs, context)


class Annotating(Categorical):
    """Annotates each row with its temporal difference, from values and true next observations."""

    def __init__(self, fault: str = "none") -> None:
        super().__init__(nn.Linear(4, 2))
        self.fault = fault

    def value(self, obs: Any) -> Tensor:
        return torch.as_tensor(obs)[:, 0]

    def annotate(self, fragment: Fragment) -> dict[str, Any]:
        if self.fault == "raise":
            raise ValueError("no such column")
        columns, n = fragment.columns, fragment.num_envs
        following = torch.zeros(len(columns["reward"]))
        following[:-n] = self.value(columns["obs"][n:])
        following[fragment.tail_rows] = self.value(fragment.tail["obs"])
        delta = torch.from_numpy(columns["reward"]) + following - self.value(columns["obs"])
        if self.fault == "length":
            return {"priority": delta[1:]}
        if self.fault == "dtype":
            return {"priority": ["high"] * len(delta)}
        names = {"clash": "reward", "later": "next_obs", "source": "run"}
        return {names.get(self.fault, "priority"): delta.abs()}


class Still(Policy):
    """Takes the first action always."""

    def act(self, obs: Any, context: Context) -> Decision:
        return Decision(torch.zeros(len(obs), dtype=torch.long), {})


def changed(policy: Any, by: float, seed: int = 0) -> Any:
    """Return a copy of a policy with other weights."""
    torch.manual_seed(seed)
    other = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(by * torch.randn_like(parameter))
    return other


class Remembers(Policy):
    """Recurrent: acts by env index and its count of steps; tells it, and what it earned last."""

    def __init__(self, actions: int = 2, start: int = 0) -> None:
        super().__init__()
        self.actions, self.start = actions, start

    def initial_state(self, n: int) -> dict[str, Tensor]:
        return {"count": torch.full((n,), 3), "last_reward": torch.zeros(n)}

    def act(self, obs: Any, context: Context) -> Decision:
        count, earned = context.state["count"], context.state["last_reward"]
        action = self.start + (context.envs + count) % self.actions
        state = {"count": count + 1, "last_reward": earned}
        return Decision(action, {"counted": count.clone(), "earned": earned.clone()}, state)
