"""Short forms of objects: one line for a prompt or a log, a small table for a notebook."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

__all__ = ["Summary", "decimals"]

_LONGEST = 120  # characters of a value


class Summary:
    """Base of objects that :func:`repr` and notebooks show by what matters of them.

    ``repr`` must not fail, so an object that was not wholly made is shown by its class alone.
    """

    def _summary(self) -> Mapping[str, Any]:
        """Return what matters, by name; the empty name is for what names the object."""
        raise NotImplementedError

    def _shown(self) -> dict[str, str]:
        try:
            return {name: _short(value) for name, value in self._summary().items()}
        except Exception:  # an attribute that is not there yet, or a lost connection
            return {}

    def __repr__(self) -> str:
        parts = (f"{name}={value}" if name else value for name, value in self._shown().items())
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_html_(self) -> str:
        shown = self._shown()
        title = html.escape(f"{type(self).__name__} {shown.pop('', '')}".strip())
        rows = "".join(
            f"<tr><td style='text-align: left'>{html.escape(name.replace('_', ' '))}</td>"
            f"<td style='text-align: left'>{html.escape(value)}</td></tr>"
            for name, value in shown.items()
        )
        return f"<div><strong>{title}</strong><table>{rows}</table></div>"


def decimals(value: float | None) -> str | None:
    """Return a number as people read it; ``None`` stays.

    Examples
    --------
    >>> decimals(20.456), decimals(123456.7), decimals(None)
    ('20.5', '123,457', None)
    """
    if value is None:
        return None
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _short(value: Any) -> str:
    """Return a value in a few characters; text that is formatted already as it is."""
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
