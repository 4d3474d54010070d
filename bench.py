"""How fast the engine generates: many random prompts at once, tokens per second at the end.

    python bench.py                                          256 sequences, random weights, Qwen3-0.6B
    python bench.py --workload shared                        prompts that have 2,000 tokens in common
    python bench.py --model smollm2 --engine both ...        the same work by transformers, and the ratio
    python bench.py --model smollm2 --device cpu --temperature 0 --engine llama.cpp ...      and by llama.cpp
    python bench.py --trace trace.json --plot run.png        where the time of a step goes; the run over time
    python bench.py --structured                             answers that fit JSON schemas, beside free ones

The default workload is the one that engines of this kind compare on: 133,966 output tokens. Every repetition
keeps the lengths and what prompts have in common but has new token ids: a prefix cache only helps within it.
"""

import argparse
import gc
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.checkpoints import SHAPES, open_checkpoint
from nanovllm.checkpoints.tokenizer import toy_tokenizer
from nanovllm.config import Config
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import LinearBase

MAX_TOKEN_ID = 10_000
ENGINE_OPTIONS = (
    "tokenizer",
    "load_format",
    "model_impl",
    "max_num_seqs",
    "max_model_len",
    "tensor_parallel_size",
    "enforce_eager",
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "device",
)


def alike(num_seqs: int, input_len: int, output_len: int, **others: int) -> dict[str, int]:
    """The options of a workload whose prompts all have as many tokens of their own, and as many answered."""
    spans = dict(min_input_len=input_len, max_input_len=input_len)
    spans |= dict(min_output_len=output_len, max_output_len=output_len)
    return {"num_seqs": num_seqs, **spans, **others}


# By name, the defaults of the options that describe the work, where they differ from nano's.
WORKLOADS = {
    "nano": {},
    "shared": alike(1024, 50, 128, common_len=2000),
    "groups": alike(512, 100, 200, common_len=3000, groups=4),
    "rollout": alike(64, 1000, 256, n=16),
    "long": alike(16, 16_000, 256),
    "short": alike(2048, 32, 64),
}


@dataclass
class Workload:
    """
    Prompts of random token ids, and how many tokens each is to be answered with, `n` times. Those of one
    group begin with the same `common_len` tokens.
    """

    prompts: list[list[int]]
    max_tokens: list[int]
    common_len: int = 0
    n: int = 1

    @property
    def num_output_tokens(self) -> int:
        return self.n * sum(self.max_tokens)

    def with_fresh_tokens(self, seed: int) -> "Workload":
        """
        The same lengths with other token ids. Those at one position all move by the same distance, so that
        prompts have as much in common as before.
        """
        rng = random.Random(seed)
        moves = [rng.randint(0, MAX_TOKEN_ID) for _ in range(max(map(len, self.prompts)))]
        prompts = [
            [(token + move) % (MAX_TOKEN_ID + 1) for token, move in zip(p, moves, strict=False)]
            for p in self.prompts
        ]
        return replace(self, prompts=prompts)

    def within_vocabulary(self, vocab_size: int) -> "Workload":
        """Fold the ids of a workload into a vocabulary that may be smaller."""
        return replace(self, prompts=[[token % vocab_size for token in p] for p in self.prompts])

    def without_n(self) -> "Workload":
        """The same work with every prompt `n` times, each of them answered once."""
        prompts = [p for p in self.prompts for _ in range(self.n)]
        return Workload(prompts, [m for m in self.max_tokens for _ in range(self.n)], self.common_len)

    def for_warmup(self, limit: int) -> "Workload":
        """
        At most `limit` sequences that end one after another, whatever the workload's lengths: every batch
        size occurs once, for a step.
        """
        prompts = self.with_fresh_tokens(1 << 32).without_n().prompts[:limit]
        return Workload(prompts, [i + 2 for i in range(len(prompts))], self.common_len)

    def segments(self) -> list[tuple[int, int, list[int]]]:
        """
        What is computed once at best, each as (begin, end, tokens drawn by every completion that has it): the
        beginning that a group has in common, and what a prompt has of its own.
        """
        groups, segments = defaultdict(list), []
        for prompt, max_tokens in zip(self.prompts, self.max_tokens, strict=True):
            groups[tuple(prompt[: self.common_len])] += [max_tokens] * self.n
            segments.append((self.common_len, len(prompt), [max_tokens] * self.n))
        return segments + [(0, self.common_len, max_tokens) for max_tokens in groups.values()]


