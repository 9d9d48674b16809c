"""Train by proximal policy optimisation, with the policy on the workers.

``python -m pipelines.ppo --env LunarLander-v3``
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import clusterenv
from clusterenv.errors import ClusterEnvError, ConfigError, Diverged
from clusterenv.returns import gae, next_values
from clusterenv.store import Rollout, RolloutStore
from pipelines import cli, dashboard, options, ranges, run_args
from pipelines.agents import PPOAgent
from pipelines.directories import check_kind
from pipelines.display import Display, summary
from pipelines.evaluation import Evaluations
from pipelines.metrics import Metrics, collected
from pipelines.run import Interrupt, Run
from pipelines.run_args import RunArgs, survival, sync_rule
from pipelines.running import RewardScaler
from pipelines.sessions import arguments, check_arguments

__all__ = ["Args", "PPOAgent", "Result", "preset", "train"]

FREE = (*run_args.FREE, "resume")


@dataclass(frozen=True)
class Args(RunArgs):
    """Arguments; :func:`preset` returns tuned ones for some environments."""

    env: str = "LunarLander-v3"  # id of a Gymnasium environment
    total_steps: int = 1_000_000  # environment steps, summed over all environments
    num_envs: int = 16  # environments, summed over all shards
    horizon: int = 128  # steps of each environment between updates
    threshold: float = 0.05  # with --sync divergence: pull above this divergence
    lr: float = 3e-4  # learning rate of Adam
    anneal: bool = True  # decrease the learning rate linearly to 0
    gamma: float = 0.99  # discount per step
    lam: float = 0.95  # lambda of generalised advantage estimation
    epochs: int = 4  # passes over a rollout
    minibatches: int = 4  # per pass
    clip: float = 0.2  # clipping range of the probability ratio
    max_correction: float = 2.0  # upper bound of the importance weights of older rows
    clip_value: bool = False  # clip new values to within clip of the old ones
    entropy: float = 0.01  # weight of the entropy bonus
    value_coef: float = 0.5  # weight of the value loss
    grad_norm: float = 0.5  # clip gradients to this norm
    normalize_obs: bool = True  # by their running mean and variance
    scale_rewards: bool | None = None  # by the running return's deviation; default: if continuous
    hidden: tuple[int, ...] = (64, 64)  # layers of actor and critic
    checkpoint_every: int = 50  # updates between checkpoints
    resume: bool = False  # resume the run in --out

    def __post_init__(self) -> None:
        super().__post_init__()
        ranges.check(self, ranges.COUNT, "epochs", "minibatches", "hidden", "checkpoint_every")
        ranges.check(self, ranges.POSITIVE, "lr")
        ranges.check(self, ranges.BOUND, "clip", "max_correction", "grad_norm")
        ranges.check(self, ranges.SHARE, "gamma", "lam")
        ranges.check(self, ranges.NOT_NEGATIVE, "entropy", "value_coef")
        rows = self.num_envs * self.horizon
        if 2 * self.minibatches > rows:
            right = f"--minibatches {rows // 2}" if rows > 1 else "--horizon 128"
            raise ConfigError(
                f"--minibatches {self.minibatches} leaves fewer than 2 rows in each, of "
                f"{self.num_envs} environments × {self.horizon} steps: {right}"
            )
        if self.resume and self.out is None:
            raise ConfigError("--resume needs the run's directory: --out runs/mine --resume")


# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "total_steps": 150_000, "horizon": 64, "epochs": 10, "lr": 1e-3,
        "gamma": 0.98, "lam": 0.9, "entropy": 0.0,
    },
    "LunarLander-v3": {
        "minibatches": 16, "lr": 1e-3, "gamma": 0.999, "lam": 0.98, "scale_rewards": True,
    },
    "Pendulum-v1": {
        # Whole episodes: with half of one, each update sees only swinging up, or only balancing.
        "total_steps": 400_000, "horizon": 200, "epochs": 10, "minibatches": 16,
        "lr": 5e-4, "gamma": 0.9, "entropy": 0.0,
    },
}
# fmt: on


def preset(env: str, **changes: Any) -> Args:
    """Return the arguments tuned for an environment, with ``changes``.

    Examples
    --------
    >>> preset("Pendulum-v1", seed=3).gamma
    0.9
    """
    return Args(**{"env": env, **PRESETS.get(env, {}), **changes})


def update(
    agent: PPOAgent,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    rewards: Tensor,
    args: Args,
) -> dict[str, float]:
    """Improve the agent on one rollout and return the means of the last pass."""
    obs = rollout["obs"].flatten(0, 1)
    action = rollout["raw_action" if agent.log_std is not None else "action"].flatten(0, 1)
    behaviour = rollout["log_prob"].flatten()  # of whichever version acted
    with torch.no_grad():
        # Decoupled clipping: around the policy before this update, not the one that acted.
        # Clipping around an old acting policy would hold the learner near it.
        proximal = agent.distribution(obs).log_prob(action)
        correction = (proximal - behaviour).exp().clamp(max=args.max_correction)
        values = agent.value(obs).view_as(rewards)
        following = next_values(values, rollout.tail_rows, agent.value(rollout.tail["obs"]))
        ends = rollout["terminated"], rollout["truncated"]
        advantages = gae(rewards, values, following, *ends, args.gamma, args.lam)
        targets, values, advantages = (
            part.flatten() for part in (advantages + values, values, advantages)
        )

    losses: list[Tensor] = []
    for _ in range(args.epochs):
        losses.clear()
        for rows in torch.randperm(len(obs)).tensor_split(args.minibatches):
            distribution = agent.distribution(obs[rows])
            value = agent.value(obs[rows])
            log_ratio = distribution.log_prob(action[rows]) - proximal[rows]
            ratio = log_ratio.exp()
            advantage = advantages[rows]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
            gain = torch.min(ratio * advantage, clipped * advantage)
            policy_loss = -(correction[rows] * gain).mean()
            error = (value - targets[rows]).square()
            if args.clip_value:
                near = values[rows] + (value - values[rows]).clamp(-args.clip, args.clip)
                error = torch.max(error, (near - targets[rows]).square())
            value_loss = 0.5 * error.mean()
            entropy = distribution.entropy().mean()
            loss = policy_loss + args.value_coef * value_loss - args.entropy * entropy
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(agent.parameters(), args.grad_norm)
            optimizer.step()
            kl = (ratio - 1 - log_ratio).mean()  # Schulman's estimate: never below 0
            outside = (ratio != clipped).float().mean()
            losses.append(torch.stack([policy_loss, value_loss, entropy, kl, outside]).detach())
    names = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction")
    return dict(zip(names, torch.stack(losses).mean(0).tolist(), strict=True))


@dataclass(frozen=True)
class Result:
    """How a run ended; of a resumed run, counted from its beginning."""

    mean_return: float
    """Of the last 100 episodes; NaN if none ended."""
    steps: int
    version: int
    pulls: int
    weight_bytes: int
    seconds: float
    reached_at: int | None
    """Steps after which ``stop_at`` was reached; of the evaluated version, if there is one."""
    out: Path
    eval_return: float | None = None
    """Mean of the last evaluation."""


def train(args: Args) -> Result:
    """Train an agent; write everything to the run directory.

    Raises
    ------
    ConfigError
        If the arguments do not fit the environment or the run directory.
    """
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    out = args.out or Path("runs") / f"ppo-{args.env.replace('/', '-')}-{args.seed}-{stamp}"
    check_kind(out, "ppo")
    run = Run(out, resume=args.resume, wandb=args.wandb)
    saved = run.load() if args.resume else {}
    if saved:
        check_arguments(out, saved["args"], args, FREE)
    title = f"PPO on {args.env}"
    spaces = clusterenv.env_spaces(args.env, engine=args.engine)
    agent = PPOAgent(*spaces, args.hidden, args.normalize_obs)
    optimizer = torch.optim.Adam(agent.parameters(), args.lr, eps=1e-5, fused=True)
    scales = agent.log_std is not None if args.scale_rewards is None else args.scale_rewards
    scaler = RewardScaler(args.num_envs, args.gamma) if scales else None
    parts: dict[str, Any] = {"agent": agent, "optimizer": optimizer}
    if scaler is not None:
        parts["scaler"] = scaler
    past = Metrics()
    earlier: list[float] = []
    if args.resume:
        past, earlier = restore(saved, parts)
    metrics, returns = past, earlier
    evaluations = Evaluations(args, "ppo", out, past if args.resume else None)
    reached_at: int | None = None

    def save() -> None:
        states = {name: part.state_dict() for name, part in parts.items()}
        more = {"metrics": metrics.given(), "returns": returns, "args": arguments(args)}
        run.save({**states, "rng": torch.get_rng_state(), **more})

    interrupt = Interrupt("stopping after this update; Ctrl-C again stops at once", args.quiet)
    with (
        Display(title, args.total_steps, args.quiet) as display,
        contextlib.closing(run),
        interrupt,
        dashboard.shown(args.dashboard),
        clusterenv.Collector(
            args.env,
            agent,
            num_envs=args.num_envs,
            horizon=args.horizon,
            shards=args.shards,
            cluster=args.cluster,
            engine=args.engine,
            sync=sync_rule(args),
            seed=args.seed + past.steps,  # a resumed run goes on with new episodes
            version=past.version + args.resume,  # and what it had learned since the last version
            **survival(args),
        ) as collector,
        evaluations.beside(collector, agent, past.steps),
    ):
        dashboard.say_where(collector, display)
        interrupt.started()
        run.open(past.steps)
        store = RolloutStore()
        began = time.monotonic()
        version = past.version + args.resume  # what the collector was made with
        try:
            for done in itertools.count(1):
                if metrics.steps >= args.total_steps or reached_at or interrupt.wanted:
                    break
                lr = args.lr * (1 - metrics.steps / args.total_steps if args.anneal else 1)
                optimizer.param_groups[0]["lr"] = lr
                for batch in collector.rollout():
                    store.add(batch, newest_version=version)
                rows, rollout = store.rows, store.take()
                rewards = rollout["reward"]
                if scaler is not None:
                    rewards = scaler(rewards, rollout["env"], rollout["step"])
                losses: dict[str, Any] = update(agent, optimizer, rollout, rewards, args)
                if agent.stats is not None:
                    # Only now: the update needed the statistics that acted.
                    agent.stats.update(rollout["obs"].flatten(0, 1))
                version = collector.publish(agent)
                evaluations.update(agent, version, metrics.steps + rows)

                stats, seconds = collector.stats(), time.monotonic() - began
                steps = metrics.steps + rows
                returns = [*earlier, *stats.returns][-100:]
                mean = statistics.fmean(returns) if returns else math.nan
                metrics = Metrics(
                    steps=steps,
                    seconds=past.seconds + seconds,
                    steps_per_second=(steps - past.steps) / seconds,
                    episodes=past.episodes + stats.episodes,
                    mean_return=mean,
                    lr=lr,
                    **losses,
                    **evaluations.metrics,
                    **collected(past, stats),
                )
                run.log(metrics)
                display.show(metrics)
                if evaluations.on:
                    reached_at = evaluations.reached_at
                elif args.stop_at is not None and len(returns) >= 100 and mean >= args.stop_at:
                    reached_at = steps
                if done % args.checkpoint_every == 0:
                    save()
            if evaluations.on:
                evaluations.finish(agent, version, metrics.steps, display, interrupt)
                reached_at = evaluations.reached_at
                if evaluations.metrics["eval_steps"] != metrics.eval_steps:
                    metrics = dataclasses.replace(metrics, **evaluations.metrics)
                    run.log(metrics)
                    display.show(metrics)
        except Diverged:
            if run.checkpoint.exists():
                display.say(
                    f"{run.checkpoint} was saved before; --resume --out {out} goes on there"
                )
            raise
        except ClusterEnvError:
            # In a terminal, Ctrl-C also reaches the workers of a local cluster.
            if not interrupt.wanted:
                save()
                display.say(
                    f"saved {run.checkpoint}; the same command goes on from there with "
                    f"--resume --out {out}"
                )
                raise
    save()
    curve = run.draw(f"{title}, --sync {args.sync}")
    files = f"{out}: {run.progress.name}, metrics.jsonl, {run.checkpoint.name}, TensorBoard events"
    further: dict[str, Any] = {"out": out, "resume": True, "stop_at": None}
    if metrics.steps >= args.total_steps:
        further["total_steps"] = 2 * args.total_steps
    go_on = options.command("clusterenv train ppo", args, PRESETS, **further)
    display.sum_up(summary(metrics, run.best, [files, *evaluations.said, str(curve)], go_on))
    return Result(
        mean_return=metrics.mean_return,
        steps=metrics.steps,
        version=metrics.version,
        pulls=metrics.pulls,
        weight_bytes=metrics.weight_bytes,
        seconds=metrics.seconds,
        reached_at=reached_at,
        out=out,
        eval_return=metrics.eval_return,
    )


def restore(saved: Mapping[str, Any], parts: Mapping[str, Any]) -> tuple[Metrics, list[float]]:
    """Restore all parts from a checkpoint; return its metrics and last 100 returns."""
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    torch.set_rng_state(saved["rng"])
    return Metrics.read(saved["metrics"]), list(saved["returns"])


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and train."""
    train(
        options.read(Args, argv, presets=PRESETS, description=__doc__, prog="clusterenv train ppo")
    )


if __name__ == "__main__":
    cli.run_module("ppo", main)
