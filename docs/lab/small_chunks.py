"""Does a long prompt make everybody else stutter?

A step is all prefill or all decode, so whoever is being answered waits while a long prompt is computed.
Computing it in smaller chunks, with decode steps between, shortens the wait and costs a little throughput.
This policy limits the chunk where somebody waits, and decodes after each.
"""

from harness import callers_of, long_among_short, run, table

from nanovllm.engine.scheduler import SchedulingPolicy
from nanovllm.engine.sequence import Sequence
from nanovllm.extensions.lab.simulator import Simulator


class SmallChunks(SchedulingPolicy):
    def __init__(self, size: int):
        self.size = size

    def chunk(self, seq: Sequence, num_tokens: int) -> int:
        somebody_waits = any(other is not seq for other in self.scheduler.running)
        return min(num_tokens, self.size) if somebody_waits else num_tokens

    def prefers_prefill(self, num_prefills_in_a_row: int) -> bool:
        return num_prefills_in_a_row == 0  # then everybody gets a token


def main() -> None:
    reports = {}
    for name, extensions in {"plain": (), "512": (SmallChunks(512),), "128": (SmallChunks(128),)}.items():
        with Simulator(num_kvcache_blocks=400, extensions=extensions) as engine:
            reports[name] = run(engine, long_among_short(long=3900))
    print(table(reports))
    plain, mine = reports["plain"], reports["512"]
    assert mine.token_ids == plain.token_ids
    assert mine.summary["longest gap max [s]"] < 0.7 * plain.summary["longest gap max [s]"]
    print()
    with Simulator(num_kvcache_blocks=400, extensions=[SmallChunks(128)]) as engine, callers_of(SmallChunks):
        run(engine, long_among_short(count=20))


if __name__ == "__main__":
    main()
