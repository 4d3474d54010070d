"""How much of a device's memory a step takes, and how much is left."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nanovllm.engine.batch import Batch
from nanovllm.engine.interfaces import LogitsProcessor

CPU_KV_CACHE_BYTES = 4 << 30


def largest_batch(config: Any, num_tokens: int, processors: tuple[LogitsProcessor, ...] = ()) -> Batch:
    """
    The largest prefill step that has at most so many tokens: as many sequences as possible, with all logits
    processors but those that wait for the host, which would leave the step unfinished.
    """
    num_seqs = min(config.max_num_seqs, num_tokens)
    more = max(0, config.max_model_len - 2)  # tokens beside the first, in the longest prompt
    lengths = (1 + np.clip(num_tokens - num_seqs - more * np.arange(num_seqs), 0, more)).tolist()
    wanted = sum(1 << i for i, processor in enumerate(processors) if not processor.waits_for_host)
    messages = {processor.name: processor.largest(lengths[0]) for processor in processors}
    zeros = np.zeros(sum(lengths), dtype=np.int64)
    return Batch(
        num_seqs,
        wanted,
        slot_updates=None,
        messages=messages,
        slots=np.arange(num_seqs, dtype=np.int32),
        lens_q=lengths,
        lens_k=lengths,
        token_ids=zeros,
        positions=zeros,
        slot_mapping=zeros.astype(np.int32) - 1,
    )


def bytes_taken_by(step: Callable[[], Any], device: torch.device) -> int:
    """The bytes that torch takes from the GPU while this runs."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.max_memory_reserved(device) - before


def most_positions(config: Any, device: torch.device) -> int:
    """
    How many positions a sequence has at most, as far as can be said before there is a KV cache: that the free
    memory would hold, and at least those of the largest prefill step, which the warm-up runs without it.
    """
    tokens = config.num_kvcache_blocks * config.kvcache_block_size
    if config.num_kvcache_blocks == -1:
        hf_config, memory = config.hf_config, bytes_left(device, 1.0)
        kv_heads = max(1, hf_config.num_key_value_heads // config.tensor_parallel_size)
        values = 2 * hf_config.num_hidden_layers * kv_heads * hf_config.head_dim
        tokens = memory // (values * config.kv_cache_torch_dtype.itemsize)
    return min(config.max_model_len, max(tokens + 1, config.max_num_batched_tokens))


def bytes_left(device: torch.device, share: float) -> int:
    """How much of this share of the card's memory is free."""
    if device.type != "cuda":
        return CPU_KV_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    return int(total * share) - (total - free)
