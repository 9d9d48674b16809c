"""Errors of the library in the words of the command line: options instead of Python calls.

The library's messages show the Python call that would have been right. At a terminal that call is a
few options: ``make_vec(…, shards=4)`` is ``--shards 4``.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Collection, Iterator
from typing import Any

__all__ = ["TRACEBACK", "Wording", "without_traceback"]

TRACEBACK = "--traceback"
"""Option of every command: print the traceback of a worker too."""

_CALLS = "make_vec|Collector|Evaluator|ReplayStore|RolloutStore|Random|connect|env_spaces"
_RULES = (
    (
        r"(?:clusterenv\.)?Divergence\(([\d.e-]+), max_lag=(\d+)\)",
        r"--sync divergence --threshold \1 --max-lag \2",
    ),
    (r"(?:clusterenv\.)?Divergence\(([\d.e-]+)\)", r"--sync divergence --threshold \1"),
    (r"(?:clusterenv\.)?Every\((\d+)\)", r"--sync every --every \1"),
    (r"(?:clusterenv\.)?Restarts\((?:count=)?(\d+)[^()]*\)", r"--restarts \1"),
    (r"(?:clusterenv\.)?EnvFaults\((?:count=)?(\d+)[^()]*\)", r"--env-faults \1"),
)
"""Rules of the library that are options, whatever the command."""
_SYNONYMS = {"n_workers": ("shards", "workers"), "shards": ("workers",)}
_WORKER = re.compile(
    r"([^\n]+?)\.?((?:\n[^\n]+)*)\n\nOn the worker:\n((?:.|\n)*?)(?=\n\n\d+\. |\Z)"
)
"""What failed, notes below that, and the traceback; of each of several errors."""


class Wording:
    """Says the library's errors as a command would.

    Parameters
    ----------
    options
        Names of the command's options, as of the fields of its dataclass.

    Examples
    --------
    >>> words = Wording(["cluster", "shards"])
    >>> words.of("cluster='slurm' has no workers yet: make_vec(…, cluster='slurm', shards=4)")
    '--cluster slurm has no workers yet: --cluster slurm --shards 4'
    """

    def __init__(self, options: Collection[str]) -> None:
        self._options = frozenset(options)

    def of(self, text: str) -> str:
        """Return a message in the words of the command line."""
        text = re.sub(r"dask\.config\.set\(\{'([\w.-]+)': ('[^']*'|[\w.]+)\}\)", _variable, text)
        # No file of certificates is an option.
        text = re.sub(r"pass the cluster's, connect\(.*?\)\), or (name them)", r"\1", text)
        for pattern, replacement in _RULES:
            name = replacement.partition(" ")[0][2:].replace("-", "_")
            if name in self._options:
                text = re.sub(rf"(?:\b{name}=)?{pattern}", replacement, text)
        text = self._calls(text)
        text = re.sub(
            r"(?<![\w/.='\"-])(?<!\w\()(\w+)=('[^']*'|\"[^\"]*\"|-?[\w.]*\w)",
            lambda found: self._option(found[1], found[2]) or found[0],
            text,
        )
        return re.sub(
            r"(?<![\w/.=-])(\w+)(?= must be )",
            lambda found: (
                f"--{name.replace('_', '-')}" if (name := self._name(found[1])) else found[0]
            ),
            text,
        )

    def _calls(self, text: str) -> str:
        """Replace calls by their keyword arguments, as far as these are options."""
        parts, end = [], 0
        for found in re.finditer(rf"(?:clusterenv\.)?\b(?:{_CALLS})\(", text):
            if found.start() < end or (close := _closing(text, found.end())) is None:
                continue
            arguments = _split(text[found.end() : close - 1])
            options = [
                option
                for name, equals, value in (argument.partition("=") for argument in arguments)
                if equals and (option := self._option(name.strip(), value.strip()))
            ]
            if options:
                parts += [text[end : found.start()], " ".join(options)]
                end = close
        return "".join([*parts, text[end:]])

    def _name(self, name: str) -> str | None:
        """Return the option that a parameter of the library is here."""
        known = (each for each in (name, *_SYNONYMS.get(name, ())) if each in self._options)
        return next(known, None)

    def _option(self, name: str, value: str) -> str | None:
        option = self._name(name)
        if option is None:
            return None
        given = _literal(value)
        dashed = option.replace("_", "-")
        if isinstance(given, bool):
            return f"--{'' if given else 'no-'}{dashed}"
        several = given if isinstance(given, (list, tuple)) else (given,)
        return " ".join([f"--{dashed}", *(shlex.quote(str(each)) for each in several)])


def without_traceback(text: str) -> str:
    r"""Return a message with the last line of each worker's traceback instead of all of it.

    Examples
    --------
    >>> trace = 'Traceback:\n  File "a.py", line 7, in step\nValueError: no'
    >>> without_traceback(f"environment 3 raised in step.\n\nOn the worker:\n{trace}")
    'environment 3 raised in step: ValueError: no'
    """

    def brief(found: re.Match[str]) -> str:
        failed, notes, trace = found.groups()
        essence = _essence(trace)
        return f"{failed}{notes}" if essence in failed else f"{failed}: {essence}{notes}"

    return _WORKER.sub(brief, text)


def _essence(trace: str) -> str:
    """Return the line of a traceback that names the exception."""
    lines = trace.rstrip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    rest = [line for line in lines[frames[-1] + 1 if frames else 0 :] if line.strip()]
    return next((line for line in rest if not line.startswith(" ")), rest[-1] if rest else "")


def _variable(found: re.Match[str]) -> str:
    """Return an environment variable that is a setting of Dask."""
    name = found[1].upper().replace("-", "_").replace(".", "__")
    return f"DASK_{name}={found[2]}"


def _closing(text: str, start: int) -> int | None:
    """Return where a parenthesis that opened before ``start`` ends."""
    depth = 1
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if not depth:
            return index + 1
    return None


def _split(arguments: str) -> Iterator[str]:
    """Yield the arguments of a call."""
    depth, start = 0, 0
    for index, letter in enumerate(arguments):
        depth += {**dict.fromkeys("([{", 1), **dict.fromkeys(")]}", -1)}.get(letter, 0)
        if letter == "," and not depth:
            yield arguments[start:index]
            start = index + 1
    yield arguments[start:]


def _literal(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return value
