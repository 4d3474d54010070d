#!/usr/bin/env python3
"""How fast the engine generates: many random prompts at once, tokens per second at the end.

    python bench.py                      256 sequences, random weights, Qwen3-0.6B
    python bench.py --workload one       one sequence
    python bench.py --workload shared    1,024 prompts that begin with the same 2,000 tokens
    python bench.py --model FOLDER       another model; its weights are random where the folder has none

The default is the work that engines of this kind are compared on: 133,966 output tokens. This page is all
that it takes, and an example of using the engine below `LLM.generate`. Whatever else can be measured is in
nanovllm/extensions/bench, which takes over where another option is given: other engines, the floor that the
hardware sets, plots, traces, structured outputs, more workloads, a report as JSON. --help lists them all.
"""

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from nanovllm import LLM, SamplingParams

MODEL = "qwen3-0.6b"  # the name of a shape, whose weights are random
NUM_REPEATS = 3
NUM_IDS = 10_001  # of token ids that are drawn

# Prompts, tokens of a prompt and tokens of output (at least, at most), tokens that all prompts begin with.
WORKLOADS = {
    "nano": (256, (100, 1024), (100, 1024), 0),
    "one": (1, (128, 128), (512, 512), 0),
    "shared": (1024, (50, 50), (128, 128), 2000),
}


@dataclass
class Workload:
    """Prompts of random token ids, and how many tokens each is answered with."""

    prompts: list[list[int]]
    max_tokens: list[int]

    def with_fresh_tokens(self, repeat: int, vocab_size: int) -> "Workload":
        """
        The same lengths and the same shared tokens, but other ids: else a repetition would find its prompts
        in the prefix cache, where the one before has left them.
        """
        prompts = [[(token + repeat) % NUM_IDS % vocab_size for token in p] for p in self.prompts]
        return Workload(prompts, self.max_tokens)


def draw_workload(name: str) -> Workload:
    """The same work in every run: a generator with a seed draws it."""
    rng = random.Random(0)
    num_prompts, input_len, output_len, common_len = WORKLOADS[name]

    def tokens(count: int) -> list[int]:
        return [rng.randint(0, NUM_IDS - 1) for _ in range(count)]

    own = [tokens(rng.randint(*input_len)) for _ in range(num_prompts)]
    max_tokens = [rng.randint(*output_len) for _ in own]
    common = tokens(common_len)
    return Workload([common + prompt for prompt in own], max_tokens)


@dataclass
class Figures:
    """Tokens and seconds of one repetition. A prefill step computes prompts, a decode step a token each."""

    tokens: Counter[str]  # "prefill", "decode", "output"; "cached": of prompts, from other prompts
    seconds: Counter[str]  # "prefill", "decode", "all"

    @property
    def speed(self) -> float:
        return self.tokens["output"] / self.seconds["all"]


def run(llm: LLM, workload: Workload) -> Figures:
    """Hand in all prompts, then step until every sequence has ended."""
    tokens, seconds, sequences = Counter(), Counter(), []
    start = now = time.perf_counter()
    for prompt, max_tokens in zip(workload.prompts, workload.max_tokens, strict=True):
        params = SamplingParams(temperature=0.6, max_tokens=max_tokens, ignore_eos=True)
        sequences.append(llm.unfinished[llm.add_request(prompt, params)])
    while not llm.is_finished():
        finished, num_tokens = llm.step()  # num_tokens: of prompts, or minus the number of tokens decoded
        if num_tokens == 0:  # a step was launched; the next call waits for it
            continue
        phase = "prefill" if num_tokens > 0 else "decode"
        now, before = time.perf_counter(), now
        tokens[phase] += abs(num_tokens)
        seconds[phase] += now - before
        tokens["output"] += sum(len(token_ids) for _, token_ids in finished)
    seconds["all"] = now - start
    tokens["cached"] = sum(seq.num_prompt_tokens_cached for seq in sequences)
    return Figures(tokens, seconds)


def describe(runs: list[Figures]) -> str:
    """A few lines for people: the median repetition, beside the slowest and the fastest."""
    ordered = sorted(runs, key=lambda figures: figures.speed)
    median = ordered[len(ordered) // 2]
    tokens, seconds = median.tokens, median.seconds
    lines = [
        f"nanovllm: {tokens['output']:,} output tokens in {seconds['all']:.2f} s, {median.speed:,.1f} tok/s "
        f"(median of {len(runs)}, from {ordered[0].speed:,.1f} to {ordered[-1].speed:,.1f})"
    ]
    for phase in ("prefill", "decode"):
        share, speed = seconds[phase] / seconds["all"], tokens[phase] / seconds[phase]
        timed = f"{tokens[phase]:9,} tokens in {seconds[phase]:.2f} s ({share:.1%})"
        lines.append(f"  {phase:8}{timed}, {speed:,.1f} tok/s")
    if tokens["cached"]:
        lines.append(f"  shared  {tokens['cached']:9,} prompt tokens taken over from other prompts")
    return "\n".join(lines)


def bench(model: str, name: str) -> None:
    workload = draw_workload(name)
    num_tokens = sum(map(len, workload.prompts))
    made = f"{sum(workload.max_tokens):,} tokens to be drawn"
    print(f"{name}: {len(workload.prompts):,} prompts of {num_tokens:,} tokens, {made}", flush=True)
    load_format = "auto" if any(Path(model).glob("*.safetensors")) else "dummy"
    with LLM(model, load_format=load_format) as llm:
        room = llm.config.num_kvcache_blocks * llm.config.kvcache_block_size
        vocab_size = llm.config.hf_config.vocab_size
        print(f"nanovllm: {room:,} tokens of KV cache, load_format={load_format}", flush=True)
        work = [workload.with_fresh_tokens(repeat, vocab_size) for repeat in range(1 + NUM_REPEATS)]
        print(describe([run(llm, each) for each in work][1:]))  # the first compiles and captures graphs


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--workload", default="nano")
    parser.add_argument("--model", default=MODEL)
    args, others = parser.parse_known_args(argv)
    is_known = args.workload in WORKLOADS and (args.model == MODEL or Path(args.model).is_dir())
    if others or not is_known:
        from nanovllm.extensions.bench.__main__ import main as measure

        measure(argv)
    else:
        bench(args.model, args.workload)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"bench.py: {error}")
