"""The command line of the benchmark: which work, by which engine, and where the figures go."""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import nanovllm
from nanovllm.assembly import open_model, opening
from nanovllm.config import Config, resolve_device
from nanovllm.extensions.bench.engine import NanoVLLM
from nanovllm.extensions.bench.floor import describe_floor, floor, measure_ceilings
from nanovllm.extensions.bench.others import LlamaCpp, Transformers
from nanovllm.extensions.bench.report import describe, describe_cpu, describe_device, plot, summarize
from nanovllm.extensions.bench.structured import bench_structured
from nanovllm.extensions.bench.workloads import WORKLOADS, Workload, draw_workload

ENGINES = {"nanovllm": NanoVLLM, "transformers": Transformers, "llama.cpp": LlamaCpp}

# What options are about, by their default. Some of an engine's options have its own default.
OPTIONS = {
    "model": ("qwen3-0.6b", "built-in shape, folder, .gguf file, hub id or smollm2 (fetched)"),
    "num-seqs": (256, "number of prompts"),
    "common-len": (0, "tokens that all prompts of a group begin with"),
    "groups": (1, "number of groups, which arrive mixed"),
    "min-input-len": (100, "a prompt's own tokens, at least"),
    "max-input-len": (1024, "a prompt's own tokens, at most"),
    "min-output-len": (100, "output tokens of a sequence, at least"),
    "max-output-len": (1024, "output tokens of a sequence, at most"),
    "n": (1, "completions of each prompt"),
    "temperature": (0.6, "0 is greedy"),
    "top-k": (0, "as in SamplingParams, like the next two"),
    "top-p": (1.0, "share of the probability that is sampled from"),
    "min-p": (0.0, "least probability, as a share of the likeliest token's"),
    "repeats": (3, "timed repetitions, after a warm-up"),
    "seed": (0, "of lengths and token ids; every repetition draws its own ids"),
    "batch-size": (32, "sequences per batch of --engine transformers"),
    "max-model-len": (
        0,
        "tokens of a sequence, at most; 0 for LLM's default, or more where the work needs it",
    ),
    "trace": (None, "file: write a Chrome trace of five decode steps there"),
    "plot": (None, "file: draw batch size, KV cache use and speed over the median repetition"),
    "json": (None, "file: write settings and results there; - is standard output"),
}
ENGINE_OPTIONS = """
    tokenizer load_format model_impl max_num_seqs tensor_parallel_size dtype kv_cache_dtype quantization
    activation_dtype device timeline extensions
""".split()
FLAGS = {
    "spread-output": "space the output lengths evenly, do not draw them",
    "structured": "compare answers that fit JSON schemas with free ones, of at most --max-output-len tokens",
    "limit-strings": "with --structured: texts have a maxLength, near which masks take long; random weights "
    "get there",
    "enforce-eager": "do without CUDA graphs",
    "exact": "the same bits for a sequence in any company",
}


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Benchmark Nano-vLLM.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add(
        "--engine",
        choices=[*ENGINES, "both"],
        default="nanovllm",
        help="both: also transformers, and the ratio",
    )
    add(
        "--workload",
        choices=[*WORKLOADS],
        default="nano",
        help="what the options from --num-seqs to --n describe",
    )
    engine = {name: (getattr(Config, name), "as the option of LLM of this name") for name in ENGINE_OPTIONS}
    for name, (default, text) in (OPTIONS | engine).items():
        kind = str if default is None else type(default)
        add(f"--{name.replace('_', '-')}", type=kind, default=default, help=text)
    for name, text in FLAGS.items():
        add(f"--{name}", action="store_true", help=text)
    args = parser.parse_args(WORKLOADS[parser.parse_args(argv).workload].split() + argv)
    if args.model in opening.SHAPES and args.load_format == "auto":
        args.load_format = "dummy"
    args.device = resolve_device(args.device, "device")
    longest = args.common_len + args.max_input_len + args.max_output_len
    if not args.max_model_len and longest > Config.max_model_len:
        args.max_model_len = longest
    if args.limit_strings and not args.structured:
        parser.error("--limit-strings needs --structured")
    at_least_one = "num_seqs groups n min_input_len min_output_len repeats batch_size".split()
    least = dict.fromkeys(at_least_one, 1)
    least |= dict(common_len=0, max_input_len=args.min_input_len, max_output_len=args.min_output_len)
    for name, low in least.items():
        if getattr(args, name) < low:
            limit = f"{low} (its --min)" if "max" in name else low
            parser.error(f"--{name.replace('_', '-')} must be at least {limit}, got {getattr(args, name)}")
    for option, file in (("--plot", args.plot), ("--json", args.json)):
        if file and file != "-" and (problem := why_not_written(option, file)):
            parser.error(f"{option} {file} {problem}")
    return args


