"""How a run is interrupted."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupt"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Ends a run on Ctrl-C, or on SIGTERM, which batch systems send before they end a job.

    While the run starts there is nothing to save: the first signal raises ``KeyboardInterrupt``,
    and whatever was started, queued jobs too, is closed on the way out. After :meth:`started` it
    is a wish, :attr:`wanted`, that the run looks at. The second signal acts as usual.

    Parameters
    ----------
    notice
        Printed when the wish is heard.
    quiet
        Print nothing.
    """

    def __init__(self, notice: str, quiet: bool = False) -> None:
        self.wanted = False
        self._starting = True
        self._notice = notice
        self._quiet = quiet
        self._before: dict[int, Any] = {}
        # Python delivers signals to the main thread, and only it may set handlers.
        self._installs = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Interrupt:
        if self._installs:
            self._before = {number: signal.signal(number, self._heard) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()

    def started(self) -> None:
        """Look at :attr:`wanted` from now on."""
        self._starting = False

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        if self._starting:
            raise KeyboardInterrupt(
                f"stopped by {signal.Signals(number).name} while workers started; the jobs and "
                "processes that it had asked for are ended"
            )
        self.wanted = True
        if not self._quiet:
            print(f"\n{self._notice}", flush=True)
