"""What finding common beginnings costs the host where they bring little.

`python tests/long/hostile_prefixes.py` schedules 4,096 prompts, without a model: such as share nothing, such
as share 100 tokens with one other, and such as share 100 tokens with all others. It prints the seconds of
each, the best of so many rounds, and fails if sharing costs more than 1.2 times what no sharing costs.
"""

import argparse
import gc
import random
import time
from types import SimpleNamespace

import paths  # noqa: F401
from scheduling import ReadingScheduler

from nanovllm.engine.batch import BatchMaker
from nanovllm.engine.sequence import Request, Sequence
from nanovllm.extensions.logits.bias import BiasProcessor
from nanovllm.extensions.prefixes.token_prefixes import HoldBack, TokenPrefixes
from nanovllm.extensions.safety.admission import AdmissionControl
from nanovllm.layers.attention import AttentionBackend
from nanovllm.sampling_params import SamplingParams

COUNT, LENGTH, COMMON, BLOCK_SIZE = 4096, 300, 100, 256
CONFIG = SimpleNamespace(
    max_num_seqs=512,
    max_num_batched_tokens=16384,
    max_model_len=4096,
    eos=(),
    num_kvcache_blocks=20_000,
    kvcache_block_size=BLOCK_SIZE,
    enable_prefix_caching=True,
    model="a model",
    hf_config=SimpleNamespace(context_limit=4096, vocab_size=150_000, tokens_in_reach=0),
)


def make_sequences(group_size: int, seed: int) -> list[Sequence]:
    """The first COMMON tokens are those of a group of so many, in random order."""
    pick = random.Random(seed)
    prompts: list[list[int]] = []
    while len(prompts) < COUNT:
        common = pick.choices(range(100_000), k=COMMON)
        prompts += [common + pick.choices(range(100_000), k=LENGTH - COMMON) for _ in range(group_size)]
    pick.shuffle(prompts)
    return [Sequence(Request(prompt, SamplingParams(0, 2, True), BLOCK_SIZE)) for prompt in prompts]


def seconds(group_size: int, seed: int) -> tuple[float, int]:
    """How long the host works for these prompts, and how many tokens it has copied."""
    prefix_cache = TokenPrefixes()
    admissions = HoldBack(), AdmissionControl(CONFIG, BiasProcessor())
    scheduler = ReadingScheduler(CONFIG, prefix_cache, admissions)
    parts = SimpleNamespace(prefix_cache=prefix_cache, logits_processors=())
    batches = BatchMaker(CONFIG, parts, AttentionBackend())
    sequences = make_sequences(group_size, seed)
    for seq in sequences:
        scheduler.add(seq)
    gc.collect()  # what earlier rounds left
    start = time.process_time()
    while not scheduler.is_finished():
        scheduled, is_prefill = scheduler.schedule()
        batches.prefill(scheduled) if is_prefill else batches.decode(scheduled)
        drawing = scheduler.advance(scheduled)
        scheduler.postprocess(scheduled, [1] * len(drawing), drawing)
    return time.process_time() - start, prefix_cache.num_copied_tokens


def compare(rounds: int) -> dict[int, tuple[float, int]]:
    """By group size: the best time, and the tokens copied."""
    found = [[seconds(size, seed) for size in (1, 2, COUNT)] for seed in range(rounds)]
    return dict(zip((1, 2, COUNT), map(min, zip(*found, strict=True)), strict=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    found = compare(parser.parse_args().rounds)
    for size, (best, copied) in found.items():
        ratio = best / found[1][0]
        print(f"{size:5} prompts begin alike: {best:.3f} s, {ratio:.2f} x, {copied:,} tokens copied")
    assert all(best <= 1.2 * found[1][0] for best, _ in found.values())
