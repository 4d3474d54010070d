"""Who should go first when there are more requests than the engine can run?

In order of arrival, a long prompt makes everybody behind it wait. Shortest first helps most of them, and lets
the long ones starve unless waiting makes a request "shorter" (aging). Longest cached prefix first computes
least. All three are a SchedulingPolicy of a few lines, compared here on a simulated engine: its clock is a
formula, its scheduler is real.
"""

from collections.abc import Iterable

from harness import burst, callers_of, long_among_short, run, skewed_reuse, table

from nanovllm.engine.scheduler import SchedulingPolicy
from nanovllm.engine.sequence import Sequence
from nanovllm.extensions.lab.simulator import Simulator

OPTIONS = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
    "kvcache_block_size": 16,
    "num_kvcache_blocks": 600,
}


class ShortestFirst(SchedulingPolicy):
    """A second of waiting counts as much as `tokens_a_second` tokens less."""

    def __init__(self, tokens_a_second: float = 0.0):
        self.tokens_a_second = tokens_a_second
        self.seen: dict[int, float] = {}  # by seq_id, when it was first met here

    def order(self, waiting: Iterable[Sequence]) -> Iterable[Sequence]:
        now = self.clock()

        def length(seq: Sequence) -> float:
            waited = now - self.seen.setdefault(seq.seq_id, now)
            return seq.num_tokens - waited * self.tokens_a_second

        return sorted(waiting, key=length)


class LongestCachedFirst(SchedulingPolicy):
    def order(self, waiting: Iterable[Sequence]) -> Iterable[Sequence]:
        find = self.scheduler.block_manager.prefix_cache.find  # looks, and changes nothing
        return sorted(waiting, key=lambda seq: seq.num_tokens - find(seq).num_tokens)


def main() -> None:
    policies = {
        "plain": (),
        "shortest": (ShortestFirst(),),
        "with aging": (ShortestFirst(tokens_a_second=200),),
        "cached": (LongestCachedFirst(),),
    }
    for trace in (long_among_short, skewed_reuse):
        arrivals = trace(count=300, rate=300)  # more than such an engine can serve
        reports = {}
        for name, extensions in policies.items():
            with Simulator(**OPTIONS, extensions=extensions) as engine:
                reports[name] = run(engine, arrivals)
        print(f"\n{trace.__name__}\n{table(reports)}")
        plain = reports["plain"]
        assert all(report.token_ids == plain.token_ids for report in reports.values())
        better = "shortest" if trace is long_among_short else "cached"
        assert reports[better].summary["first token p50 [s]"] < plain.summary["first token p50 [s]"]
    print()
    with Simulator(**OPTIONS, extensions=[ShortestFirst()]) as engine, callers_of(ShortestFirst):
        run(engine, burst(count=5))


if __name__ == "__main__":
    main()
