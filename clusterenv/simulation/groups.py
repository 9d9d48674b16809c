"""Groups of a shard's environments that are stepped in turn, each in a thread of its own.

While the head chooses the actions of one group, another steps. Two never step at the same time, as
environments may share what belongs to their process, such as NumPy's global random numbers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from clusterenv.data.fragment import Fragment, side_by_side
from clusterenv.policies.policy import Context
from clusterenv.simulation.engines import build
from clusterenv.simulation.engines.base import Engine, EnvDescription, EnvRaised, Recipe
from clusterenv.simulation.env_faults import EnvFaults
from clusterenv.simulation.head_policy import Choice, Choose, HeadPolicy
from clusterenv.simulation.loop import EnvLoop
from clusterenv.simulation.policy_runner import Acting

__all__ = ["EnvGroups", "GroupedLoop", "Span", "spans_of"]

T = TypeVar("T")


class Span(NamedTuple):
    """Consecutive environments: so many, from global index ``first``."""

    first: int
    num_envs: int


def spans_of(first: int, count: int, groups: int) -> list[Span]:
    """Split environments into groups as evenly as possible; none is empty.

    >>> spans_of(10, 5, 2), spans_of(3, 1, 2)
    ([Span(first=10, num_envs=3), Span(first=13, num_envs=2)], [Span(first=3, num_envs=1)])
    """
    groups = min(groups, count)
    small, more = divmod(count, groups)
    counts = [small + (index < more) for index in range(groups)]
    return [Span(first + sum(counts[:index]), size) for index, size in enumerate(counts)]


class _Thread:
    """Calls what it is given, one after the other, in a thread that ends with the process.

    It holds the lock ``turn`` meanwhile.
    """

    def __init__(self, name: str, turn: threading.Lock) -> None:
        self._turn = turn
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        result: Future[T] = Future()
        self._calls.put((call, result))
        return result

    def end(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (given := self._calls.get()) is not None:
            call, result = given
            try:
                with self._turn:
                    found = call()
                result.set_result(found)
            except BaseException as error:
                result.set_exception(error)


class EnvGroups:
    """The environments of a shard in groups; each is made, stepped and closed by its thread."""

    def __init__(self, recipe: Recipe, first: int, count: int, groups: int) -> None:
        self.num_envs = count
        self.spans = spans_of(first, count, groups)
        self.turn = threading.Lock()
        """Held by the thread that steps."""
        self.threads = [_Thread(f"clusterenv-group-{span.first}", self.turn) for span in self.spans]
        self.engines: list[Engine] = []
        try:
            for thread, span in zip(self.threads, self.spans, strict=True):
                self.engines.append(thread.submit(partial(build, recipe, *span)).result())
        except BaseException:
            self.close()
            raise
        parts = [engine.description for engine in self.engines]
        spaces = tuple(space for part in parts for space in part.observation_spaces)
        self.description: EnvDescription = replace(parts[0], observation_spaces=spaces)

    def close(self) -> None:
        """Close all environments; wait for what they are doing."""
        closing = [
            thread.submit(engine.close)
            for thread, engine in zip(self.threads, self.engines, strict=False)
        ]
        for thread in self.threads:
            thread.end()
        for closed in closing:
            closed.result()


class GroupedLoop:
    """The env loops of all groups, as if they were one; see :class:`EnvLoop`.

    ``choosers`` asks the head for the actions of a group, one for each.
    """

    def __init__(
        self,
        groups: EnvGroups,
        policy: HeadPolicy,
        horizon: int,
        seeds: Sequence[int | None],
        choosers: Sequence[Choose],
        faults: EnvFaults | None = None,
        text: str = "refuse",
    ) -> None:
        self._groups = groups
        self._merged: list[dict[str, Any]] = []  # buffers to reuse
        begins = groups.spans[0].first

        def make(index: int) -> EnvLoop:
            first, count = groups.spans[index]
            own = seeds[first - begins : first - begins + count]
            bound = policy.bind(self._in_turn(choosers[index]))
            return EnvLoop(groups.engines[index], bound, first, horizon, own, faults, text=text)

        made = [thread.submit(partial(make, i)) for i, thread in enumerate(groups.threads)]
        self._loops = [loop.result() for loop in made]

    def _in_turn(self, choose: Choose) -> Choose:
        """Let another group step while one waits for the head."""
        turn = self._groups.turn

        def waiting(obs: list[Tensor], context: Context) -> Choice:
            turn.release()
            try:
                return choose(obs, context)
            finally:
                turn.acquire()

        return waiting

    @property
    def steps(self) -> int:
        """Steps of each environment so far, on average."""
        counts = (span.num_envs for span in self._groups.spans)
        steps = (loop.steps * count for loop, count in zip(self._loops, counts, strict=True))
        return sum(steps) // self._groups.num_envs

    @property
    def waiting_rows(self) -> int:
        """Rows that were recorded and are in no fragment."""
        return sum(loop.waiting_rows for loop in self._loops)

    def interrupt(self) -> None:
        """Abandon the current fragment, which raises ``Interrupted``; from any thread."""
        for loop in self._loops:
            loop.interrupt()

    def fragment(
        self, acting: Acting, fresh: bool = False, between: Callable[[], Acting] | None = None
    ) -> Fragment:
        """Step all groups until a fragment is full, and return it."""
        begins = self._groups.spans[0].first

        def make(index: int) -> Fragment:
            try:
                return self._loops[index].fragment(acting, fresh, between)
            except EnvRaised as fault:
                fault.env += self._groups.spans[index].first - begins  # its row in the shard
                raise

        threads = enumerate(self._groups.threads)
        made = [thread.submit(partial(make, index)) for index, thread in threads]
        done, _ = wait(made, return_when=FIRST_EXCEPTION)
        for each in done:
            each.result()  # raises if it has failed; then others may still wait for the head
        parts = [each.result() for each in made]
        if len(parts) == 1:
            return parts[0]
        fragment = side_by_side(parts, self._merged.pop() if self._merged else {})
        for loop, part in zip(self._loops, parts, strict=True):
            loop.recycle(part)
        return fragment

    def recycle(self, fragment: Fragment) -> None:
        """Take back the buffers of a fragment that is not read any more."""
        if len(self._loops) == 1:
            self._loops[0].recycle(fragment)
        elif fragment.block is not None and len(self._merged) < 4:
            self._merged.append(fragment.block)
