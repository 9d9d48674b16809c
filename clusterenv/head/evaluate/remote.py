"""The head's end of the actor that evaluates: where it is placed, and what if it is lost."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

from distributed import Actor, Client, wait

from clusterenv import config
from clusterenv.cluster.connect import wait_for_workers
from clusterenv.cluster.plugins import protect_shards
from clusterenv.errors import ClosedError, NoWorkers, WorkerLost
from clusterenv.head.evaluate.result import Evaluation
from clusterenv.head.fleet.env_errors import env_error
from clusterenv.head.fleet.launch import EvaluationActor
from clusterenv.head.fleet.placement import choose_worker
from clusterenv.head.fleet.restarts import Restarts
from clusterenv.sync.weights import Weights
from clusterenv.transport.messages import Failure

__all__ = ["RemoteEvaluation"]

logger = logging.getLogger("clusterenv")

_OURS = "clusterenv-"  # keys of shards and evaluators begin with it
_POLL_SECONDS = 0.5
_GRACE_SECONDS = 0.5


class RemoteEvaluation:
    """Evaluates on one worker, and on another one if that is lost.

    ``recipe`` makes the environments, ``spec`` is a pickled ``EvaluationSpec``. One thread calls
    :meth:`open` and :meth:`evaluate`; :meth:`close` may be called by another.
    """

    def __init__(self, client: Client, recipe: bytes, spec: bytes, restarts: Restarts) -> None:
        self._client = client
        self._recipe, self._spec = recipe, spec
        self._restarts = restarts
        self._closing = threading.Event()
        self._key = f"{_OURS}evaluator-{secrets.token_hex(8)}"
        self._incarnation = 0
        self._worker = ""
        self._future: Any = None
        self._actor: Any = None
        protect_shards(client)

    def __str__(self) -> str:
        return f"the evaluator on {self._worker}"

    def open(self, avoid: Collection[str] = ()) -> None:
        """Make the environments on the least loaded worker."""
        if self._closing.is_set():
            raise ClosedError("closed while an evaluation was being placed")
        client, timeout = self._client, config.seconds("timeout.workers")
        load = self._load(wait_for_workers(client, 1, timeout))
        worker = choose_worker(load, avoid)
        assert worker is not None  # at least one was there
        self._worker = worker
        self._incarnation += 1
        self._future = client.submit(
            EvaluationActor,
            key=f"{self._key}-{self._incarnation}",
            workers=[self._worker],
            allow_other_workers=False,
            actor=True,
            pure=False,
        )
        try:
            with client.as_current():  # not Dask's default client
                wait(self._future, timeout)
                self._actor = Actor(EvaluationActor, self._worker, self._future.key)
        except TimeoutError as error:
            self._release()
            raise NoWorkers(
                f"{self._worker} did not take {self} within {timeout:g} s: it is busy with other "
                "tasks, or gone. Give the evaluation a worker of its own"
            ) from error
        self._answer(self._actor.open(self._recipe, self._spec), config.seconds("timeout.call"))

    def evaluate(self, weights: Weights, scalars: Mapping[str, float]) -> Evaluation:
        """Evaluate a version; start again on another worker if this one is lost.

        Raises ``ClosedError`` when it is closed, and what the environments or the policy raised.
        """
        lost: list[float] = []
        while True:
            try:
                if self._actor is None:
                    self.open(avoid={self._worker})
                elif self._should_move():
                    self._stop(config.seconds("timeout.close"))
                    self.open()
                call = self._actor.evaluate(weights.version, weights.buffer, dict(scalars))
                returns, lengths = self._answer(call, config.seconds("timeout.step"))
                return Evaluation(weights.version, returns, lengths)
            except ClosedError:
                self._stop(config.seconds("timeout.close"))  # it may have been placed meanwhile
                raise
            except WorkerLost as error:
                self._release()
                lost.append(time.monotonic())
                pause = self._restarts.wait(lost, lost[-1])
                if pause is None:
                    raise WorkerLost(
                        f"the evaluation of version {weights.version} was lost {len(lost)} times, "
                        f"and {self._restarts} allows no more. The last time: {error}"
                    ) from error
                logger.warning("%s Evaluating on another worker.", error)
                if self._closing.wait(pause):
                    raise ClosedError("closed while an evaluation waited for a restart") from None

    def close(self, timeout: float) -> None:
        """Stop the evaluation, and leave nothing on the worker."""
        self._closing.set()
        self._stop(timeout)

    def _load(self, workers: Collection[str]) -> dict[str, int]:
        """Return how many other shards and evaluators each worker has."""
        held = self._client.has_what()
        return {
            worker: sum(
                str(key).startswith(_OURS) and not str(key).startswith(self._key)
                for key in held.get(worker, ())
            )
            for worker in workers
        }

    def _should_move(self) -> bool:
        """Whether the worker has shards and another has none: it may have joined since."""
        load = self._load(list(self._client.nthreads()))
        return load.get(self._worker, 0) > 0 and 0 in load.values()

    def _answer(self, call: Any, patience: float) -> Any:
        """Wait for the result of a call; at most so long without a step of the environments."""
        steps, since = -1, time.monotonic()
        while True:
            try:
                answer = call.result(timeout=_POLL_SECONDS)
            except TimeoutError:
                if self._closing.is_set():
                    raise ClosedError("closed while an evaluation was running") from None
            except (OSError, ValueError) as error:  # ValueError: Dask knows of no such actor
                raise WorkerLost(
                    f"{self} is gone: its process ended or cannot be reached. The worker's log "
                    "says why."
                ) from error
            else:
                if isinstance(answer, Failure):
                    if self._closing.is_set():  # it was interrupted
                        raise ClosedError("closed while an evaluation was running")
                    raise env_error(str(self), answer)
                return answer
            if time.monotonic() - since < patience:
                continue
            before = steps
            actor = self._actor
            with contextlib.suppress(OSError):  # a timeout too
                steps = before if actor is None else actor.steps().result(timeout=patience)
            if steps == before:
                raise WorkerLost(
                    f"{self} has made no step for {patience:g} s: an environment hangs, or the "
                    "worker is gone."
                )
            since = time.monotonic()

    def _stop(self, timeout: float) -> None:
        """End the actor, and say so in the log if it does not end in time."""
        actor, worker = self._actor, self._worker
        if actor is not None and self._connected and self._future.status == "finished":
            try:
                ended = actor.close(timeout).result(timeout=timeout + _GRACE_SECONDS)
            except (OSError, RuntimeError, ValueError):
                ended = self._future.status != "finished"  # a lost worker runs nothing
            if not ended:
                logger.warning(
                    "%s did not stop within %g s: an environment hangs. To end its process: "
                    "client.restart_workers([%r])",
                    self,
                    timeout,
                    worker,
                )
        self._release()

    def _release(self) -> None:
        future, self._future, self._actor = self._future, None, None
        if future is not None and self._connected:
            self._client.cancel([future], force=True)

    @property
    def _connected(self) -> bool:
        return bool(self._client.status == "running")
