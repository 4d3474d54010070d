"""Answers that fit JSON schemas beside free ones of the same lengths: what structured outputs cost.

Masks cost what the vocabulary costs. That of random weights is small: only with --tokenizer is it a real one.
"""

import argparse
import json
import random
import statistics
import time
from typing import Any

from nanovllm import StructuredOutputsParams
from nanovllm.extensions.bench.engine import NanoVLLM
from nanovllm.extensions.bench.workloads import Workload

PATTERNS = ["^[A-Z][a-z]{2,12}( [A-Z][a-z]{2,12}){0,2}$", "^[0-9]{4}-[0-9]{2}-[0-9]{2}$", "^[A-F0-9]{8,32}$"]


def draw_schema(rng: random.Random, limit_strings: bool, depth: int = 0) -> dict[str, Any]:
    """
    A record as extraction tasks ask for: nested, with enums, ranges, lists, and texts with patterns. Texts of
    random weights without limits end where a token with a quotation mark happens to be drawn.
    """
    fields, text = {}, {"type": "string"}
    for i in range(rng.randint(2, 4) if depth else rng.randint(4, 8)):
        kinds = [
            {**text, "maxLength": rng.randint(20, 200)} if limit_strings else text,
            {**text, "pattern": rng.choice(PATTERNS)},
            {"enum": rng.sample(["red", "green", "blue", "black", "white", "none of these"], 3)},
            {"type": "integer", "minimum": 0, "maximum": 10 ** rng.randint(1, 6)},
            {"type": "number", "minimum": -90, "maximum": 90},
            {"type": "boolean"},
        ]
        if depth < 2:
            record = draw_schema(rng, limit_strings, depth + 1)
            items = {"items": rng.choice([*kinds, record]), "minItems": 1, "maxItems": rng.randint(2, 6)}
            kinds += [record, {"type": "array", **items}]
        fields[f"{rng.choice(['name', 'place', 'amount', 'notes'])}_{i}"] = rng.choice(kinds)
    required = [*fields][: -1 if rng.random() < 0.3 else None]
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def bench_structured(args: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """
    Answers that fit 40 JSON schemas, and free ones of the same lengths, in turns: tokens per second of both.
    Few requests at once are several such rounds one after another.
    """
    import jsonschema

    engine, rng, runs = NanoVLLM(args), random.Random(args.seed), []
    schemas = [draw_schema(rng, args.limit_strings) for _ in range(40)]
    bitmask = engine.llm.parts.logits_processor("bitmask")
    ends = engine.llm.config.eos
    make_masks, mask_seconds = bitmask.host_input, []

    def timed_masks(*args: Any) -> Any:
        start = time.perf_counter()
        masks = make_masks(*args)
        mask_seconds.append(time.perf_counter() - start)
        return masks

    bitmask.host_input = timed_masks
    num_prompts = len(workload.prompts)
    num_rounds = max(1, 64 // num_prompts)
    for repeat in range(args.repeats + 1):  # the first one warms up
        structured = free = num_tokens = num_ended = 0
        mask_seconds.clear()
        for number in range(num_rounds):
            asked = [schemas[(number * num_prompts + i) % len(schemas)] for i in range(num_prompts)]
            wanted = [StructuredOutputsParams(json=each, disable_any_whitespace=True) for each in asked]
            seed = args.seed + 2 * (repeat * num_rounds + number)
            first, second = (workload.with_fresh_tokens(seed + i) for i in (1, 2))
            first.max_tokens = [args.max_output_len] * num_prompts
            structured += engine.run(first, wanted)["seconds"]
            answers = [engine.answers[seq_id] for seq_id in sorted(engine.answers)]
            second.max_tokens = [len(token_ids) for token_ids in answers]
            free += engine.run(second)["seconds"]
            for schema, token_ids in zip(asked, answers, strict=True):
                num_tokens += len(token_ids)
                if token_ids[-1] in ends:
                    num_ended += 1
                    jsonschema.validate(json.loads(engine.llm.tokenizer.decode(token_ids[:-1])), schema)
        mask_ms = 1000 * statistics.median(mask_seconds)
        run = {"structured": num_tokens / structured, "free": num_tokens / free, "ratio": free / structured}
        run.update(tokens=num_tokens, ended=num_ended, mask_ms=mask_ms)
        runs.append(run)
        print(
            f"{num_rounds} x {num_prompts} answers, {num_ended} ended and fit their schemas, {num_tokens:,} "
            f"tokens: {run['structured']:,.0f} tok/s, free {run['free']:,.0f} tok/s, ratio {run['ratio']:.1%}"
            f"; masks took {mask_ms:.2f} ms a step{'' if repeat else ' (warm-up)'}",
            flush=True,
        )
    engine.close()
    ratios = sorted(run["ratio"] for run in runs[1:])
    median = statistics.median(ratios)
    print(f"median ratio {median:.1%} ({ratios[0]:.1%} to {ratios[-1]:.1%})")
    return {"repeats": runs[1:], "ratio": median}
