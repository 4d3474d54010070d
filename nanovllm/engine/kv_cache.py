"""The KV cache of one rank: its memory, and the layers' views of it.

Knows bytes and pages, nothing about who owns a page. Before `allocate` the layers have empty views, which the
warm-up writes nothing to.
"""

import math
from collections import defaultdict

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.kernels.kv_store import CacheLayout
from nanovllm.layers.attention import Attention

MAX_BLOCKS = 1 << 18  # making Python's objects for more blocks takes longer than loading a small model


class KVCache:
    """
    Layers whose heads are alike in size and number share a tensor of `pages`: [2, layers, blocks,
    block_size, kv_heads of this rank, head_dim], or as the layout has it; 2 is keys and values. Of most
    models that is all layers. A block has its number in each tensor.
    """

    def __init__(self, config: Config, layers: list[Attention], device: torch.device, layout: CacheLayout):
        self.config = config
        self.layout = layout
        self.device = device
        self.groups = defaultdict(list)  # layers, by the shape of their pages
        for layer in layers:
            sizes = config.kvcache_block_size, layer.num_kv_heads, layer.head_dim
            self.groups[layout.page_shape(*sizes)].append(layer)
        elements = sum(len(group) * math.prod(shape) for shape, group in self.groups.items())
        self.block_bytes = layout.planes * elements * layout.dtype.itemsize
        self.allocate(0)

    def num_blocks_in(self, budget: int) -> int:
        """How many blocks fit into so many bytes. ValueError if these are too few for one sequence."""
        config, block_bytes = self.config, self.block_bytes
        needed = -(-config.max_model_len // config.kvcache_block_size)
        if budget // block_bytes < needed:
            needed_bytes = needed * block_bytes
            raise ValueError(
                f"the KV cache of one sequence of max_model_len={config.max_model_len} tokens needs "
                f"{needed_bytes:,} bytes, {needed_bytes - budget:,} more than there are; "
                f"raise gpu_memory_utilization (now {config.gpu_memory_utilization}), or lower "
                f"max_model_len, max_num_batched_tokens (now {config.max_num_batched_tokens}) or the size of "
                f"kv_cache_dtype (now {config.kv_cache_dtype!r})"
            )
        # Only the prefix cache has a use for more blocks than the running sequences can need.
        if config.enable_prefix_caching:
            most = max(MAX_BLOCKS, needed)
        else:
            most = config.max_num_seqs * needed
        return min(most, budget // block_bytes)

    def allocate(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pages: list[torch.Tensor] = []
        for page, layers in self.groups.items():
            # Zeros, since a page that was never written may be read under a mask, where a NaN would survive.
            shape, dtype = (self.layout.planes, len(layers), num_blocks, *page), self.layout.dtype
            if self.device.type == "cpu" and num_blocks:  # numpy gives an array without elements no strides
                # Only mapped: it takes room page by page as it is written.
                pages = torch.from_numpy(np.zeros(shape, f"i{dtype.itemsize}")).view(dtype)
            else:
                pages = torch.zeros(shape, dtype=dtype, device=self.device)
            self.pages.append(pages)
            for i, layer in enumerate(layers):
                layer.k_cache = pages[0, i]
                layer.v_cache = pages[-1, i]