def draw_workload(args: argparse.Namespace) -> Workload:
    """
    Draw each prompt's length and own ids, then all output lengths, then what groups have in common and who is
    in which: the order is part of the workload.
    """
    rng = random.Random(args.seed)
    low, high = args.min_output_len, args.max_output_len
    own = [
        [rng.randint(0, MAX_TOKEN_ID) for _ in range(rng.randint(args.min_input_len, args.max_input_len))]
        for _ in range(args.num_seqs)
    ]
    max_tokens = [rng.randint(low, high) for _ in own]
    if args.spread_output:
        gaps = max(args.num_seqs - 1, 1)
        max_tokens = [low + round(i * (high - low) / gaps) for i in range(args.num_seqs)]
    common = [[rng.randint(0, MAX_TOKEN_ID) for _ in range(args.common_len)] for _ in range(args.groups)]
    order = [common[i % args.groups] for i in range(args.num_seqs)]
    rng.shuffle(order)
    prompts = [begin + end for begin, end in zip(order, own, strict=True)]
    return Workload(prompts, max_tokens, args.common_len, args.n)


@dataclass
class Run:
    """What one repetition did and how long it took. The phases are those of engines that tell them apart."""

    output_tokens: int
    seconds: float
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0

    # Prompt tokens taken over from the KV cache, how many of these in copied parts of blocks, and tokens of
    # the context that decode steps read for a whole group at once.
    cached_tokens: int = 0
    copied_tokens: int = 0
    grouped_tokens: int = 0

    timeline: list[tuple[float, int, int, int]] = field(default_factory=list, repr=False)
    """Of each step: when it ended, tokens decoded in it, sequences running and KV cache blocks used then."""

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


@dataclass
class Ceilings:
    """What the device can do at best, measured: bytes read and floating-point operations, per second."""

    bandwidth: float
    flops: float

    @classmethod
    def measure(cls, device: str) -> "Ceilings":
        on_gpu = device != "cpu"
        n, num_bytes, dtype = (8192, 2 << 30, torch.bfloat16) if on_gpu else (1024, 256 << 20, torch.float32)
        words = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
        a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
        reading, multiplying = median_seconds(words.sum, on_gpu), median_seconds(lambda: a @ b, on_gpu)
        return cls(num_bytes / reading, 2 * n**3 / multiplying)


def median_seconds(function: Callable[[], Any], on_gpu: bool, repeats: int = 9) -> float:
    seconds = []
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    for _ in range(repeats + 2):
        wait()
        start = time.perf_counter()
        function()
        wait()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def engine_options(args: argparse.Namespace) -> dict:
    """The options of the command line that are the engine's; what was not given is left to its defaults."""
    return {name: getattr(args, name) for name in ENGINE_OPTIONS if getattr(args, name) is not None}


