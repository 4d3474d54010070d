"""The group of ranks on a CPU that gives up at once when another rank ends while they connect.

gloo's ranks find each other's addresses in a store. In those of torch nothing can end a wait for one that is
missing.
"""

import functools
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.distributed.group import POLL_SECONDS, Group


class GlooGroup(Group):
    def connect(self, device: torch.device) -> None:
        self.store = EndableStore(self.store, self.check)
        super().connect(device)


class OrderedGroup(GlooGroup):
    """Adds up in the order of the ranks. gloo's own order depends on the tensor's length."""

    def all_reduce(self, x: Tensor) -> Tensor:
        of_all_ranks = x.new_zeros(self.size, *x.shape)
        of_all_ranks[self.rank] = x
        return functools.reduce(torch.add, super().all_reduce(of_all_ranks))


class EndableStore(dist.Store):
    """A store of torch's in which `check` ends a wait, by what it raises."""

    def __init__(self, store: dist.Store, check_ranks: Callable[[], None]):
        super().__init__()
        self.store, self.check_ranks = store, check_ranks

    def set(self, key: str, value: bytes) -> None:
        self.store.set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.store.get(key)

    def wait(self, keys: list[str], _timeout: timedelta | None = None) -> None:
        while not self.check(keys):
            self.check_ranks()
            time.sleep(POLL_SECONDS)
