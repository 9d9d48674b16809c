"""``Collector(inference="head")``: the same rows, the newest version in every step, and faults."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import dask
import numpy as np
import pytest
import torch
from agents import Annotating, Bad, BadState, Remembers, cartpole_policy, changed
from collecting import Counts, check, policy
from compare import assert_same
from conftest import wait_until
from distributed import Client
from torch import nn
from worlds import Faulty, Masked, World

import clusterenv
from clusterenv import Batch, Divergence, errors
from clusterenv.policies import Categorical, Context, Decision, Policy

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def collecting(client: Client, env: Any, acts: Policy, **kwargs: Any) -> clusterenv.Collector:
    options = {"num_envs": 7, "horizon": 6, "shards": 2, "seed": 4, "inference": "head", **kwargs}
    return clusterenv.Collector(env, acts, cluster=client, **options)


def contents(batches: list[Batch]) -> list[dict[str, Any]]:
    """All that a learner may read of batches."""
    return [
        {
            "columns": {name: batch[name] for name in batch.names},
            "tail": batch.tail,
            "rows": batch.tail_rows,
            "state": batch.state,
            "next_obs": batch.next_obs(),
            "version": batch.policy_version,
        }
        for batch in batches
    ]


@pytest.mark.parametrize(
    ("env", "options"),
    [
        (World, {}),
        (World, {"obs": "nested", "horizon": 5}),
        (World, {"obs": "text", "text": "keep"}),
        ("CartPole-v1", {"engine": "native", "num_envs": 6}),
        (Masked, {"way": "info"}),
        (Masked, {"way": "obs"}),
    ],
)
def test_rows_are_those_of_inference_by_workers(client: Client, env: Any, options: Any) -> None:
    start = 2 if env is World else 0

    def acts() -> Policy:
        return Chosen() if env is Masked else Remembers(5 if env is World else 2, start)

    def rows(where: str) -> list[dict[str, Any]]:
        with collecting(client, env, acts(), inference=where, **options) as collector:
            batches = collector.rollout()
            collector.publish(acts())
            return contents(batches + collector.rollout() + collector.rollout())

    for ours, theirs in zip(rows("head"), rows("worker"), strict=True):
        if options.get("engine"):  # which tracks a fragment has depends on the groups
            assert (ours["columns"]["counted"] == ours["columns"]["step"] + 3).all()
            assert set(ours["columns"]) == set(theirs["columns"])
        else:
            ours["tail"], theirs["tail"] = (by_row(part) for part in (ours, theirs))
            ours.pop("rows"), theirs.pop("rows")
            assert_same(ours, theirs)


def by_row(part: dict[str, Any]) -> dict[str, Any]:
    order = np.argsort(part["rows"])
    return {name: column[order] for name, column in part["tail"].items()}


class Chosen(Policy):
    """The first action that is allowed."""

    def act(self, obs: Any, context: Context) -> Decision:
        assert context.mask is not None
        return Decision(context.mask.to(torch.uint8).argmax(-1))


def test_the_newest_version_acts_in_every_step_and_each_row_says_which(client: Client) -> None:
    acts = cartpole_policy()
    options = {"num_envs": 8, "horizon": 128}
    with collecting(client, "CartPole-v1", acts, **options) as collector:
        batches = iter(collector)
        for _ in range(8):
            collector.publish(changed(acts, 0.1), epsilon=0.5)
            batch = next(batches)
            versions = batch["version"]
            assert (np.diff(versions, axis=0) >= 0).all()
        newest = collector.publish(changed(acts, 0.2))
        assert wait_until(lambda: (next(batches)["version"] == newest).all())
        stats = collector.stats()
        assert (stats.pulls, stats.weight_bytes) == (0, 0)
        assert {shard.version for shard in collector.shards} == {newest}
        assert stats.inference_rows >= stats.rows
        assert 1 <= stats.inference_rows / stats.inference_batches <= 8


def test_what_the_head_chose_is_what_its_weights_say(client: Client) -> None:
    acts = cartpole_policy()
    with collecting(client, "CartPole-v1", acts) as collector:
        collector.rollout()
        other = changed(acts, 1.0)
        collector.publish(other)
        for batch in collector.rollout():
            rows = batch.torch()
            with torch.inference_mode():
                log_prob = other.distribution(rows["obs"], Context(rows["env"])).log_prob(
                    rows["action"]
                )
            assert torch.allclose(rows["log_prob"], log_prob, atol=1e-5)


def test_the_head_annotates_fragments(client: Client) -> None:
    with collecting(client, "CartPole-v1", Annotating()) as collector:
        for batch in collector.rollout():
            expected = np.abs(1 + 0.02 * batch["obs"][..., 1])
            assert np.allclose(batch["priority"], expected, atol=1e-5)
            assert batch.record_batch["priority"].to_numpy().tolist() == (
                batch.flat("priority").tolist()
            )


@pytest.mark.parametrize("num_envs", [1, 2, 3])
def test_few_environments_make_few_groups(client: Client, num_envs: int) -> None:
    with collecting(client, World, Remembers(5, 2), num_envs=num_envs, shards=1) as collector:
        (batch,) = collector.rollout()
        assert batch["obs"].shape[:2] == (6, num_envs)


# Faults


@pytest.fixture
def fragile() -> Iterator[Client]:
    with clusterenv.connect("local", n_workers=2) as client:
        yield client


def test_a_lost_worker_takes_its_partial_fragments_along(fragile: Client) -> None:
    """Every row once, episodes contiguous, and recurrent state zero where a new one begins."""
    batches: list[Batch] = []
    options = {"num_envs": 4, "horizon": 16, "seed": 1}
    with collecting(fragile, Counts, Remembers(), **options) as collector:
        stream = iter(collector)
        for shard in (0, 1):
            batches += [next(stream) for _ in range(8)]
            assert wait_until(lambda: all(s.state == "running" for s in collector.shards))
            before = collector.stats().restarts
            worker = collector.shards[shard].worker
            os.kill(fragile.run(os.getpid, workers=[worker])[worker], signal.SIGKILL)
            while collector.stats().restarts == before:
                batches.append(next(stream))
            again = collector.shards[shard].incarnation
            while (batches[-1].shard, batches[-1].incarnation) != (shard, again):
                batches.append(next(stream))
            assert wait_until(lambda: len(fragile.nthreads()) == 2)
    check(batches)
    for batch in batches:
        assert (batch["counted"] == batch["step"] + 3).all()


def test_a_hanging_environment_of_one_group_is_noticed(fragile: Client, tmp_path: Any) -> None:
    orders = tmp_path / "orders"
    with (
        dask.config.set({"clusterenv.timeout.step": "2s", "clusterenv.timeout.silence": "4s"}),
        collecting(fragile, Counts, policy(), num_envs=4, orders=str(orders)) as collector,
    ):
        batches = [next(iter(collector))]
        orders.write_text("hang")
        while not collector.stats().restarts:
            batches.append(next(iter(collector)))
        batches += [next(iter(collector)) for _ in range(8)]
    check(batches)


@pytest.mark.parametrize("fault", ["pickle", "others", "many", "masks"])
def test_a_request_that_is_not_a_shards_own_restarts_it(client: Client, fault: str) -> None:
    def sabotage() -> None:
        import pickle

        from clusterenv.transport.messages import ObservationsMeta

        pack = ObservationsMeta.original = ObservationsMeta.pack  # type: ignore[attr-defined]

        def wrong(self: Any) -> bytes:
            ObservationsMeta.pack = pack  # type: ignore[method-assign]
            changed = {
                "pickle": lambda: pickle.dumps(tuple(self)),
                "others": lambda: pack(self._replace(first=self.first + 5)),
                "many": lambda: pack(self._replace(num_envs=2**31)),
                "masks": lambda: pack(self._replace(choices=3)),
            }
            return changed[fault]()

        ObservationsMeta.pack = wrong  # type: ignore[method-assign]

    def undo() -> None:
        from clusterenv.transport.messages import ObservationsMeta

        ObservationsMeta.pack = ObservationsMeta.original  # type: ignore[attr-defined, method-assign]

    client.run(sabotage)
    try:
        with collecting(client, Counts, policy(), horizon=16) as collector:
            batches = collector.collect(1_000)
            assert 1 <= collector.stats().restarts <= 3
        check(batches)
    finally:
        client.run(undo)


def test_a_head_that_rests_is_no_hanging_environment(client: Client) -> None:
    with (
        dask.config.set({"clusterenv.timeout.step": "500ms"}),
        collecting(client, "CartPole-v1", Slowly()) as collector,
    ):
        for _ in range(3):
            collector.rollout()
        assert collector.stats().restarts == 0


class Slowly(Categorical):
    """Takes longer to act than an environment may take to step."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 2))
        self.acted = 0

    def act(self, obs: Any, context: Context) -> Decision:
        self.acted += 1
        if self.acted == 4:
            wait_until(lambda: False, seconds=1.5)
        return super().act(obs, context)


