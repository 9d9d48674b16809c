"""One process at a time in a directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from clusterenv.data.processes import ProcessGuard
from clusterenv.errors import StoreInUse, StoreUnreadable
from clusterenv.store.journal.files import open_regular

__all__ = ["DirectoryLock"]


class DirectoryLock:
    """Makes a directory, and keeps it to this process until released.

    The system takes the lock back when the process ends, however it ends.

    Raises
    ------
    StoreInUse
        If another store has the directory.
    StoreUnreadable
        If the directory cannot be made or written.
    """

    def __init__(self, directory: Path) -> None:
        self._guard = ProcessGuard(f"the store in {directory}", "files")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd = open_regular(directory / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise StoreUnreadable(
                f"{directory} cannot be written: {error}; choose a directory of your own"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            who = os.read(self._fd, 32).decode(errors="replace").strip()
            os.close(self._fd)
            if who == str(os.getpid()):
                advice = "in this process; close that store, or choose another directory"
            else:
                holder = f"process {who}" if who else "another process"
                advice = f"in {holder}; wait for it, stop it, or choose another directory"
            raise StoreInUse(f"{directory} is open {advice}") from error
        if os.fstat(self._fd).st_nlink == 1:  # by another name, it may be any file of the user's
            with contextlib.suppress(OSError):  # a full disk; the number only helps to find us
                os.ftruncate(self._fd, 0)
                os.write(self._fd, f"{os.getpid()}\n".encode())

    @property
    def is_held(self) -> bool:
        """Whether the directory is this process's, and not that of one which it is a fork of."""
        return self._guard.is_here and self._fd >= 0

    def check(self) -> None:
        """Raise ``WrongProcess`` in a fork of the process that has the directory."""
        self._guard.check()

    def release(self) -> None:
        """Let others in; harmless when done twice, or in a fork."""
        if self.is_held:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
            os.close(self._fd)
            self._fd = -1
