"""The group of ranks on a CPU that gives up at once when another rank ends before it is connected.

gloo's ranks find each other's addresses in a store. Those of torch wait minutes for a missing one, and
nothing can end that wait.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.distributed.group import POLL_SECONDS, Group, publish


class GlooGroup(Group):
    def _connect(self, device: torch.device) -> None:
        store, connected = Store(Path(self.folder)), Future()
        # In a thread, so that `check` can end the wait.
        threading.Thread(target=fulfil, args=(connected, self._gloo, store), daemon=True).start()
        try:
            self._wait_until(lambda: connected.done())  # a method would keep it, see below
        except BaseException:
            store.is_wanted = False
            wait([connected], timeout=1)  # longer only if a rank whose address is there does not answer
            # The port is open as long as `connected` lives, which the traceback of this exception would keep.
            del connected
            raise
        self.backend = connected.result()


def fulfil(result: Future, function: Callable[..., Any], *args: Any) -> None:
    """Give the future what the function returns or raises."""
    try:
        result.set_result(function(*args))
    except BaseException as error:
        result.set_exception(error)
        del result  # or it would keep itself alive by the exception's traceback


class Store(dist.Store):
    """Each address is a file, in the folder of the engine."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder, self.is_wanted = folder, True

    def _path(self, key: str) -> Path:
        return self.folder / f"gloo.{key.replace('/', '.')}"

    def set(self, key: str, value: bytes) -> None:
        publish(self._path(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._path(key).read_bytes()

    def wait(self, keys: list[str], _timeout: timedelta | None = None) -> None:
        while not all(self._path(key).exists() for key in keys):
            if not self.is_wanted:
                raise RuntimeError("the wait for the other ranks has been given up")
            time.sleep(POLL_SECONDS)
