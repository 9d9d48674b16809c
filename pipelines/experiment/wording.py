"""Wording of what is printed: numbers with their nouns, and docstrings without their markup."""

from __future__ import annotations

import re

__all__ = ["count", "plain"]


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, in the singular if it is one.

    Examples
    --------
    >>> count(1, "pull"), count(2_000, "pull"), count(2, "copy", "copies")
    ('1 pull', '2,000 pulls', '2 copies')
    """
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def plain(docstring: str, prog: str | None = None) -> str:
    """Return a docstring as a terminal shows it: without backticks and roles.

    ``python -m`` and a module become the command ``prog``, which is how it was called.

    Examples
    --------
    >>> plain("See :func:`~clusterenv.connect` and ``clusterenv doctor``.")
    'See clusterenv.connect and clusterenv doctor.'
    >>> plain("``python -m pipelines.ppo --env CartPole-v1``", "clusterenv train ppo")
    'clusterenv train ppo --env CartPole-v1'
    """
    text = re.sub(r":[a-z:]+:`~?([^`]+)`", r"\1", docstring.strip())
    text = re.sub(r"`+([^`]+)`+", r"\1", text)
    if prog is not None:
        text = re.sub(r"python -m pipelines[\w.]*", prog, text)
    return text
