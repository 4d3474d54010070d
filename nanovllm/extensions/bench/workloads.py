"""The work: prompts of random token ids, and how many tokens each is answered with."""

import argparse
import random
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

NUM_IDS = 10_001  # of token ids that are drawn


WORKLOADS = {
    "nano": "",
    "one": "--num-seqs 1 --min-input-len 128 --max-input-len 128 --min-output-len 512 --max-output-len 512",
    "shared": "--num-seqs 1024 --common-len 2000 --min-input-len 50 --max-input-len 50 "
    "--min-output-len 128 --max-output-len 128",
    "groups": "--num-seqs 512 --common-len 3000 --groups 4 --min-input-len 100 --max-input-len 100 "
    "--min-output-len 200 --max-output-len 200",
    "rollout": "--num-seqs 64 --n 16 --min-input-len 1000 --max-input-len 1000 "
    "--min-output-len 256 --max-output-len 256",
    "long": "--num-seqs 16 --min-input-len 16000 --max-input-len 16000 "
    "--min-output-len 256 --max-output-len 256",
    "short": "--num-seqs 2048 --min-input-len 32 --max-input-len 32 --min-output-len 64 --max-output-len 64",
}  # the options that each name stands for, where they differ from their defaults


@dataclass
class Workload:
    """
    Prompts of random ids below `num_ids`, and how many tokens each is to be answered with, `n` times. Those
    that share a prefix begin with the same `common_len` tokens.
    """

    prompts: list[list[int]]
    max_tokens: list[int]
    common_len: int = 0
    n: int = 1
    num_ids: int = NUM_IDS

    @property
    def num_output_tokens(self) -> int:
        return self.n * sum(self.max_tokens)

    def with_fresh_tokens(self, seed: int) -> "Workload":
        """The same lengths with other token ids, all shifted by one distance: what was shared still is."""
        shift = random.Random(seed).randrange(1, self.num_ids)
        prompts = [[(token + shift) % self.num_ids for token in prompt] for prompt in self.prompts]
        return replace(self, prompts=prompts)

    def without_n(self) -> "Workload":
        """The same work with every prompt `n` times, each of them answered once."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.n)]
        max_tokens = [count for count in self.max_tokens for _ in range(self.n)]
        return replace(self, prompts=prompts, max_tokens=max_tokens, n=1)

    def for_warmup(self, limit: int) -> "Workload":
        """
        At most `limit` sequences that end one after another, whatever the workload's lengths: every batch
        size occurs once, for a step.
        """
        prompts = self.with_fresh_tokens(1 << 32).without_n().prompts[:limit]
        return replace(self, prompts=prompts, max_tokens=[i + 2 for i in range(len(prompts))], n=1)

    def segments(self) -> list[tuple[int, int, list[int]]]:
        """
        What is computed once at best, each as (begin, end, tokens sampled by every completion that has it): a
        shared prefix, and what a prompt has of its own.
        """
        prefixes, segments = defaultdict(list), []
        for prompt, max_tokens in zip(self.prompts, self.max_tokens, strict=True):
            prefixes[tuple(prompt[: self.common_len])] += [max_tokens] * self.n
            segments.append((self.common_len, len(prompt), [max_tokens] * self.n))
        return segments + [(0, self.common_len, max_tokens) for max_tokens in prefixes.values()]


def draw_workload(args: argparse.Namespace, vocab_size: int = NUM_IDS) -> Workload:
    """
    Draw each prompt's length and own ids, then all output lengths, then the shared prefixes and who has
    which: the order is part of the workload. A vocabulary may be smaller than the ids, which are folded.
    """
    rng, num_ids = random.Random(args.seed), min(vocab_size, NUM_IDS)
    low, high = args.min_output_len, args.max_output_len

    def tokens(length: int) -> list[int]:
        return [rng.randint(0, NUM_IDS - 1) % num_ids for _ in range(length)]

    own = [tokens(rng.randint(args.min_input_len, args.max_input_len)) for _ in range(args.num_seqs)]
    max_tokens = [rng.randint(low, high) for _ in own]
    if args.spread_output:
        max_tokens = [round(each) for each in np.linspace(low, high, args.num_seqs)]
    common = [tokens(args.common_len) for _ in range(args.groups)]
    order = [common[i % args.groups] for i in range(args.num_seqs)]
    rng.shuffle(order)
    prompts = [prefix + rest for prefix, rest in zip(order, own, strict=True)]
    return Workload(prompts, max_tokens, args.common_len, args.n, num_ids)