class NanoVLLM:
    """This engine, driven step by step as `LLM.generate` drives it, so that the phases can be timed."""

    def __init__(self, args: argparse.Namespace):
        self.llm = LLM(args.model, **engine_options(args))
        self.sampling = dict(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            ignore_eos=True,
        )
        self.vocab_size = self.llm.config.hf_config.vocab_size
        self.warmup_seqs = self.llm.config.max_num_seqs

    def add_prompt(self, prompt: list[int], max_tokens: int, n: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, n=n, **self.sampling)
        self.llm.add_request(self.llm.prompts.read(prompt, params))

    def floor(self, workload: Workload, ceilings: Ceilings) -> dict[str, float]:
        """
        The least that this work can take: every prompt token costs 2 operations per parameter and its
        attention; every decode step reads the weights, as they are stored, once and the KV cache of every
        sequence in it. What
        sequences have in common is computed once, and read once a step. Of several ranks, each does its
        share at the same time.
        """
        config, model = self.llm.config, self.llm.model_runner.model
        hf_config, ranks = config.hf_config, config.tensor_parallel_size
        layers, head_dim = hf_config.num_hidden_layers, hf_config.head_dim
        head = hf_config.vocab_size * hf_config.hidden_size // ranks
        formats = [layer.format for layer in model.modules() if isinstance(layer, LinearBase)]
        vectors = [p for p in model.parameters() if p.dim() == 1 and p.is_floating_point()]  # norms, biases
        own_head = (
            [p for p in model.lm_head.parameters()] if isinstance(model.lm_head, ParallelLMHead) else []
        )
        parameters = sum(math.prod(each.shape) for each in (*own_head, *formats, *vectors))
        read_once = [*own_head, *vectors, *(t for f in formats for t in f.parameters.values())]
        width = hf_config.num_attention_heads // ranks * head_dim * layers
        segments, max_tokens = workload.segments(), workload.without_n().max_tokens

        def num_steps(counts: list[int]) -> int:
            return max(max(counts) - 1, (sum(counts) - len(counts)) // config.max_num_seqs)

        flops = sum(
            2 * (parameters - head) * (end - begin) + 2 * width * (end**2 - begin**2)
            for begin, end, _ in segments
        )
        flops += 2 * head * len(workload.prompts)
        kv_bytes = self.llm.model_runner.kv_cache.block_bytes // config.kvcache_block_size  # of one token
        kv_reads = sum((end - begin) * num_steps(counts) for begin, end, counts in segments)
        read = kv_bytes * (kv_reads + sum(n * (n - 1) // 2 for n in max_tokens))
        read += num_steps(max_tokens) * sum(tensor.nbytes for tensor in read_once)
        return {
            "prefill_flops": flops,
            "decode_bytes": read,
            "seconds": flops / ceilings.flops + read / ceilings.bandwidth,
        }

    def trace(self, workload: Workload, file: str, steps: int = 5) -> None:
        """Write a Chrome trace of a few decode steps in the middle of the work."""
        for prompt in workload.prompts:
            self.add_prompt(prompt, 50 + steps, workload.n)
        decoded = 0
        while decoded < 20:
            decoded += self.llm.step()[1] < 0
        with torch.profiler.profile() as profiler:
            for _ in range(steps):
                self.llm.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        profiler.export_chrome_trace(file)
        while not self.llm.is_finished():
            self.llm.step()

    def run(self, workload: Workload) -> Run:
        run, before_run = Run(0, 0.0), self.llm.stats()
        start = now = time.perf_counter()
        for prompt, max_tokens in zip(workload.prompts, workload.max_tokens, strict=True):
            self.add_prompt(prompt, max_tokens, workload.n)
        while not self.llm.is_finished():
            finished, num_tokens = self.llm.step()
            if not num_tokens:  # a step was launched, and its time is that of the call that collects it
                continue
            now, before = time.perf_counter(), now
            scheduler = self.llm.scheduler
            used = len(scheduler.block_manager.used_block_ids)
            run.timeline.append((now - start, max(-num_tokens, 0), len(scheduler.running), used))
            if num_tokens > 0:
                run.prefill_tokens += num_tokens
                run.prefill_seconds += now - before
            else:
                run.decode_tokens -= num_tokens
                run.decode_seconds += now - before
            run.output_tokens += sum(len(token_ids) for _, token_ids in finished)
        run.seconds = now - start
        stats = self.llm.stats()
        for kind in ("cached", "copied", "grouped"):  # an engine to compare with may not count all of them
            count = stats.get(f"num_{kind}_tokens", 0) - before_run.get(f"num_{kind}_tokens", 0)
            setattr(run, f"{kind}_tokens", count)
        return run

    def describe_cache(self) -> str:
        num_tokens = self.llm.stats()["num_kv_cache_tokens"]
        return f"nanovllm: {num_tokens:,} tokens of KV cache, kv_cache_dtype={self.llm.config.kv_cache_dtype}"

    def close(self) -> None:
        self.llm.exit()


class Transformers:
    """What one would write without an engine: `generate` on padded batches, each as long as its longest."""

    warmup_seqs = 2

    def __init__(self, args: argparse.Namespace):
        self.model = load_transformers_model(args)
        self.batch_size = args.batch_size
        self.vocab_size = self.model.config.vocab_size
        # The model's own defaults could end a sequence early or narrow the sampling.
        config = self.model.generation_config = type(self.model.generation_config)()
        config.pad_token_id = 0
        config.do_sample = args.temperature > 0
        if config.do_sample:
            config.temperature, config.min_p = args.temperature, args.min_p
            config.top_k, config.top_p = args.top_k, args.top_p

    def run(self, workload: Workload) -> Run:
        output_tokens, workload = 0, workload.without_n()
        start = time.perf_counter()
        for i in range(0, len(workload.prompts), self.batch_size):
            prompts = workload.prompts[i : i + self.batch_size]
            max_tokens = workload.max_tokens[i : i + self.batch_size]
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.model.device)
            mask = torch.tensor(
                [[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.model.device
            )
            output = self.model.generate(ids, attention_mask=mask, max_new_tokens=max(max_tokens))
            rows = output[:, width:].tolist()
            # A request's tokens beyond its `max_tokens` were computed for nothing and do not count.
            output_tokens += sum(len(row[:count]) for row, count in zip(rows, max_tokens, strict=True))
        return Run(output_tokens, time.perf_counter() - start)

    def close(self) -> None:
        del self.model
        gc.collect()


def load_transformers_model(args: argparse.Namespace):
    """The model that the engine would run, built by transformers from the same configuration and tensors."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    checkpoint = open_checkpoint(args.model, args.load_format)
    hf_config = checkpoint.hf_config()
    dtype = hf_config.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    with torch.device(args.device):
        fields = CONFIG_MAPPING[hf_config.raw["model_type"]].from_dict(hf_config.raw)
        dtype = getattr(torch, dtype if args.dtype == "auto" else args.dtype)
        model = AutoModelForCausalLM.from_config(fields, dtype=dtype)
    if not checkpoint.random_weights:
        weights = {tensor.name: tensor[:] for tensor in checkpoint.tensors()}
        model.load_state_dict(weights, strict=False)  # not strict: a tied LM head has two names
        if lacking := [name for name, _ in model.named_parameters() if name not in weights]:
            raise ValueError(f"{args.model} has no tensor {lacking[0]}")
    return model.eval()


class LlamaCpp:
    """
    llama.cpp on a .gguf file, with as many threads as torch has: all prompts at first, as many tokens at a
    time as this engine takes, then a token of every sequence a step. Draws the likeliest tokens.
    """

    warmup_seqs = 2

    def __init__(self, args: argparse.Namespace):
        try:
            import llama_cpp
        except ImportError as error:
            raise ValueError(
                "--engine llama.cpp needs llama-cpp-python: pip install llama-cpp-python"
            ) from error
        path = open_checkpoint(args.model, args.load_format).path
        if args.device != "cpu" or args.temperature or not path.lower().endswith(".gguf"):
            raise ValueError("--engine llama.cpp needs --device cpu, --temperature 0 and a .gguf file")
        self.api = llama_cpp
        self.be_quiet = llama_cpp.llama_log_callback(lambda *_: None)  # called as long as the library lives
        llama_cpp.llama_log_set(self.be_quiet, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {path}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.most_tokens = Config.max_num_batched_tokens

    def run(self, workload: Workload) -> Run:
        api, workload, run = self.api, workload.without_n(), Run(0, 0.0)
        prompts, max_tokens = workload.prompts, workload.max_tokens
        params = api.llama_context_default_params()
        params.n_ctx = sum(map(len, prompts)) + sum(max_tokens)
        params.n_seq_max, params.kv_unified = len(prompts), True
        params.n_batch, params.n_ubatch = min(self.most_tokens, params.n_ctx), 512
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        context = api.llama_init_from_model(self.model, params)
        if not context:
            raise ValueError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        places = [
            (token, i, seq, i == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for i, token in enumerate(prompt)
        ]
        tokens: dict[int, int] = {}  # of each sequence, the newest
        start = now = time.perf_counter()
        for begin in range(0, len(places), params.n_batch):
            tokens |= self._compute(context, places[begin : begin + params.n_batch])
        run.prefill_tokens, run.prefill_seconds = len(places), time.perf_counter() - now
        run.output_tokens, now = len(tokens), time.perf_counter()
        for step in range(1, max(max_tokens)):
            running = [seq for seq in tokens if max_tokens[seq] > step]
            drawn = self._compute(
                context, [(tokens[seq], len(prompts[seq]) + step - 1, seq, True) for seq in running]
            )
            tokens |= drawn
            run.decode_tokens += len(drawn)
        run.decode_seconds, run.seconds = time.perf_counter() - now, time.perf_counter() - start
        run.output_tokens += run.decode_tokens
        api.llama_free(context)
        return run

    def _compute(self, context: Any, places: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """One step over (token, position, sequence, whether it draws): the tokens that sequences draw."""
        batch = self.api.llama_batch_init(len(places), 0, 1)
        batch.n_tokens = len(places)
        for i, (token, position, seq, draws) in enumerate(places):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, draws
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        failed = self.api.llama_decode(context, batch)
        self.api.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        rows = ((i, place[2]) for i, place in enumerate(places) if place[3])
        logits = ((seq, self.api.llama_get_logits_ith(context, i)) for i, seq in rows)
        return {seq: int(np.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for seq, row in logits}

    def close(self) -> None:
        self.api.llama_model_free(self.model)


ENGINES = {"nanovllm": NanoVLLM, "transformers": Transformers, "llama.cpp": LlamaCpp}


def draw_schemas(rng: random.Random, count: int, limit_strings: bool = False) -> list[dict[str, Any]]:
    """
    Records as extraction tasks ask for: nested, with enums, ranges, lists, and texts with patterns. Texts of
    random weights without limits end where a token with a quotation mark happens to be drawn.
    """
    patterns = [
        "^[A-Z][a-z]{2,12}( [A-Z][a-z]{2,12}){0,2}$",
        "^[0-9]{4}-[0-9]{2}-[0-9]{2}$",
        "^[A-F0-9]{8,32}$",
    ]

    def value(depth: int) -> dict[str, Any]:
        kinds: list[dict[str, Any]] = [
            {"type": "string"} | ({"maxLength": rng.randint(20, 200)} if limit_strings else {}),
            {"type": "string", "pattern": rng.choice(patterns)},
            {"enum": rng.sample(["red", "green", "blue", "black", "white", "none of these"], 3)},
            {"type": "integer", "minimum": 0, "maximum": 10 ** rng.randint(1, 6)},
            {"type": "number", "minimum": -90, "maximum": 90},
            {"type": "boolean"},
        ]
        if depth < 2:
            least = rng.randint(1, 3)
            kinds.append(
                {"type": "array", "items": value(depth + 1), "minItems": least, "maxItems": 2 * least}
            )
            kinds.append(record(depth + 1, rng.randint(2, 4)))
        return rng.choice(kinds)

    def record(depth: int, num_fields: int) -> dict[str, Any]:
        fields = {
            f"{rng.choice(['name', 'place', 'amount', 'notes'])}_{i}": value(depth) for i in range(num_fields)
        }
        required = [*fields][: -1 if rng.random() < 0.3 else None]
        return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}

    return [record(0, rng.randint(4, 8)) for _ in range(count)]


def wide_tokenizer(vocab_size: int) -> Any:
    """
    For random weights: the toy tokenizer with as many more tokens as the model has, made of letters, digits
    and JSON's signs. Finding the allowed ones takes somewhat longer than in a real vocabulary, where more of
    them begin alike: with Qwen's, 66 us for a mask instead of 81, and 1.9 ms at most instead of 3.1 ms.
    """
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    rng, toy = random.Random(0), toy_tokenizer()
    vocabulary, letters = toy.get_vocab(), "etaoinshrdlucmfwygpbvkxqjz"
    weights = range(len(letters), 0, -1)
    while len(vocabulary) < vocab_size:
        word = "".join(rng.choices(letters, weights, k=rng.randint(2, 10)))
        others = "".join(rng.choices('0123456789{}[]":,.-_', k=rng.randint(2, 4)))
        text = rng.choice([word, "\u0120" + word, "\u0120" + word.capitalize(), word.capitalize(), others])
        vocabulary.setdefault(text, len(vocabulary))
    tokenizer, known = Tokenizer(models.BPE(vocabulary, [])), toy.backend_tokenizer
    tokenizer.pre_tokenizer, tokenizer.decoder = known.pre_tokenizer, known.decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=toy.eos_token)


def bench_structured(args: argparse.Namespace, workload: Workload, people: TextIO) -> dict[str, Any]:
    """
    Answers that fit 40 JSON schemas, and free ones of the same lengths, in turns: tokens per second of both.
    Few requests at once are several such rounds one after another.
    """
    import jsonschema

    engine = NanoVLLM(args)
    llm, schemas = engine.llm, draw_schemas(random.Random(args.seed), 40, args.limit_strings)
    if open_checkpoint(args.model, args.load_format).random_weights and args.tokenizer is None:
        llm.grammars.tokenizer = wide_tokenizer(engine.vocab_size)
    tokenizer, ends = llm.grammars.tokenizer, llm.config.eos
    wanted = [StructuredOutputsParams(json=schema, disable_any_whitespace=True) for schema in schemas]
    make_masks, mask_seconds = llm.grammars.masks, []

    def timed_masks(sequences: list[Any]) -> Any:
        start = time.perf_counter()
        masks = make_masks(sequences)
        mask_seconds.append(time.perf_counter() - start)
        return masks

    llm.grammars.masks = timed_masks

    def answer(prompts: list[list[int]], params: list[SamplingParams]) -> tuple[float, list[list[int]]]:
        start, answers = time.perf_counter(), {}
        ids = [llm.add_request(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        while not llm.is_finished():
            answers.update(llm.step()[0])
        return time.perf_counter() - start, [answers[i] for i in ids]

    num_rounds, most = max(1, 64 // len(workload.prompts)), args.max_output_len
    runs = []
    for repeat in range(args.repeats + 1):  # the first one warms up
        seconds, num_tokens, num_ended = {"structured": 0.0, "free": 0.0}, 0, 0
        mask_seconds.clear()
        for number in range(num_rounds):
            seed = args.seed + 2 * (repeat * num_rounds + number)
            prompts, others = (
                workload.with_fresh_tokens(seed + i).within_vocabulary(engine.vocab_size).prompts
                for i in (1, 2)
            )
            which = [(number * len(prompts) + i) % len(schemas) for i in range(len(prompts))]
            settings = dict(
                temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p
            )
            params = [
                SamplingParams(max_tokens=most, structured_outputs=wanted[i], **settings) for i in which
            ]
            took, answers = answer(prompts, params)
            seconds["structured"] += took
            lengths = list(map(len, answers))
            params = [SamplingParams(max_tokens=length, ignore_eos=True, **settings) for length in lengths]
            seconds["free"] += answer(others, params)[0]
            num_tokens += sum(lengths)
            for i, token_ids in zip(which, answers, strict=True):
                if token_ids[-1] in ends:
                    num_ended += 1
                    jsonschema.validate(json.loads(tokenizer.decode(token_ids[:-1])), schemas[i])
        speeds = {kind: num_tokens / each for kind, each in seconds.items()}
        ratio = speeds["structured"] / speeds["free"]
        masks = 1000 * statistics.median(mask_seconds)
        runs.append({**speeds, "ratio": ratio, "tokens": num_tokens, "ended": num_ended, "mask_ms": masks})
        told = f"{num_rounds} x {len(workload.prompts)} answers, {num_ended} ended and fit their schemas"
        told += (
            f", {num_tokens:,} tokens: {speeds['structured']:,.0f} tok/s, free {speeds['free']:,.0f} tok/s"
        )
        told += f", ratio {ratio:.1%}; masks took {masks:.2f} ms a step" + " (warm-up)" * (not repeat)
        print(told, file=people, flush=True)
    engine.close()
    ratios = sorted(run["ratio"] for run in runs[1:])
    print(f"median ratio {statistics.median(ratios):.1%} ({ratios[0]:.1%} to {ratios[-1]:.1%})", file=people)
    return {"repeats": runs[1:], "ratio": statistics.median(ratios)}


def bench(
    args: argparse.Namespace, name: str, workload: Workload, people: TextIO
) -> tuple[list[Run], dict[str, float]]:
    """
    Load one engine, warm it up, time the workload `args.repeats` times, and free the engine's memory. Also
    returns the floor, for an engine that knows its own.
    """
    ceilings, floor = None, {}
    if name == "nanovllm":
        ceilings = Ceilings.measure(args.device)
        torch.cuda.empty_cache()  # the engine measures how much memory is free
    engine = ENGINES[name](args)
    if name == "nanovllm":
        print(engine.describe_cache(), file=people, flush=True)
    try:
        workload = workload.within_vocabulary(engine.vocab_size)
        engine.run(workload.for_warmup(engine.warmup_seqs).within_vocabulary(engine.vocab_size))
        if ceilings:
            floor = {**asdict(ceilings), **engine.floor(workload, ceilings)}
        runs = []
        for repeat in range(args.repeats):
            if repeat:
                workload = workload.with_fresh_tokens(args.seed + repeat).within_vocabulary(engine.vocab_size)
            runs.append(engine.run(workload))
            if runs[-1].output_tokens != workload.num_output_tokens:
                raise RuntimeError(
                    f"{name} made {runs[-1].output_tokens} of {workload.num_output_tokens} tokens"
                )
        if args.trace and name == "nanovllm":
            engine.trace(workload, args.trace)
    finally:
        engine.close()
    return runs, floor


def summarize(runs: list[Run]) -> dict:
    """The median repetition (of an even number the slower one in the middle), the spread, and all of them."""
    ordered = sorted(runs, key=lambda run: run.seconds)
    median = ordered[len(runs) // 2]
    return {
        **without_timeline(median),
        "tokens_per_second": median.tokens_per_second,
        "tokens_per_second_min": ordered[-1].tokens_per_second,
        "tokens_per_second_max": ordered[0].tokens_per_second,
        "prefill_share": median.prefill_seconds / median.seconds,
        "decode_share": median.decode_seconds / median.seconds,
        "repeats": [without_timeline(run) for run in runs],
    }


def without_timeline(run: Run) -> dict:
    return {name: value for name, value in asdict(run).items() if name != "timeline"}


def describe_floor(floor: dict[str, float], seconds: float) -> str:
    return (
        f"  floor {floor['seconds']:.2f} s: {floor['prefill_flops'] / 1e12:,.2f} TFLOP of prefill at "
        f"{floor['flops'] / 1e12:,.2f} TFLOP/s, {floor['decode_bytes'] / 1e12:,.2f} TB of decode at "
        f"{floor['bandwidth'] / 1e12:,.2f} TB/s (both measured now); "
        f"{floor['seconds'] / seconds:.1%} of the speed possible"
    )


def plot(run: Run, file: str) -> None:
    """Draw batch size, KV cache use and decode speed over one repetition."""
    from matplotlib.figure import Figure

    seconds, decoded, running, used = zip(*run.timeline, strict=True)
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots(3, sharex=True)
    axes[0].plot(seconds, running)
    axes[0].set_ylabel("sequences running")
    axes[1].plot(seconds, used)
    axes[1].set_ylabel("KV cache blocks used")
    bins = [0] * 101
    for second, tokens in zip(seconds, decoded, strict=True):
        bins[int(100 * second / run.seconds)] += tokens
    width = run.seconds / 100
    axes[2].stairs([tokens / width for tokens in bins[:100]], [i * width for i in range(101)])
    axes[2].set_ylabel("tokens decoded per second")
    axes[2].set_xlabel("seconds")
    figure.savefig(file)


def describe(name: str, result: dict) -> str:
    """A few lines for people."""
    lines = [
        f"{name}: {result['output_tokens']:,} output tokens in {result['seconds']:.2f} s, "
        f"{result['tokens_per_second']:,.1f} tok/s (median of {len(result['repeats'])}, from "
        f"{result['tokens_per_second_min']:,.1f} to {result['tokens_per_second_max']:,.1f})"
    ]
    for phase in ("prefill", "decode"):
        tokens, seconds = result[f"{phase}_tokens"], result[f"{phase}_seconds"]
        if seconds:
            share, rate = result[f"{phase}_share"], tokens / seconds
            lines.append(f"  {phase:8}{tokens:9,} tokens in {seconds:.2f} s ({share:.1%}), {rate:,.1f} tok/s")
    cached, copied, grouped = (result[f"{kind}_tokens"] for kind in ("cached", "copied", "grouped"))
    if cached or grouped:
        lines.append(
            f"  shared  {cached:9,} tokens taken over, {copied:,} copied; {grouped:,} read in groups"
        )
    return "\n".join(lines)


def describe_workload(name: str, workload: Workload) -> str:
    distinct = sum(end - begin for begin, end, _ in workload.segments())
    return (
        f"{name}: {len(workload.prompts):,} prompts of {sum(map(len, workload.prompts)):,} tokens, "
        f"{distinct:,} to be computed; n={workload.n}, {workload.num_output_tokens:,} tokens to be drawn"
    )


def describe_device(device: str) -> str:
    if device == "cpu":
        return f"{platform.processor() or platform.machine()} with {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name(device)


def check_writable(parser: argparse.ArgumentParser, option: str, file: str) -> None:
    """Refuse a file that could not be written at the end. Leaves no file where there was none."""
    is_new = not os.path.exists(file)
    try:
        open(file, "a").close()
    except OSError as error:
        parser.error(f"{option} {file} cannot be written: {error.strerror}")
    if is_new:
        os.remove(file)


def check_drawable(parser: argparse.ArgumentParser, file: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        parser.error('--plot needs matplotlib: pip install -e ".[demo]"')
    known = Figure().canvas.get_supported_filetypes()
    if (suffix := Path(file).suffix[1:].lower()) and suffix not in known:
        parser.error(f"--plot {file} cannot be drawn: the name must end in one of .{', .'.join(known)}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Benchmark Nano-vLLM.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    both = "both: nanovllm and transformers, one after the other, and the ratio"
    add("--engine", choices=[*ENGINES, "both"], default="nanovllm", help=both)
    add(
        "--model",
        default="qwen3-0.6b",
        help="built-in shape, folder, .gguf file, hub id or smollm2 (fetched)",
    )
    add("--tokenizer", help="folder or hub id, for random weights; else they get a made-up vocabulary")
    add("--load-format", help="dummy for random weights, all that a built-in shape has")
    workload = "what the defaults of the options from --num-seqs to --n describe"
    add("--workload", choices=list(WORKLOADS), default="nano", help=workload)
    add("--num-seqs", type=int, default=256, help="number of prompts")
    add("--common-len", type=int, default=0, help="tokens that all prompts of a group begin with")
    add("--groups", type=int, default=1, help="number of groups, which arrive mixed")
    add("--min-input-len", type=int, default=100, help="a prompt's own tokens, at least")
    add("--max-input-len", type=int, default=1024, help="a prompt's own tokens, at most")
    add("--min-output-len", type=int, default=100, help="output tokens of a sequence, at least")
    add("--max-output-len", type=int, default=1024, help="output tokens of a sequence, at most")
    add("--n", type=int, default=1, help="completions of each prompt")
    add("--spread-output", action="store_true", help="space the output lengths evenly, do not draw them")
    structured = "compare answers that fit JSON schemas with free ones, of at most --max-output-len tokens"
    add("--structured", action="store_true", help=structured)
    limit = "with --structured: texts have a maxLength, near which masks take long; random weights get there"
    add("--limit-strings", action="store_true", help=limit)
    add("--temperature", type=float, default=0.6, help="0 is greedy")
    add("--top-k", type=int, default=0, help="as in SamplingParams, like the next two")
    add("--top-p", type=float, default=1.0)
    add("--min-p", type=float, default=0.0)
    add("--repeats", type=int, default=3, help="timed repetitions, after a warm-up")
    seed = "of lengths and token ids; repetition r draws its ids with seed + r"
    add("--seed", type=int, default=0, help=seed)
    add("--batch-size", type=int, default=32, help="sequences per batch of --engine transformers")
    add("--max-num-seqs", type=int, help="as the engine's option of this name, like the following")
    add("--max-model-len", type=int)
    add("--tensor-parallel-size", type=int)
    add("--enforce-eager", action="store_true", help="do without CUDA graphs")
    add("--dtype", default="auto")
    add("--kv-cache-dtype", default="auto")
    add("--quantization")
    add("--model-impl", default="auto", help="transformers for its modules, also where there is a class here")
    add("--device", default="auto")
    add("--trace", metavar="FILE", help="write a Chrome trace of a few decode steps there")
    add("--plot", metavar="FILE", help="draw batch size, KV cache use and speed over the median repetition")
    add("--json", metavar="FILE", help="write settings and results there; - is standard output")
    parser.set_defaults(**WORKLOADS[parser.parse_args(argv).workload])
    args = parser.parse_args(argv)
    if args.load_format is None:
        args.load_format = "dummy" if args.model in SHAPES else "auto"
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.limit_strings and not args.structured:
        parser.error("--limit-strings needs --structured")
    if args.common_len < 0:
        parser.error(f"--common-len must be at least 0, got {args.common_len}")
    for name in ("num_seqs", "groups", "n", "min_input_len", "min_output_len", "repeats", "batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for kind in ("input", "output"):
        low, high = getattr(args, f"min_{kind}_len"), getattr(args, f"max_{kind}_len")
        if low > high:
            parser.error(f"--min-{kind}-len {low} is more than --max-{kind}-len {high}")
    for name in ("plot", "json"):  # written at the end of a run that may take minutes
        if (file := getattr(args, name)) and file != "-":
            check_writable(parser, f"--{name}", file)
    if args.plot:
        check_drawable(parser, args.plot)
    longest = args.common_len + args.max_input_len + args.max_output_len
    if args.max_model_len is None and longest > Config.max_model_len:
        args.max_model_len = longest
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    workload = draw_workload(args)
    people = sys.stderr if args.json == "-" else sys.stdout

    print(describe_workload(args.workload, workload), file=people, flush=True)
    results = {"structured": bench_structured(args, workload, people)} if args.structured else {}
    for name in (
        () if args.structured else ("nanovllm", "transformers") if args.engine == "both" else [args.engine]
    ):
        runs, floor = bench(args, name, workload, people)
        results[name] = summarize(runs)
        print(describe(name, results[name]), file=people, flush=True)
        if floor:
            results[name]["floor"] = floor
            print(describe_floor(floor, results[name]["seconds"]), file=people, flush=True)
        if args.plot and name == "nanovllm":
            plot(sorted(runs, key=lambda run: run.seconds)[len(runs) // 2], args.plot)
    report = {
        "settings": vars(args),
        "device": describe_device(args.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "results": results,
    }
    if args.engine == "both":
        ratio = results["nanovllm"]["tokens_per_second"] / results["transformers"]["tokens_per_second"]
        report["ratio"] = ratio
        print(f"nanovllm / transformers: {ratio:.2f}", file=people)
    if args.json == "-":
        print(json.dumps(report, indent=2))
    elif args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"bench.py: {error}")
