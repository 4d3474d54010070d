"""Cascade attention: a back-end in front of the core's, which reads a prefix of several sequences once.

It computes those decode steps in which prefixes are shared, and leaves all others to the back-end behind it.
Rank 0 makes a new plan when other sequences decode than before, and sends its tables to every
device, which has them at addresses that never change.
"""

import math

import numpy as np
import torch
from torch import Tensor

from nanovllm.config import Config
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.slots import to_device
from nanovllm.extensions.prefixes.kernels.shared_prefix import (
    CascadePlan,
    can_share,
    cascade_attention,
    cascade_attention_torch,
    plan_shapes,
    queries_per_item,
)
from nanovllm.extensions.prefixes.planner import CascadePlanner, WholePrefixPlanner
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.runtime import cdiv, num_multiprocessors
from nanovllm.layers.attention import Attention, AttentionBackend
from nanovllm.utils.context import Context


class CascadeBackend(AttentionBackend):
    """A step has a plan, and the key True, where sharing pays; without one the back-end behind does all."""

    make_planner = CascadePlanner
    only_plans = False  # the back-end behind computes planned steps, too

    def __init__(self, behind: AttentionBackend, config: Config):
        super().__init__(behind.layout)
        self.behind = behind
        self.prefill = behind.prefill
        self.config = config
        sizes = config.hf_config
        self.heads_per_kv_head = sizes.num_attention_heads // sizes.num_key_value_heads
        self.largest_plan = (
            config.enable_prefix_caching and config.attention_backend != "flash" and not sizes.tokens_in_reach
        )
        self.num_read = 0  # tokens that steps have read through prefixes, for each sequence they belong to

    def for_layer(self, layer: Attention) -> AttentionBackend:
        """Prefixes may lie before a layer's first token, of which it reads less by itself."""
        behind = self.behind.for_layer(layer)  # which may refuse it
        sizes = layer.num_heads // layer.num_kv_heads, layer.head_dim, self.config.torch_dtype.itemsize
        is_fit = self.largest_plan and can_share(self.heads_per_kv_head, *sizes, self.buffer.device)
        return self if is_fit and layer.variant.hooks.first_token is None else behind

    def allocate(self, device: torch.device) -> None:
        config = self.config
        kv_heads = max(1, config.hf_config.num_key_value_heads // config.tensor_parallel_size)
        num_items = cdiv(2 * num_multiprocessors(device), kv_heads)
        num_rows = 4 * cdiv(config.max_num_seqs, 4)  # each table begins at a multiple of 16 bytes
        self.planner = self.make_planner(num_rows, queries_per_item(self.heads_per_kv_head), num_items)
        shapes = plan_shapes(num_rows)
        sizes = [math.prod(shape) for shape in shapes]
        self.buffer = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.tables = CascadePlan(*map(Tensor.view, self.buffer.split(sizes), shapes))

    def plan(self, sequences: list[Sequence], is_new: bool) -> tuple[bool, np.ndarray | None]:
        """The message has all tables."""
        message = self.planner.update(sequences) if is_new and self.largest_plan else None
        self.num_read += self.planner.num_prefix_tokens
        return self.planner.num_prefix_tokens > 0, message

    def stats(self) -> dict[str, int]:
        return {"num_grouped_tokens": self.num_read}

    def receive(self, message: np.ndarray) -> None:
        self.buffer.copy_(to_device(message, self.buffer.device))

    def inputs(self, batch_size: int, key: bool) -> CascadePlan:
        return self.tables

    def close(self) -> None:
        self.buffer = self.tables = None

    def decode(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        if step.attention_plan is None or self.only_plans:
            return self.behind.decode(q, k, v, variant, step)
        attend = cascade_attention_torch if self.config.attention_backend == "torch" else cascade_attention
        return attend(q, k, v, variant, step, self.layout)


class WholePrefixBackend(CascadeBackend):
    """Makes plans for a back-end that reads prefixes itself, and adds up tokens in order."""

    make_planner = WholePrefixPlanner
    only_plans = True
