"""What no request can exceed, and what ends it, whatever else is running."""

from typing import Any

from nanovllm.sampling_params import SamplingParams


class Limits:
    def __init__(self, config: Any):
        self.config = config
        self.eos = frozenset(config.eos)
        # In the longest sequence, whose last token needs no room in the cache: nothing is computed after it.
        num_cache_tokens = config.num_kvcache_blocks * config.kvcache_block_size
        self.max_num_tokens = min(config.max_model_len, num_cache_tokens + 1)

    def end_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that end such a request."""
        eos = frozenset() if params.ignore_eos else self.eos
        return eos | frozenset(params.stop_token_ids) if params.stop_token_ids else eos

    def check(self, num_prompt_tokens: int, num_tokens: int = 1, where: str = "") -> None:
        """Raise ValueError, with `where` in front, if there is no room for so many tokens after a prompt."""
        total, config = num_prompt_tokens + num_tokens, self.config
        if total <= self.max_num_tokens:
            return
        length, longest = config.max_model_len, config.hf_config.context_limit
        if total > length:
            how = f"may be raised to {longest}," if length < longest else "is"
            limit = f"max_model_len is {length}, which {how} the checkpoint's own limit"
        else:
            limit = f"{config.num_kvcache_blocks} KV cache blocks of {config.kvcache_block_size} tokens are "
            limit += f"enough for {self.max_num_tokens}; raise num_kvcache_blocks or gpu_memory_utilization"
        needed = f"the prompt has {num_prompt_tokens} tokens and needs room for {total}"
        raise ValueError(f"{where}{needed}, but {limit}")
