"""Workloads: requests with the time at which they arrive. The same seed always gives the same ones."""

import random
from typing import NamedTuple


class Arrival(NamedTuple):
    seconds: float
    prompt: list[int]
    max_tokens: int


def tokens(rng: random.Random, count: int, vocab_size: int = 1000) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


def steadily(rng: random.Random, prompts: list[list[int]], rate: float, max_tokens: int) -> list[Arrival]:
    """So many a second on average, at random moments."""
    moment, arrivals = 0.0, []
    for prompt in prompts:
        moment += rng.expovariate(rate)
        arrivals.append(Arrival(moment, prompt, rng.randint(1, 2 * max_tokens)))
    return arrivals


def shared_prefix(count: int = 200, prefix: int = 300, rate: float = 50, seed: int = 0) -> list[Arrival]:
    """All prompts begin alike and go on differently, as with few-shot examples."""
    rng = random.Random(seed)
    common = tokens(rng, prefix)
    return steadily(rng, [common + tokens(rng, rng.randint(5, 60)) for _ in range(count)], rate, 50)


def long_among_short(
    count: int = 200, long: int = 3000, every: int = 20, rate: float = 50, seed: int = 0
) -> list[Arrival]:
    """Short questions, and now and then a whole document."""
    rng = random.Random(seed)
    lengths = [long if i % every == every // 2 else rng.randint(10, 100) for i in range(count)]
    return steadily(rng, [tokens(rng, length) for length in lengths], rate, 60)


def burst(count: int = 300, seed: int = 0) -> list[Arrival]:
    """All at once, of every length."""
    rng = random.Random(seed)
    return [Arrival(0.0, tokens(rng, rng.randint(10, 1000)), rng.randint(10, 400)) for _ in range(count)]


def skewed_reuse(
    count: int = 400, prefixes: int = 60, length: int = 256, rate: float = 50, seed: int = 0
) -> list[Arrival]:
    """Prompts that begin with one of several texts, some of which are far more popular than others."""
    rng = random.Random(seed)
    texts = [tokens(rng, length) for _ in range(prefixes)]
    popularity = [1 / (rank + 1) for rank in range(prefixes)]
    chosen = rng.choices(texts, popularity, k=count)
    return steadily(rng, [text + tokens(rng, rng.randint(5, 40)) for text in chosen], rate, 30)
