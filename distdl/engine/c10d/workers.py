"""Threads for waits that may never end: gloo's cannot be taken back."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

_GRACE = 5.0  # seconds for all threads to end


class Workers:
    """Threads for waits that may never end; as many as there are such waits."""

    def __init__(self) -> None:
        self.idle: list[queue.SimpleQueue] = []
        self.all: list[tuple[threading.Thread, queue.SimpleQueue]] = []

    def run(self, job: Callable[[], None]) -> None:
        """Let a thread do it."""
        try:
            jobs = self.idle.pop()
        except IndexError:
            jobs = queue.SimpleQueue()
            thread = threading.Thread(target=self._work, args=(jobs,), name="distdl-gloo", daemon=True)
            self.all.append((thread, jobs))
            thread.start()
        jobs.put(job)

    def _work(self, jobs) -> None:
        while (job := jobs.get()) is not None:
            job()
            del job
            self.idle.append(jobs)

    def busy(self) -> bool:
        """Whether some wait has not ended."""
        return len(self.idle) < len(self.all)

    def stop(self) -> None:
        """End the threads: one that came back from a wait while Python ends would end the process by a signal."""
        for _, jobs in self.all:
            jobs.put(None)
        until = time.monotonic() + _GRACE
        for thread, _ in self.all:
            thread.join(max(0.0, until - time.monotonic()))
