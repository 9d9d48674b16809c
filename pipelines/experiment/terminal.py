"""Standard output and error of a run in a terminal, its worker processes' included, line by line.

A panel that is redrawn in place must know of every line that appears. Dask's log handlers hold on
to the standard error that they found, and worker processes inherit the descriptors: what they write
past the panel would leave half of it behind.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable
from typing import TextIO

__all__ = ["Terminal"]

_PATIENCE = 5.0  # seconds for a terminal to take what was written


class _Reader:
    """Reads lines from a pipe, as long as this process lives.

    Python's fork server, from which later runs of this process get their workers, inherits the
    descriptors of the first: a pipe that was closed would fail whatever they print.
    """

    def __init__(self) -> None:
        self.say: Callable[[str], bool] | None = None
        self.tty = os.dup(1)
        self._pipe, self.write = os.pipe()
        self._wake, self._waker = os.pipe()
        self._read = threading.Event()
        threading.Thread(target=self._run, name="clusterenv-terminal", daemon=True).start()

    def flush(self) -> None:
        """Wait until all that was written so far is shown."""
        self._read.clear()
        os.write(self._waker, b"\n")
        self._read.wait(_PATIENCE)

    def _run(self) -> None:
        rest = b""
        while True:
            ready, _, _ = select.select([self._pipe, self._wake], [], [])
            if self._pipe in ready:
                *lines, rest = (rest + os.read(self._pipe, 65_536)).split(b"\n")
            else:  # all is read, and somebody waits for that
                os.read(self._wake, 1)
                lines, rest = ([rest] if rest else []), b""
            for line in lines:
                self._show(line)
            if self._pipe not in ready:
                self._read.set()

    def _show(self, line: bytes) -> None:
        try:
            say = self.say
            shown = say is not None and say(line.decode(errors="replace").rstrip("\r"))
        except Exception:  # this thread must live, or the processes that write block
            shown = False
        if not shown:
            os.write(self.tty, line + b"\n")


_reader: _Reader | None = None


class Terminal:
    """Redirects the standard descriptors that are a terminal into a function; one at a time.

    Parameters
    ----------
    say
        Called with each line, from a thread; ``False`` if it shows no lines now: then the line
        goes straight to the terminal.

    Attributes
    ----------
    out
        The terminal itself.
    """

    def __init__(self, say: Callable[[str], bool]) -> None:
        global _reader
        sys.stdout.flush()
        sys.stderr.flush()
        self._reader = _reader = _reader or _Reader()
        self.out: TextIO = os.fdopen(os.dup(self._reader.tty), "w")
        self._saved = {fd: os.dup(fd) for fd in (1, 2) if os.isatty(fd)}
        self._reader.say = say
        for fd in self._saved:
            os.dup2(self._reader.write, fd)

    def flush(self) -> None:
        """Wait until all that was written so far is shown."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._reader.flush()

    def close(self) -> None:
        """Give the descriptors back, after all that was written so far."""
        self.flush()
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
            os.close(saved)
        self._reader.flush()
        self._reader.say = None
        self.out.close()
