"""An environment's exception at the head: its own type, beside ours."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from typing import Any

import pytest
from worlds import LevelError

from clusterenv.errors import EnvError, EnvGivenUp
from clusterenv.head.fleet.env_errors import raised_by_env
from clusterenv.worker.failures import failure_of


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Slotted(LookupError):
    __slots__ = ("place",)

    def __str__(self) -> str:
        return f"at {self.place}, {self.unknown}"  # type: ignore[attr-defined]


class Final(ArithmeticError):
    def __init_subclass__(cls) -> None:
        raise TypeError("no subclass of this one")


def decoding() -> UnicodeDecodeError:
    with pytest.raises(UnicodeDecodeError) as caught:
        b"\xff".decode()
    return caught.value


@pytest.mark.parametrize("kind", [EnvError, EnvGivenUp])
@pytest.mark.parametrize(
    "cause",
    [
        ValueError("no"),
        KeyError("level"),
        AttributeError("no attribute", name="colour"),
        FileNotFoundError(2, "no such file", "level.json"),
        decoding(),
        LevelError(99, "cave"),
        Frozen(7),
        Slotted("where"),
        RuntimeError("diverged"),
        Exception("anything"),
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_an_error_is_of_both_kinds(kind: type[EnvError], cause: Exception) -> None:
    error = raised_by_env(kind, "environment 3 raised in step.", cause)
    for copied in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert isinstance(copied, kind)
        assert isinstance(copied, type(cause))
        assert str(copied) == "environment 3 raised in step."
        assert type(copied) is type(error)
        assert type(copied).__name__.startswith(kind.__name__)
    assert error.__cause__ is cause
    assert type(error) is type(raised_by_env(kind, "another", cause))


def test_attributes_are_those_of_the_cause() -> None:
    def made(cause: Exception) -> Any:
        error = raised_by_env(EnvError, "message", cause)
        return pickle.loads(pickle.dumps(error))

    assert made(FileNotFoundError(2, "no such file", "level.json")).filename == "level.json"
    assert made(LevelError(99, "cave")).level == 99
    assert made(Frozen(7)).code == 7
    slotted = Slotted("where")
    slotted.place = "cave"
    assert made(slotted).place == "cave"
    assert made(decoding()).start == 0


@pytest.mark.parametrize(
    ("cause", "base"),
    [
        (Final("no"), ArithmeticError),  # the nearest that allows it
        (ExceptionGroup("many", [ValueError()]), EnvError),
        (StopIteration(3), EnvError),  # would end a loop without a word
        (SystemExit(3), EnvError),  # would end the head
        (KeyboardInterrupt(), EnvError),
        (None, EnvError),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_combined_is_an_error_of_ours(cause: Any, base: type[Exception]) -> None:
    error = raised_by_env(EnvError, "message", cause)
    assert isinstance(error, base)
    assert isinstance(error, EnvError)
    assert not isinstance(error, (StopIteration, SystemExit, KeyboardInterrupt))
    assert str(pickle.loads(pickle.dumps(error))) == "message"


def test_an_exception_with_arguments_of_its_own_travels() -> None:
    pickled = failure_of(LevelError(99, "cave"), 0, "step").error
    assert pickled is not None
    error = pickle.loads(pickled)
    assert type(error) is LevelError
    assert (error.level, error.name, str(error)) == (99, "cave", "no such level: 99")


def test_of_an_exception_that_cannot_be_pickled_the_rest_travels() -> None:
    lock = threading.Lock()
    error = ValueError("no")
    error.lock = lock  # type: ignore[attr-defined]
    pickled = failure_of(error, 0, "step").error
    assert pickled is not None
    assert repr(pickle.loads(pickled)) == "ValueError('no')"
    failure = failure_of(ValueError("no", lock), 0, "step")
    assert failure.error is None
    assert "ValueError: ('no'," in failure.traceback
