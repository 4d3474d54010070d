"""How long a decode step takes in each format of weights, by its rows, and a prefill.

`python tests/long/formats.py [BEFORE]` makes models of random weights, some layers of Qwen3-8B's,
Qwen3-30B-A3B's and gpt-oss-20b's shape each, and prints microseconds of a decode step for 1, 2, 8, 64 and 256
sequences, and milliseconds of a prefill of 16 prompts of 1,024 tokens: medians of 3, each format in a process
of its own. With BEFORE, a folder with another checkout, in turn there and here. On a CPU `--tiny` shows that
it runs.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DENSE = dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], hidden_size=4096, num_hidden_layers=16)
DENSE |= dict(num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=12288)
DENSE |= dict(vocab_size=32768, tie_word_embeddings=False, max_position_embeddings=40960, rope_theta=1e6)
DENSE |= dict(
    rms_norm_eps=1e-6, torch_dtype="bfloat16", hidden_act="silu", attention_bias=False, eos_token_id=2
)
EXPERTS = DENSE | dict(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], hidden_size=2048)
EXPERTS |= dict(num_key_value_heads=4, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
EXPERTS |= dict(norm_topk_prob=True, intermediate_size=6144, num_hidden_layers=12)
GPT_OSS = DENSE | dict(model_type="gpt_oss", architectures=["GptOssForCausalLM"], hidden_size=2880)
GPT_OSS |= dict(num_hidden_layers=12, num_attention_heads=64, intermediate_size=2880, num_local_experts=32)
GPT_OSS |= dict(num_experts_per_tok=4, head_dim=64, sliding_window=128, attention_bias=True)
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
}
NF4 |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "uint8"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
ROUNDED = {"activation_dtype": "fp8"}
# By name: the model, the engine's options, the file's own format.
FORMATS: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, Any] | None]] = {
    "bfloat16": (DENSE, {}, None),
    "fp8": (DENSE, {"quantization": "fp8"}, None),
    "fp8, blocks": (DENSE, {}, FP8_BLOCKS),
    "int4, groups of 32": (DENSE, {"quantization": "int4"}, None),
    "GPTQ, groups of 128": (DENSE, {}, GPTQ),
    "GPTQ, inputs of 8 bits": (DENSE, ROUNDED, GPTQ),
    "nf4": (DENSE, {}, NF4),
    "NVFP4": (DENSE, {}, NVFP4),
    "experts in bfloat16": (EXPERTS, {}, None),
    "experts in fp8": (EXPERTS, {"quantization": "fp8"}, None),
    "experts in int4": (EXPERTS, {"quantization": "int4"}, None),
    "experts in int4, inputs of 8 bits": (EXPERTS, {"quantization": "int4"} | ROUNDED, None),
    "experts in MXFP4": (GPT_OSS, {}, {"quant_method": "mxfp4"}),
    "experts in MXFP4, inputs of 8 bits": (GPT_OSS, ROUNDED, {"quant_method": "mxfp4"}),
}
TINY = dict(hidden_size=256, num_hidden_layers=2, num_attention_heads=8, head_dim=64, intermediate_size=512)
REPEATS = 3


def measure(name: str, is_tiny: bool) -> dict[str, float]:
    from nanovllm import LLM, SamplingParams

    config, options, of_file = FORMATS[name]
    config = config | (TINY if is_tiny else {}) | ({"quantization_config": of_file} if of_file else {})
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        options = options | dict(load_format="dummy", max_num_seqs=256, gpu_memory_utilization=0.6)
        llm = LLM(folder, **options)

    def seconds(rows: int, prompt_len: int, max_tokens: int) -> float:
        prompts = [[rng.randrange(3, 32768) for _ in range(prompt_len)] for _ in range(rows)]
        params = SamplingParams(temperature=0.6, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    def step(rows: int, steps: int) -> float:
        return (seconds(rows, 32, steps + 4) - seconds(rows, 32, 4)) / steps * 1e6

    found = {}
    steps = 4 if is_tiny else 200
    for rows in (1, 2) if is_tiny else (1, 2, 8, 64, 256):
        seconds(rows, 32, 24)  # compiles, and records graphs
        found[str(rows)] = statistics.median(step(rows, steps) for _ in range(REPEATS))
    prompts = (1, 64) if is_tiny else (16, 1024)
    seconds(*prompts, 1)
    found["prefill"] = statistics.median(seconds(*prompts, 1) for _ in range(REPEATS)) * 1e3
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", nargs="?", type=Path, help="a checkout of the project")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", choices=FORMATS, help="measure this one in this process, print JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.tiny)))
        return
    checkouts = [args.before.resolve(), ROOT] if args.before else [ROOT]
    for name in args.formats:
        for checkout in checkouts:
            command = [sys.executable, __file__, "--one", name, *["--tiny"] * args.tiny]
            environment = {**os.environ, "PYTHONPATH": str(checkout)}
            printed = subprocess.check_output(command, cwd=checkout, env=environment, text=True)
            times = json.loads(printed.splitlines()[-1])
            print(
                f"{checkout.name}, {name}:",
                {key: round(value, 1) for key, value in times.items()},
                flush=True,
            )


if __name__ == "__main__":
    main()
