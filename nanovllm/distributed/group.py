"""The tensor-parallel ranks as layers see them: which rank this process is, and sums over all ranks.

A layer takes the group that it is built under (`use_group`) and keeps it. Without one it is rank 0 of 1, and
every operation returns its input. On a CPU the ranks communicate through gloo, on GPUs through NCCL. torch's
default process group is left alone: it belongs to the user's program.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.kernels.layernorm import add_rms_norm

CONNECT_TIMEOUT = timedelta(seconds=10)  # counted from when all ranks are ready
FOREVER = timedelta(days=1000)  # no timeout: ranks.py notices a dead rank, and a slow one may take its time
POLL_SECONDS = 0.002


@dataclass(eq=False)
class Group:
    """
    This process's place among the ranks, and, after `connect`, their way to compute together. All ranks make
    the same calls in the same order, and a step's last one is `best_token`.
    """

    rank: int = 0
    size: int = 1
    store: dist.Store = field(default_factory=dist.HashStore)  # where the ranks find each other
    check: Callable[[], None] = lambda: None  # called while waiting for other ranks; raises to end the wait
    backend = None  # torch's, after `connect`

    def connect(self, device: torch.device) -> None:
        """Connect to the other ranks, as soon as all of them call this."""
        if self.size == 1:
            return
        self.gather("ready", 0)  # waits for ranks that are still loading, however long
        if device.type == "cuda":
            self.backend = dist.ProcessGroupNCCL(self.store, self.rank, self.size)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            options._timeout = CONNECT_TIMEOUT
            self.backend = dist.ProcessGroupGloo(self.store, self.rank, self.size, options)

    def gather(self, name: str, value: int) -> list[int]:
        """Every rank's value, when all ranks have called this with the same name, each name once. Slow."""
        keys = [f"{name}.{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], str(value))
        while not self.store.check(keys):
            self.check()
            time.sleep(POLL_SECONDS)
        return [int(self.store.get(key)) for key in keys]

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x [tokens, features], which may be overwritten."""
        if self.size == 1:
            return x
        options = dist.AllreduceOptions()
        options.timeout = FOREVER
        # Held until the operation has ended, if it ever does: freeing the backend would wait for that.
        backend = self.backend
        try:
            backend.allreduce([x], options).wait()
        finally:
            del backend
        return x

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """
        (rms_norm(total), total) for total = sum of every rank's x + residual, all [tokens, hidden]. With more
        than two ranks, each rank's `total` may be valid only in the rows of its share.
        """
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def best_token(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        """
        Of every rank's scores float32 [batch] and token ids int64 [batch], those with the highest score; of
        equal scores the lowest id. All ranks return the same.
        """
        # A sum in which all ranks but one have 0 at each place; float64 holds token ids exactly.
        of_all_ranks = scores.new_zeros(self.size, 2, len(scores), dtype=torch.float64)
        of_all_ranks[self.rank, 0], of_all_ranks[self.rank, 1] = scores, token_ids
        scores, token_ids = self.all_reduce(of_all_ranks).unbind(1)
        return token_ids.masked_fill(scores < scores.amax(0), torch.inf).amin(0).long()

    def abort(self) -> None:
        """Let the device finish although other ranks are gone. What it computes from now on is wrong."""
        if self.backend is not None and self.backend.name() == "nccl":  # gloo raises an error by itself
            self.backend.abort()

    def close(self) -> None:
        """Free what this rank shared with the others, which must have ended."""
        self.abort()
        self.backend = None


_group = ContextVar("group", default=Group())  # noqa: B039


def get_group() -> Group:
    """The group that layers built now belong to."""
    return _group.get()


@contextlib.contextmanager
def use_group(group: Group) -> Iterator[None]:
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)
