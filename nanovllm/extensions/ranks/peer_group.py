"""The group of ranks whose GPUs write into each other's memory; as in the core where one of them cannot."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nanovllm.config import Config
from nanovllm.distributed.group import Group
from nanovllm.extensions.ranks.cuda_ipc import SharedBuffer
from nanovllm.extensions.ranks.gloo_group import GlooGroup, OrderedGroup
from nanovllm.extensions.ranks.kernels.all_reduce import PeerMemory

STAND_IN_BYTES = 1 << 20  # enough for a row


@dataclass(eq=False)
class PeerGroup(Group):
    config: Config | None = None
    peers: PeerMemory | None = field(default=None, init=False)
    shared: SharedBuffer | None = field(default=None, init=False)

    def connect(self, device: torch.device) -> None:
        can_map = all(self.gather("access", int(has_peer_access(self.config))))
        if not (can_map and self._map_peers(device)):
            super().connect(device)

    def _map_peers(self, device: torch.device) -> bool:
        """Map the other GPUs' memory. If this fails on one rank, all ranks return False."""
        max_num_seqs, dtype = self.config.max_num_seqs, self.config.torch_dtype
        num_words = PeerMemory.num_words(self.size, max_num_seqs)
        self.shared = SharedBuffer(num_words, self.rank, device, functools.partial(self.gather, "memory"))
        if not all(self.gather("mapped", int(self.shared.is_mapped))):
            return False
        self.peers = PeerMemory(self.rank, self.shared.addresses, self.shared.buffer, dtype, max_num_seqs)
        self.gather("connected", 0)
        return True

    def all_reduce(self, x: Tensor) -> Tensor:
        return super().all_reduce(x) if self.peers is None else self.peers.all_reduce(x)

    def all_reduce_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        owner = super() if self.peers is None else self.peers
        return owner.all_reduce_add_rms_norm(x, residual, weight, eps)

    def best_token(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        owner = super() if self.peers is None else self.peers
        return owner.best_token(scores, token_ids)

    def abort(self) -> None:
        owner = super() if self.peers is None else self.peers
        owner.abort()

    def close(self) -> None:
        """Also frees this rank's buffer, which no other rank may have mapped any more."""
        super().close()
        self.peers = None
        if self.shared is not None:
            self.shared.close()
            self.shared = None


def has_peer_access(config: Config) -> bool:
    """Whether each of the engine's GPUs can write into the memory of all others."""
    devices = [config.device_of(rank) for rank in range(config.tensor_parallel_size)]
    if devices[0].type != "cuda" or not torch.version.cuda:
        return False
    return all(torch.cuda.can_device_access_peer(*pair) for pair in itertools.permutations(devices, 2))


def group_maker(config: Config) -> Callable[..., Group]:
    """What makes the group through which several ranks compute together. ValueError if it cannot be exact."""
    if config.device_of(0).type == "cuda":
        if config.exact and config.tensor_parallel_size > 2 and not has_peer_access(config):  # NCCL adds up
            raise ValueError(
                f"exact=True needs tensor_parallel_size of at most 2, got {config.tensor_parallel_size}: "
                "these GPUs cannot write into each other's memory"
            )
        return functools.partial(PeerGroup, config=config)
    return OrderedGroup if config.exact else GlooGroup


def stand_in(config: Config, rank: int) -> PeerGroup:
    """On the CPU, with nobody at the other end: to compile the kernels that a connected group launches."""
    size, max_num_seqs = config.tensor_parallel_size, config.max_num_seqs
    group = PeerGroup(rank, size, config=config)
    if size > 1:
        num_words = PeerMemory.num_words(size, max_num_seqs, STAND_IN_BYTES)
        buffer = torch.empty(num_words, dtype=torch.int32)
        memory = [0] * size, buffer, config.torch_dtype, max_num_seqs, STAND_IN_BYTES
        group.peers = PeerMemory(rank, *memory)
    return group
