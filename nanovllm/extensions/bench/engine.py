"""This engine, driven step by step as `LLM.generate` drives it, so that its phases can be timed."""

import argparse
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.extensions.bench.workloads import Workload

SAMPLING = "temperature top_k top_p min_p".split()


class NanoVLLM:
    """
    `timeline` has of each step of the newest run: when it ended, prompt tokens computed and tokens decoded in
    it, sequences running and KV cache blocks used then. `answers` are token ids by request.
    """

    def __init__(self, args: argparse.Namespace):
        fields = Config.__dataclass_fields__  # what was not given has the engine's own default
        given = {name: value for name, value in vars(args).items() if value and name in fields}
        self.llm = LLM(**given | {"seed": None})  # the seed is the workload's
        self.sampling = {name: getattr(args, name) for name in SAMPLING}
        self.warmup_seqs = self.llm.config.max_num_seqs
        self.close = self.llm.exit

    def add_prompts(self, workload: Workload, structured_outputs: list[Any] | None = None) -> None:
        for i, prompt in enumerate(workload.prompts):
            params = dict(max_tokens=workload.max_tokens[i], n=workload.n, ignore_eos=True, **self.sampling)
            if structured_outputs:
                params |= dict(structured_outputs=structured_outputs[i], ignore_eos=False)
            self.llm.queue(self.llm.prompts.read(prompt, SamplingParams(**params)))

    def run(self, workload: Workload, structured_outputs: list[Any] | None = None) -> Counter[str]:
        """
        What one repetition did: seconds and tokens, by phase. And prompt tokens taken over from the KV cache,
        how many of these in copied parts of blocks, and tokens that decode steps read once for all sequences
        that share them.
        """
        run, scheduler, before_run = Counter(), self.llm.scheduler, self.llm.stats()
        self.timeline, self.answers = [], {}
        start = now = time.perf_counter()
        self.add_prompts(workload, structured_outputs)
        while not self.llm.is_finished():
            finished, num_tokens = self.llm.step()
            if not num_tokens:  # a step was launched, and its time is that of the call that collects it
                continue
            now, before = time.perf_counter(), now
            phase = "prefill" if num_tokens > 0 else "decode"
            run[f"{phase}_tokens"] += abs(num_tokens)
            run[f"{phase}_seconds"] += now - before
            used = len(scheduler.block_manager.used_block_ids)
            prefilled, decoded = max(num_tokens, 0), max(-num_tokens, 0)
            self.timeline.append((now - start, prefilled, decoded, len(scheduler.running), used))
            self.answers.update(finished)
        run["seconds"], stats = now - start, self.llm.stats()
        run["output_tokens"] = sum(map(len, self.answers.values()))
        for kind in ("cached", "copied", "grouped"):
            run[f"{kind}_tokens"] = stats[f"num_{kind}_tokens"] - before_run[f"num_{kind}_tokens"]
        return run

    def trace(self, workload: Workload, file: str) -> None:
        """Write a Chrome trace of five decode steps in the middle of the work."""
        self.add_prompts(replace(workload, max_tokens=[50] * len(workload.prompts)))
        decoded = 0
        while decoded < 20:
            decoded += self.llm.step()[1] < 0
        with torch.profiler.profile() as profiler:
            for _ in range(5):
                self.llm.step()
        profiler.export_chrome_trace(file)
        self.llm.clear()
