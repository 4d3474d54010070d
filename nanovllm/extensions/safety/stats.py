"""Counts of what an engine has done."""

from collections import Counter
from typing import Any

from nanovllm.engine.interfaces import Observer
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence


class Finished(Observer):
    """Counts requests that have come to their end, and the tokens of their prompts."""

    def started(self, engine: Any) -> None:
        self.counts = engine.finished = Counter()

    def ended(self, seq: Sequence) -> None:
        if seq.finish_reason != "abort":
            cached = seq.num_prompt_tokens_cached
            self.counts.update(requests=1, prompt=seq.num_prompt_tokens, cached=cached)


class StatsLLM(LLMEngine):
    finished: Counter  # see Finished

    def stats(self) -> dict[str, float]:
        """
        Counts since the engine was made: requests (finished, running and waiting now), prompt tokens of the
        finished ones and how many of these the KV cache had, what the prefix cache and the attention back-end
        count, tokens drawn, preemptions, and tokens drawn per second of computing. And how many tokens the KV
        cache has room for.
        """
        counts, scheduler, config = self.finished, self.scheduler, self.config
        return {
            "num_requests_finished": counts["requests"],
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "num_prompt_tokens": counts["prompt"],
            "num_cached_tokens": counts["cached"],
            **getattr(self.parts.prefix_cache, "stats", dict)(),
            "cache_hit_rate": counts["cached"] / max(counts["prompt"], 1),
            **getattr(self.batches.backend, "stats", dict)(),
            "num_generated_tokens": scheduler.num_drawn_tokens,
            "num_preemptions": scheduler.num_preemptions,
            "num_kv_cache_tokens": config.num_kvcache_blocks * config.kvcache_block_size,
            "tokens_per_second": scheduler.num_drawn_tokens / max(self.seconds, 1e-9),
        }