def test_an_environment_that_fails_is_rebuilt_alone(client: Client) -> None:
    with collecting(client, lambda: Faulty("raise", at=4), Remembers(5, 2)) as collector:
        batches = [batch for _ in range(2) for batch in collector.rollout()]
        assert collector.stats().rebuilt
        cuts = [cut for batch in batches for cut in batch.cuts]
        assert {cut.env for cut in cuts} <= set(range(7))
        for batch in batches:
            assert (batch["counted"] == batch["step"] + 3).all()


@pytest.mark.parametrize(
    ("acts", "error", "message"),
    [
        (Bad("raise"), errors.PolicyError, "raised ValueError on . environments, at the head: mat"),
        (Bad("tensor"), errors.PolicyError, r"must return clusterenv.policies.Decision"),
        (Bad("number"), errors.ConfigError, "'value' is .*float.* environments"),
        (Bad("bfloat16"), errors.PolicyError, "which NumPy cannot represent"),
        (Bad("range"), errors.PolicyError, "the policy chose 7 for environment"),
        (Annotating("raise"), errors.PolicyError, r"raised ValueError in annotate\(\)"),
    ],
)
def test_a_faulty_policy_is_an_error(
    client: Client, acts: Policy, error: type[Exception], message: str
) -> None:
    env = "Acrobot-v1" if isinstance(acts, Bad) else "CartPole-v1"
    with pytest.raises(error, match=message), collecting(client, env, acts) as collector:
        collector.rollout()


