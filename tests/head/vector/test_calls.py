"""The order of calls: what may follow what, without any environment."""

from __future__ import annotations

import multiprocessing
import pickle

import numpy as np
import pytest
from gymnasium import error as gym_error

from clusterenv.errors import NothingSent, ResetNeeded, ResultsPending, WaitTimeout
from clusterenv.head.vector.calls import AsyncState, Calls

WAITING = [AsyncState.WAITING_RESET, AsyncState.WAITING_STEP, AsyncState.WAITING_CALL]
NONE_ENDED = np.zeros(3, np.bool_)


@pytest.fixture
def calls() -> Calls:
    calls = Calls(3, autoreset=True)
    calls.reset(None)
    return calls


@pytest.mark.parametrize("state", WAITING)
def test_one_asynchronous_call_at_a_time(calls: Calls, state: AsyncState) -> None:
    calls.begin(state, lambda: "done")
    for check in (calls.check_idle, calls.check_received, calls.check_ready):
        with pytest.raises(ResultsPending, match=f"`thing`.*`{state.value}`.*_wait") as caught:
            check("thing")
        assert isinstance(caught.value, gym_error.AlreadyPendingCallError)
        assert caught.value.name == pickle.loads(pickle.dumps(caught.value)).name == state.value
    assert calls.end(state)() == "done"
    assert calls.state is AsyncState.DEFAULT
    calls.check_ready("thing")


@pytest.mark.parametrize("state", WAITING)
def test_only_the_call_that_is_under_way_can_be_waited_for(calls: Calls, state: AsyncState) -> None:
    for begun in (None, *WAITING):
        if begun is state:
            continue
        if begun is not None:
            calls.begin(begun, lambda: None)
        with pytest.raises(NothingSent, match=f"`{state.value}_wait` without any") as caught:
            calls.end(state)
        assert isinstance(caught.value, gym_error.NoAsyncCallError)
        assert caught.value.name == state.value
        assert calls.state is (begun or AsyncState.DEFAULT)


def test_what_was_sent_must_be_received_by_environment(calls: Calls) -> None:
    calls.begin_recv(np.array([1]))
    calls.check_ready("send", np.array([0, 2]))
    with pytest.raises(ResultsPending, match=r"environments \[1\].*recv\(\) first"):
        calls.check_ready("send", np.array([0, 1]))
    with pytest.raises(ResultsPending, match=r"step\(\) while"):
        calls.check_ready("step")
    calls.reset(None)
    calls.check_ready("step")


def test_the_first_call_is_a_reset() -> None:
    calls = Calls(3, autoreset=True)
    assert not calls.started
    with pytest.raises(ResetNeeded, match="before reset"):
        calls.check_ready("step")
    calls.reset(None)
    assert calls.started


@pytest.mark.parametrize("state", WAITING)
def test_a_reset_must_follow_when_nobody_saw_the_results_of_a_step(
    calls: Calls, state: AsyncState
) -> None:
    calls.begin(state, lambda: None)
    calls.end(state)
    calls.expired(state)
    assert calls.state is AsyncState.DEFAULT
    assert calls.started is (state is AsyncState.WAITING_CALL)
    if not calls.started:
        with pytest.raises(ResetNeeded, match=f"{state.value}_wait.. has timed out"):
            calls.check_ready("step")
    calls.reset(None)
    calls.check_ready("step")


def test_without_autoreset_an_episode_that_is_over_needs_a_reset() -> None:
    calls = Calls(3, autoreset=False)
    calls.reset(None)
    calls.stepped(slice(None), np.array([False, True, False]), NONE_ENDED)
    calls.stepped(np.array([2]), np.array([False]), np.array([True]))
    calls.check_ready("send", np.array([0]))
    with pytest.raises(ResetNeeded, match=r"environments \[1, 2\] are over.*reset_mask"):
        calls.check_ready("step")
    calls.reset(np.array([False, True, False]))
    calls.check_ready("send", np.array([0, 1]))
    with pytest.raises(ResetNeeded, match=r"environments \[2\]"):
        calls.check_ready("step")


def test_a_timeout_is_that_of_multiprocessing_and_that_of_python() -> None:
    assert issubclass(WaitTimeout, multiprocessing.TimeoutError)
    assert issubclass(WaitTimeout, TimeoutError)
