"""What people type: numbers such as 1e6 where steps are counted, and slips, told in one line."""

from __future__ import annotations

import contextlib
import io
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from clusterenv.errors import ConfigError

__all__ = ["in_one_line", "whole_numbers"]

Read = TypeVar("Read")
RULE = frozenset(" -─╮╯")
POWER = re.compile(r"\d[\d_]*(\.\d*)?[eE]\+?\d+")
RULES = (
    (
        r"Error parsing (--\S+): invalid literal for int\(\) with base 10: (.*)",
        r"\1 must be a whole number, got \2",
    ),
    (
        r"Error parsing (--\S+): could not convert string to float: (.*)",
        r"\1 must be a number, got \2",
    ),
    (
        r"Error parsing (--\S+): Could not find valid parse for arguments: \[(.*)\]",
        r"\1 takes other values, got \2",
    ),
    (
        r"invalid choice (.*) for argument '(--\S+)'\. Expected one of \((.*?),?\)\.",
        r"\2 must be one of \3, got \1",
    ),
    (r"Missing value for argument '(--\S+)'\. .*", r"\1 needs a value"),
    (r"Unrecognized options: (-.*)", r"\1: no such option"),
    (r"Unrecognized options: (.*)", r"\1 follows no option"),
)
"""Tyro's complaints, and ours."""


def whole_numbers(words: Sequence[str], hints: dict[str, Any]) -> list[str]:
    """Return a command line with ``1e6`` written out, where an option is a whole number.

    Parameters
    ----------
    words
        The command line.
    hints
        The types of the options, by name.

    Examples
    --------
    >>> whole_numbers(["--total-steps", "1e6", "--lr=1e-3"], {"total_steps": int, "lr": float})
    ['--total-steps', '1000000', '--lr=1e-3']
    """
    said, name = [], ""
    for word in words:
        flag, equals, value = word.partition("=") if word[:2] == "--" else ("", "", word)
        name = flag[2:].replace("-", "_") if flag else name
        if POWER.fullmatch(value) and float(value).is_integer() and _is_whole(hints.get(name)):
            value = str(int(float(value)))
        said.append(f"{flag}{equals}{value}")
    return said


def in_one_line(read: Callable[[], Read], prog: str | None) -> Read:
    """Read a command line with tyro; raise its complaints instead of printing them in a frame.

    Raises
    ------
    ConfigError
        With what was wrong, in one line.
    """
    framed = io.StringIO()
    try:
        with contextlib.redirect_stderr(framed):
            return read()
    except SystemExit as end:
        said = framed.getvalue()
        if end.code in (None, 0) or not said.strip():  # --help
            raise
    text = _complaint(said)
    raise ConfigError(f"{text}; {prog or 'the command'} --help lists the options")


def _complaint(framed: str) -> str:
    r"""Return what tyro says between its title and the first rule, in our words.

    Examples
    --------
    >>> _complaint("Missing argument\n -----\n  Missing value for argument '--lr'. Expected 1.")
    '--lr needs a value'
    """
    plain = re.sub(r"\x1b\[[\d;]*m", "", framed)  # colours, if the terminal has them
    title, *rows = [re.sub(r"^[│╭╰]|[│\s]+$", "", row) for row in plain.strip().splitlines()]
    while rows and set(rows[0]) <= RULE:
        rows = rows[1:]
    end = next((number for number, row in enumerate(rows) if set(row) <= RULE), None)
    first, *names = rows[:end] or [title]
    if first.strip().startswith("Missing from"):
        least = min((len(row) - len(row.lstrip()) for row in names), default=0)
        named = [row.strip() for row in names if len(row) - len(row.lstrip()) == least]
        return f"{' and '.join(named)} missing"
    text = " ".join(" ".join([first, *names]).split())
    for pattern, ours in RULES:
        text = re.sub(pattern, ours, text)
    return text.rstrip(".")


def _is_whole(hint: Any) -> bool:
    """Whether a type has whole numbers, and no others."""
    kinds = set(_kinds(hint))
    return int in kinds and float not in kinds


def _kinds(hint: Any) -> Iterator[Any]:
    inner = typing.get_args(hint)
    if not inner:
        yield hint
    for each in inner:
        yield from _kinds(each)
