"""How would the engine stand 10,000 requests, without waiting for them?

The Simulator has the real scheduler, block manager and prefix cache; only the model and the clock are
replaced, by a formula for the time of a step. Change the formula to that of your card, or the options, and
see what users would see.
"""

import time

from harness import Arrival, callers_of, run, shared_prefix, table

from nanovllm.engine.batch import Batch
from nanovllm.extensions.lab.simulator import SimulatedRunner, Simulator

COUNT = 10_000


def slower_card(batch: Batch) -> float:
    """Seconds of a step: a third of the speed in prefill, half of it in decode."""
    if batch.is_prefill:
        return 4e-3 + 9e-6 * len(batch.token_ids)
    return 3e-3 + 30e-6 * batch.num_sequences


def simulate(trace: list[Arrival], **options):
    with Simulator(kvcache_block_size=64, **options) as engine:
        return run(engine, trace)


def main() -> None:
    trace = shared_prefix(count=COUNT, rate=1000, max_tokens=8)
    start = time.perf_counter()
    reports = {
        "plain": simulate(trace, num_kvcache_blocks=8000),
        "no prefixes": simulate(trace, num_kvcache_blocks=8000, enable_prefix_caching=False),
        "slower card": simulate(trace, num_kvcache_blocks=8000, cost=slower_card),
    }
    seconds = time.perf_counter() - start
    print(table(reports))
    simulated = sum(report.seconds for report in reports.values())
    print(f"\n3 x {COUNT} requests in {seconds:.0f} s; they would have taken {simulated:.0f} s")
    assert all(report.token_ids == reports["plain"].token_ids for report in reports.values())
    assert reports["plain"].num_cached_tokens > 0 == reports["no prefixes"].num_cached_tokens
    with Simulator(cost=slower_card) as engine, callers_of(SimulatedRunner):
        run(engine, trace[:3])


if __name__ == "__main__":
    main()
