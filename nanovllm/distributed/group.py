"""The tensor-parallel ranks as layers see them: who I am, and what all of us have together.

A layer takes the group that it is built under (`use_group`) and keeps it. Without one it is rank 0 of 1, for
which every operation here gives back its input. On a CPU the ranks talk through gloo. On GPUs they write into
each other's memory (kernels/all_reduce.py), or through NCCL where they cannot reach it. No default process
group is touched: that belongs to the user's program.
"""

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.distributed.cuda_ipc import SharedBuffer
from nanovllm.kernels.all_reduce import PeerMemory
from nanovllm.kernels.layernorm import add_rms_norm

CONNECT_TIMEOUT = timedelta(seconds=60)  # from the moment when all are there
FOREVER = timedelta(days=1000)  # a rank that died is noticed otherwise, and one that waits is not dead


class Group:
    """
    rank, size: this process's place. folder: where the ranks meet, readable by this user alone. peer_access:
    whether each GPU can write into the others' memory. check: called while waiting for others; raises to end
    the wait.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        folder: str = "",
        peer_access: bool = False,
        check: Callable[[], None] = lambda: None,
    ):
        self.rank = rank
        self.size = size
        self.folder = folder
        self.peer_access = peer_access
        self.check = check
        self.backend: Any = None
        self.peers: PeerMemory | None = None
        self.shared: SharedBuffer | None = None

    def connect(self, device: torch.device, dtype: torch.dtype, max_num_seqs: int) -> None:
        """Reach the other ranks. Activations have this dtype, a step draws up to `max_num_seqs` tokens."""
        if self.size == 1:
            return
        self.gather("ready", 0)  # some may still be loading, which takes as long as it takes
        if device.type == "cpu":
            self.backend = self._interruptible(self._gloo)
        elif not (self.peer_access and self._map_peers(device, dtype, max_num_seqs)):
            self.backend = dist.ProcessGroupNCCL(self._store(), self.rank, self.size)
        self.gather("connected", 0)

    def _map_peers(self, device: torch.device, dtype: torch.dtype, max_num_seqs: int) -> bool:
        """Reach the other GPUs' memory. False, on every rank, if one of them cannot."""
        num_words = PeerMemory.num_words(self.size, max_num_seqs)
        self.shared = SharedBuffer(num_words, self.rank, device, functools.partial(self.gather, "memory"))
        if not all(self.gather("mapped", int(self.shared.is_mapped))):
            return False
        self.peers = PeerMemory(self.rank, self.shared.addresses, self.shared.buffer, dtype, max_num_seqs)
        return True

    def _store(self) -> dist.Store:
        return dist.FileStore(os.path.join(self.folder, "store"), self.size)

    def _gloo(self) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = CONNECT_TIMEOUT
        return dist.ProcessGroupGloo(self._store(), self.rank, self.size, options)

    def gather(self, name: str, value: int) -> list[int]:
        """Every rank's value, once all have called this with the same new name. Slow: for the start."""
        if self.size == 1:
            return [value]
        paths = [os.path.join(self.folder, f"{name}.{rank}") for rank in range(self.size)]
        temporary = paths[self.rank] + ".new"
        with open(temporary, "w") as file:
            file.write(str(value))
        os.rename(temporary, paths[self.rank])
        while not all(map(os.path.exists, paths)):
            self.check()
            time.sleep(0.002)
        values = []
        for path in paths:
            with open(path) as file:
                values.append(int(file.read()))
        return values

    def _interruptible(self, function: Callable[[], Any]) -> Any:
        """What the function returns; `check` may end the wait for it, which then goes on by itself."""
        result: Future = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        while not result.done():
            self.check()
            time.sleep(0.002)
        return result.result()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x [tokens, features]. May be computed in place."""
        if self.size == 1:
            return x
        if self.peers is not None:
            return self.peers.all_reduce(x)
        options = dist.AllreduceOptions()
        options.timeout = FOREVER
        self.backend.allreduce([x], options).wait()
        return x

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """
        (rms_norm(total), total) for total = sum of every rank's x + residual, all [tokens, hidden]. With more
        than two ranks each may keep only its share of the rows of the second up to date.
        """
        if self.peers is not None:
            return self.peers.all_reduce_add_rms_norm(x, residual, weight, eps)
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def best_token(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        """
        Of every rank's scores float32 [batch] and token ids int64 [batch]: the ids with the highest scores,
        the lowest of equals. The same on every rank.
        """
        if self.size == 1:
            return token_ids
        if self.peers is not None:
            return self.peers.best_token(scores, token_ids)
        everyones = scores.new_zeros(self.size, 2, len(scores), dtype=torch.float64)  # exact up to 2^53
        everyones[self.rank, 0], everyones[self.rank, 1] = scores, token_ids
        scores, token_ids = self.all_reduce(everyones).unbind(1)
        return token_ids.masked_fill(scores < scores.amax(0), torch.inf).amin(0).long()

    def abort(self) -> None:
        """Let the device finish although other ranks are gone. What it computes from now on is worthless."""
        if self.peers is not None:
            self.peers.abort()
        elif self.backend is not None and self.backend.name() == "nccl":  # gloo notices by itself
            self.backend.abort()

    def leave(self) -> None:
        """Talk to no other rank any more, when nothing of the group is under way on this one."""
        self.peers = self.backend = None

    def close(self) -> None:
        """Leave the group and free this rank's part of its memory, once nobody else has that mapped."""
        self.leave()
        if self.shared is not None:
            self.shared.close()
            self.shared = None


_group: ContextVar[Group] = ContextVar("group", default=Group())  # noqa: B039


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
