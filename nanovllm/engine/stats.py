"""What an engine has done, in numbers."""

from collections import Counter
from typing import Any


def stats_of(engine: Any, counts: Counter) -> dict[str, float]:
    """
    Counts since the engine was made: requests (finished, running and waiting now), prompt tokens of the
    finished ones and how many of these the KV cache had, what the prefix cache and the attention back-end
    count, tokens drawn, preemptions, and tokens drawn per second of computing. And how many tokens the KV
    cache has room for.
    """
    scheduler, config = engine.scheduler, engine.config
    num_generated = counts["drawn"] - scheduler.num_surplus_tokens
    return {
        "num_requests_finished": counts["finished"],
        "num_requests_running": len(scheduler.running),
        "num_requests_waiting": len(scheduler.waiting),
        "num_prompt_tokens": counts["prompt"],
        "num_cached_tokens": counts["cached"],
        **scheduler.block_manager.prefix_cache.stats(),
        "cache_hit_rate": counts["cached"] / max(counts["prompt"], 1),
        **engine.batches.backend.stats(),
        "num_generated_tokens": num_generated,
        "num_preemptions": scheduler.num_preemptions,
        "num_kv_cache_tokens": config.num_kvcache_blocks * config.kvcache_block_size,
        "tokens_per_second": num_generated / counts["seconds"] if counts["seconds"] else 0.0,
    }