class Fixed(Policy):
    """Answers for four environments, however many there are."""

    def act(self, obs: Any, context: Context) -> Decision:
        return Decision(torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inference": "gpu"}, "inference='gpu' is unknown; .* inference='head' evaluates"),
        ({"inference": "worker", "device": "cpu"}, "device='cpu' is where the head evaluates"),
        ({"device": "nowhere"}, r"device='nowhere' is not there: .*device='cpu'\)"),
        ({"device": 1.5}, "device=1.5 is not there"),
        ({"sync": Divergence(0.1)}, "sync=.* decides when workers pull .*leave sync out"),
        ({"overlap": True}, "overlap=True promises rollouts exactly one version old"),
        ({"acts": Fixed()}, "'action' is .4,. for 3 environments.*inference='worker'"),
        ({"acts": BadState("lstm")}, r"initial_state\(2\) returned .*expected tensors by name"),
        ({"acts": nn.Linear(4, 2)}, "policy is a Linear; wrap it"),
    ],
)
def test_bad_arguments(client: Client, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        collecting(client, "CartPole-v1", **{"acts": cartpole_policy(), **arguments})


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")
def test_cuda_that_is_not_there(client: Client) -> None:
    with pytest.raises(errors.ConfigError, match="device='cuda' is not there"):
        collecting(client, "CartPole-v1", cartpole_policy(), device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda(client: Client) -> None:
    with collecting(client, "CartPole-v1", cartpole_policy(), device="cuda") as collector:
        collector.rollout()


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("wait", 0, "clusterenv.inference.wait=0 must be a time above 0: '1 ms'"),
        ("wait", "-1ms", "clusterenv.inference.wait='-1ms' is no time"),
        ("rows", 0, "clusterenv.inference.rows=0 must be a whole number of at least 1"),
    ],
)
def test_bad_settings(client: Client, setting: str, value: Any, message: str) -> None:
    with (
        dask.config.set({f"clusterenv.inference.{setting}": value}),
        pytest.raises(errors.ConfigError, match=message),
    ):
        collecting(client, "CartPole-v1", cartpole_policy())
