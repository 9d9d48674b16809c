"""The actor that evaluates: a stop that comes before a call, or while it begins, ends it too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from agents import Cycle
from distributed import Client
from worlds import Slow

from clusterenv.data.buffer_pool import BufferPool
from clusterenv.data.pickling import dumps_by_value, loads
from clusterenv.head.fleet.launch import make_recipe, pickled_recipe
from clusterenv.simulation.fragment_builder import Interrupted
from clusterenv.sync.weights import manifest_of, pack
from clusterenv.transport.messages import Failure
from clusterenv.worker.evaluation import EvaluationActor, EvaluationSpec, _Player


@pytest.mark.usefixtures("leaves_nothing")
def test_a_call_that_comes_after_the_stop_is_answered(client: Client) -> None:
    """The head evaluates and closes in different threads, and Dask keeps no order of calls."""
    future = client.submit(EvaluationActor, actor=True, pure=False)
    actor = future.result(timeout=30)
    assert actor.close(10.0).result(timeout=30)
    answer = actor.evaluate(1, np.zeros(0, np.uint8), {}).result(timeout=30)
    assert isinstance(answer, Failure)
    assert "the evaluation was stopped" in answer.traceback
    client.cancel([future], force=True)


@pytest.fixture
def player() -> Iterator[_Player]:
    player = _Player()
    yield player
    player.stop()


def test_a_call_that_waits_for_another_one_does_not_begin_after_the_stop(player: _Player) -> None:
    began, go_on = threading.Event(), threading.Event()
    running: Future[Any] = Future()
    waiting: Future[Any] = Future()
    player.calls.put((lambda _: (began.set(), go_on.wait(30)), running))
    player.calls.put((lambda _: None, waiting))
    assert began.wait(30)
    player.stop()
    go_on.set()
    player.ended.result(timeout=30)
    assert running.done()
    assert not waiting.running()
    assert not waiting.done()


def test_a_stop_while_an_evaluation_begins_ends_it(
    player: _Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no env loop to interrupt yet, and these episodes never end."""
    policy, make_loop = Cycle(), player._make_loop
    recipe = make_recipe(lambda: Slow(0.01), 1, "auto", None, (), {})
    spec = EvaluationSpec(policy, quotas=(1,), seed=1, deterministic=True)
    player.open(pickled_recipe(recipe), dumps_by_value(spec, "the policy"))

    def stopped_meanwhile(time_rows: int) -> Any:
        loop = make_loop(time_rows)
        player.stop()
        return loop

    monkeypatch.setattr(player, "_make_loop", stopped_meanwhile)
    weights = pack(policy, manifest_of(policy), 1, BufferPool())
    answer: Future[Any] = Future()
    player.calls.put((lambda each: each.evaluate(1, weights.buffer, {}), answer))
    failure = answer.result(timeout=30)
    assert isinstance(failure, Failure)
    assert isinstance(loads(failure.error or b""), Interrupted)
    player.ended.result(timeout=30)
