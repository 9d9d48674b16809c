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


class Terminal:
    """Redirects the standard descriptors that are a terminal into a function.

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
        self._say = say
        sys.stdout.flush()
        sys.stderr.flush()
        self._saved = {fd: os.dup(fd) for fd in (1, 2) if os.isatty(fd)}
        self.out: TextIO = os.fdopen(os.dup(self._saved[1]), "w")
        self._pipe, write = os.pipe()
        self._wake, self._waker = os.pipe()
        self._read, self._closing = threading.Event(), False
        for fd in self._saved:
            os.dup2(write, fd)
        os.close(write)
        self._thread = threading.Thread(target=self._run, name="clusterenv-terminal", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rest = b""
        while True:
            ready, _, _ = select.select([self._pipe, self._wake], [], [])
            if self._pipe not in ready:  # all is read, and somebody waits for that
                os.read(self._wake, 1)
                self._read.set()
                if self._closing:
                    break
                continue
            chunk = os.read(self._pipe, 65_536)
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._show(line)
        if rest:
            self._show(rest)

    def _show(self, line: bytes) -> None:
        try:
            shown = self._say(line.decode(errors="replace").rstrip("\r"))
        except Exception:  # this thread must live, or the processes that write block
            shown = False
        if not shown:
            os.write(self._saved[1], line + b"\n")

    def flush(self) -> None:
        """Wait until all that was written so far is shown."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._read.clear()
        os.write(self._waker, b"\n")
        self._read.wait(_PATIENCE)

    def close(self) -> None:
        """Give the descriptors back, after all that was written so far."""
        self.flush()
        for fd, saved in self._saved.items():
            os.dup2(saved, fd)
        self._closing = True
        os.write(self._waker, b"\n")
        self._thread.join()
        self.out.close()
        for fd in (*self._saved.values(), self._pipe, self._wake, self._waker):
            os.close(fd)
