"""The attention back-end that reads a prefix of several sequences once, in front of any other back-end.

It computes the prefixes of a decode step for all sequences that begin with them, and leaves to the back-end
behind it what each sequence has of its own. Rank 0 plans this when other sequences decode than before; each
device has tables of what is planned, which lie at fixed addresses, and is told what changes in them.
"""

import numpy as np
import torch
from torch import Tensor

from nanovllm.config import Config
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.transfer import to_device
from nanovllm.extensions.prefixes.groups import PrefixGroups, max_slots, max_tasks, table_sizes
from nanovllm.extensions.prefixes.kernels.shared_prefix import (
    MAX_PARTS,
    SharedPrefixes,
    WithPrefix,
    can_share,
    members_per_task,
    shared_prefix_attention,
    shared_prefix_attention_torch,
)
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.runtime import cdiv, num_multiprocessors
from nanovllm.layers.attention import Attention, AttentionBackend
from nanovllm.utils.context import Context


class CascadeBackend(AttentionBackend):
    """Decode steps have a plan where sharing is worth it; without one the back-end behind does all."""

    def __init__(self, behind: AttentionBackend, config: Config, device: torch.device):
        super().__init__(behind.layout)
        self.behind, self.config, self.device = behind, config, device
        sizes = config.hf_config
        self.heads_per_kv_head = sizes.num_attention_heads // sizes.num_key_value_heads
        can_plan = config.attention_backend != "flash" and not sizes.tokens_in_reach
        self.largest_plan = config.enable_prefix_caching and can_plan
        self.num_grouped_tokens = self.num_counted_steps = 0  # up to the last plan

    def for_layer(self, layer: Attention) -> AttentionBackend:
        """Prefixes may lie before a layer's first token, of which it reads less by itself."""
        sizes = layer.num_heads // layer.num_kv_heads, layer.head_dim, self.config.torch_dtype.itemsize
        is_fit = self.largest_plan and can_share(self.heads_per_kv_head, *sizes, self.device)
        return self if is_fit and layer.variant.sees_all else self.behind.for_layer(layer)

    def allocate(self, device: torch.device) -> None:
        config = self.config
        kv_heads = max(1, config.hf_config.num_key_value_heads // config.tensor_parallel_size)
        num_tasks = cdiv(2 * num_multiprocessors(device), kv_heads)
        num_rows = 4 * cdiv(config.max_num_seqs, 4)  # each table begins at a multiple of 16 bytes
        self.groups = PrefixGroups(num_rows, MAX_PARTS, members_per_task(self.heads_per_kv_head), num_tasks)
        sizes = table_sizes(num_rows, MAX_PARTS)
        self.buffer = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
        self.tables = SharedPrefixes(*self.buffer.split([*sizes.values()]))

    def plan(self, sequences: list[Sequence]) -> tuple[bool, np.ndarray | None]:
        """The message, int32 [2, changes], has indices into the tables and their new values."""
        self._count_steps()
        changes = self.groups.update(sequences)
        return self.groups.num_grouped_tokens > 0, changes

    def _count_steps(self) -> None:
        """The last plan ends."""
        self.num_grouped_tokens = self.stats()["num_grouped_tokens"]
        self.num_counted_steps = self.num_decode_steps

    def stats(self) -> dict[str, int]:
        num_steps = self.num_decode_steps - self.num_counted_steps
        return {"num_grouped_tokens": self.num_grouped_tokens + num_steps * self.groups.num_grouped_tokens}

    def receive(self, message: np.ndarray) -> None:
        indices, values = to_device(message, self.buffer.device)
        self.buffer.index_put_((indices,), values)

    def inputs(self, batch_size: int, key: bool, is_empty: bool = False) -> SharedPrefixes:
        lens, num_parts, parts, members, tasks, num_tasks = self.tables
        shared = SharedPrefixes(
            lens[:batch_size],
            num_parts[:batch_size],
            parts.view(-1, MAX_PARTS)[:batch_size],
            members[: max_slots(batch_size)],
            tasks.view(-1, 4)[: max_tasks(batch_size)],
            num_tasks[:1],
        )
        return SharedPrefixes(*map(torch.zeros_like, shared)) if is_empty else shared

    def reset(self) -> None:
        self._count_steps()
        self.groups.reset()
        self.buffer.zero_()

    def close(self) -> None:
        self.buffer = self.tables = None

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        return self.behind.prefill(q, k, v, variant, step)

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, variant: AttentionVariant, step: Context
    ) -> Tensor:
        if step.attention_plan is not None:
            attend = shared_prefix_attention
            if self.behind.is_reference:
                attend = shared_prefix_attention_torch
            shared: SharedPrefixes = step.attention_plan
            caches = k_cache, v_cache, step.block_tables
            variant = WithPrefix(variant, shared, *attend(q, *caches, variant, shared, self.layout))
        return self.behind.decode(q, k_cache, v_cache, variant, step)
