"""Docstrings are written for Sphinx, and the pages are Markdown: this turns one into the other."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Roles", "markdown"]

_ROLE = re.compile(r":(?:attr|class|data|func|meth):`~?([\w.]+)`")
_GROUPED = re.compile(r"^(\w+(?:, \w+)+)\n((?:(?:    .*)?(?:\n|$))+)", re.MULTILINE)
_SECTION = re.compile(r"^(Parameters|Attributes|Raises)\n-+\n", re.MULTILINE)
_PUBLIC = ("clusterenv", "clusterenv.store", "clusterenv.policies", "clusterenv.errors")


class Roles(griffe.Extension):
    """Turns roles such as ``:func:`` into links, and gives names that share a text one each."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Rewrite the docstring of an object when all of its package has been read."""
        if obj.docstring is not None:
            package = loader.modules_collection["clusterenv"]
            obj.docstring.value = markdown(obj.docstring.value, obj, package)


def markdown(text: str, obj: griffe.Object, package: griffe.Object) -> str:
    """Return a docstring with links instead of roles, and without double colons."""

    def link(match: re.Match[str]) -> str:
        name = match[1]
        return f"[`{name.removeprefix('clusterenv.')}`][{_path(name, obj, package)}]"

    text = re.sub(r"^ *::\n\n", "", _ROLE.sub(link, text), flags=re.MULTILINE)
    return re.sub(r"::$", ":", _one_each(text), flags=re.MULTILINE)


def _one_each(text: str) -> str:
    """Repeat what is said of several names at once, which would all get the first one's type."""
    begin = _SECTION.search(text)
    if begin is None:
        return text

    def entries(match: re.Match[str]) -> str:
        body = match[2].rstrip("\n")
        end = match[2][len(body) :] or "\n"
        return "\n".join(f"{name}\n{body}" for name in match[1].split(", ")) + end

    head, rest = text[: begin.end()], text[begin.end() :]
    other = re.search(r"^\w[\w ]*\n-+\n", rest, re.MULTILINE)
    at = len(rest) if other is None else other.start()
    return head + _GROUPED.sub(entries, rest[:at]) + _one_each(rest[at:])


def _path(name: str, obj: griffe.Object, package: griffe.Object) -> str:
    """Return the full name of what a docstring calls by a short one."""
    if name.startswith("clusterenv."):
        return name
    try:
        return str(obj.resolve(name))
    except griffe.NameResolutionError:
        pass
    for module in _PUBLIC:
        inside = module.removeprefix("clusterenv").lstrip(".")
        members = (package[inside] if inside else package).members
        if name in members:
            return f"{module}.{name}"
    return name
