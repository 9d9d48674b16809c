"""How an exception on a worker travels to the head."""

from __future__ import annotations

import traceback
from typing import Any

from clusterenv.data.pickling import dumps, loads
from clusterenv.simulation.decisions import PolicyFault
from clusterenv.simulation.engines.base import EnvRaised
from clusterenv.transport.messages import Failure

__all__ = ["failure_of"]


def failure_of(error: BaseException, first: int, doing: str) -> Failure:
    """Describe an exception raised by the environments that begin at index ``first``."""
    env, note = None, ""
    if isinstance(error, EnvRaised) and error.__cause__ is not None:
        env, doing, note = first + error.env, error.doing, error.note
        error = error.__cause__
    elif isinstance(error, PolicyFault):
        doing = "act"
    text = "".join(traceback.format_exception(error))
    return Failure(env, doing, _pickled(error), text, note)


class _WithoutInit:
    """Pickles an exception whose ``__init__`` takes other arguments than its ``args``."""

    def __init__(self, error: BaseException, attributes: dict[str, Any]) -> None:
        self._parts = type(error), error.args, attributes

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, self._parts


def _restore(
    kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


def _pickled(error: BaseException) -> bytes | None:
    """Return an exception so that the head can unpickle it; ``None`` if that is not possible."""
    for form in (error, _WithoutInit(error, vars(error)), _WithoutInit(error, {})):
        try:
            pickled = dumps(form)
            loads(pickled)
            return pickled
        except Exception:
            continue
    return None