def why_not_written(option: str, file: str) -> str:
    """
    Why a file cannot be written at the end of a run that may take minutes, or "". Leaves no file where there
    was none.
    """
    is_new, suffix = not os.path.exists(file), Path(file).suffix[1:].lower()
    try:
        open(file, "a").close()
        if is_new:
            os.remove(file)
        if option == "--plot":
            from matplotlib.figure import Figure

            known = Figure().canvas.get_supported_filetypes()
            if suffix and suffix not in known:
                return f"cannot be drawn: the name must end in one of .{', .'.join(known)}"
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    except ImportError:
        return 'needs matplotlib: pip install -e ".[demo]"'
    return ""


def bench(args: argparse.Namespace, name: str, workload: Workload) -> dict[str, Any]:
    """Load one engine, warm it up, time the workload `args.repeats` times, and free the engine's memory."""
    is_ours, runs, timelines = name == "nanovllm", [], {}
    ceilings = measure_ceilings(args.device) if is_ours else {}
    torch.cuda.empty_cache()  # the engine measures how much memory is free
    engine = ENGINES[name](args)
    try:
        if is_ours:
            room = engine.llm.stats()["num_kv_cache_tokens"]
            print(
                f"{name}: {room:,} tokens of KV cache, kv_cache_dtype={engine.llm.config.kv_cache_dtype}",
                flush=True,
            )
        engine.run(workload.for_warmup(engine.warmup_seqs))
        for repeat in range(args.repeats):
            run = engine.run(workload.with_fresh_tokens(args.seed + repeat) if repeat else workload)
            assert run["output_tokens"] == workload.num_output_tokens, name
            runs.append(run)
            timelines[run["seconds"]] = engine.timeline if is_ours else []
        result = summarize(runs)
        print(describe(name, result))
        if is_ours:
            result["floor"] = floor(engine.llm, workload, ceilings)
            print(describe_floor(result["floor"], result["seconds"]))
            if args.plot:
                speed = f"{result['output_tokens']:,} tokens at {result['tokens_per_second']:,.1f} tok/s"
                title = f"{args.model}, workload {args.workload}: {speed}\n{describe_device(args.device)}"
                plot(timelines[result["seconds"]], title, args.plot)
            if args.trace:
                engine.trace(workload, args.trace)
    finally:
        engine.close()
    return result


def main(argv: list[str] | None = None) -> None:
    args = parse_args(sys.argv[1:] if argv is None else argv)
    with contextlib.redirect_stdout(sys.stderr if args.json == "-" else sys.stdout):
        report = json.dumps(run(args), indent=2)
    if args.json == "-":
        print(report)
    elif args.json:
        Path(args.json).write_text(report + "\n")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All that was asked for. Prints figures as they come, and returns what --json writes."""
    hf_config = open_model(args.model, {"load_format": args.load_format})[0].hf_config
    workload = draw_workload(args, hf_config.vocab_size)
    distinct = sum(end - begin for begin, end, _ in workload.segments())
    print(
        f"{args.workload}: {len(workload.prompts):,} prompts of {sum(map(len, workload.prompts)):,} tokens, "
        f"{distinct:,} to be computed; n={workload.n}, {workload.num_output_tokens:,} tokens to be drawn",
        flush=True,
    )
    if args.structured:
        results = {"structured": bench_structured(args, workload)}
    else:
        names = ["nanovllm", "transformers"] if args.engine == "both" else [args.engine]
        results = {name: bench(args, name, workload) for name in names}
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    versions |= {"nanovllm": nanovllm.__version__, "python": platform.python_version()}
    report = {
        "settings": vars(args),
        "versions": versions,
        "results": results,
        "device": describe_device(args.device),
        "cpu": describe_cpu(),
    }
    if len(results) > 1:
        ours, theirs = (result["tokens_per_second"] for result in results.values())
        report["ratio"] = ours / theirs
        print(f"nanovllm / transformers: {ours / theirs:.2f}")
    return report


if __name__ == "__main__":
    main()
