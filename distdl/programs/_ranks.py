"""The launcher of ``--engine torch``: it starts n processes of this machine, and has the store at which they meet. It
ends with the first of them that fails, and ends the others.

    python _ranks.py N command...

Nothing listens on a network: the store is at 127.0.0.1, and so is gloo.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's folder: its modules must not hide the standard library's

import contextlib
import os
import signal
import socket
import subprocess
import time

_GRACE = 5.0  # seconds that ranks have to end, before they are killed


def variables(n: int, port: int) -> dict[str, str]:
    """What every rank is told, as torchrun tells it."""
    found = {
        "WORLD_SIZE": n,
        "LOCAL_WORLD_SIZE": n,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    loopback = next((interface for _, interface in socket.if_nameindex() if interface.startswith("lo")), None)
    if loopback is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        found["GLOO_SOCKET_IFNAME"] = loopback
    return {name: str(value) for name, value in found.items()}


def end(ranks: list[subprocess.Popen]) -> None:
    """End all that run: ask first."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    until = time.monotonic() + _GRACE
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, until - time.monotonic()))
        if rank.poll() is None:
            rank.kill()
            rank.wait()


def main(n: int, command: list[str]) -> int:
    """Run; returns the exit code of the first that fails, as a shell counts signals."""

    def interrupt(number, frame):
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(s, signal.SIG_IGN)  # once is enough
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)
    place = socket.create_server(("127.0.0.1", 0), backlog=max(128, n))
    ranks: list[subprocess.Popen]
    common, ranks = {**os.environ, **variables(n, place.getsockname()[1])}, []
    store: list = []  # to the end of this process
    try:
        for r in range(n):  # they wait for an answer of the store, which begins below
            env = {**common, "RANK": str(r), "LOCAL_RANK": str(r)}
            ranks.append(subprocess.Popen([*command], env=env, stdin=None if r == 0 else subprocess.DEVNULL))
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        port = place.getsockname()[1]
        store.append(TCPStore("127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=place.detach()))
        while True:
            codes = [rank.poll() for rank in ranks]
            failed = [code for code in codes if code]
            if failed:
                return 128 - failed[0] if failed[0] < 0 else failed[0]
            if None not in codes:
                return 0
            time.sleep(0.02)
    finally:
        end(ranks)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
