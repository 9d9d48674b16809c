"""A network cable that is long and loses frames, between two network devices of its own.

Kernels can do this too (netem), if they were built so; this needs only ``/dev/net/tun``.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import threading
import time
from collections import deque
from pathlib import Path

__all__ = ["TUN", "Wire"]

TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
_FRAME = 65_536


class Wire(threading.Thread):
    """Carries frames between two devices: late in one direction, with losses in both.

    Parameters
    ----------
    near, far
        Names of the devices, which are made.
    delay
        Seconds that a frame takes from near to far; the way back takes none.
    loss
        The part of all frames that is lost.
    """

    def __init__(self, near: str, far: str, delay: float, loss: float) -> None:
        super().__init__(name="wire", daemon=True)
        self._near, self._far = _open(near), _open(far)
        self._delay, self._loss = delay, loss
        self._random = random.Random(1)
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._ending = threading.Event()
        self.carried = self.lost = 0
        self.start()

    def run(self) -> None:
        while not self._ending.is_set():
            wait = self._under_way[0][0] - time.monotonic() if self._under_way else 0.1
            ready, _, _ = select.select([self._near, self._far], [], [], max(0.0, min(wait, 0.1)))
            for end in ready:
                try:
                    frame = os.read(end, _FRAME)
                except OSError:  # the device is not up yet
                    time.sleep(0.01)
                    continue
                if self._random.random() < self._loss:
                    self.lost += 1
                elif end == self._near:
                    self._under_way.append((time.monotonic() + self._delay, frame))
                else:
                    self._deliver(self._near, frame)
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                self._deliver(self._far, self._under_way.popleft()[1])

    def _deliver(self, end: int, frame: bytes) -> None:
        try:
            os.write(end, frame)
            self.carried += 1
        except OSError:  # the device is down, or out of buffers: as a cable, it does not care
            self.lost += 1

    def close(self) -> None:
        """Take the cable and its devices away."""
        self._ending.set()
        self.join()
        os.close(self._near)
        os.close(self._far)


def _open(name: str) -> int:
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _TAP_WITHOUT_HEADER))
    return device
