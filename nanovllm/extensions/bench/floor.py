"""The least time that a piece of work can take on this device."""

import math

import torch
from torch.utils.benchmark import Timer

from nanovllm import LLM
from nanovllm.extensions.bench.workloads import Workload
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.linear import LinearBase


def measure_ceilings(device: str) -> dict[str, float]:
    """What the device can do at best: bytes read and floating-point operations, per second."""
    n, num_bytes, dtype = 1024, 256 << 20, torch.float32
    if device != "cpu":
        n, num_bytes, dtype = 8192, 2 << 30, torch.bfloat16
    words = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    given = {"globals": {"words": words, "a": a, "b": b}, "num_threads": torch.get_num_threads()}
    reading, multiplying = (Timer(code, **given).blocked_autorange() for code in ("words.sum()", "a @ b"))
    return {"bandwidth": num_bytes / reading.median, "flops": 2 * n**3 / multiplying.median}


def floor(llm: LLM, workload: Workload, ceilings: dict[str, float]) -> dict[str, float]:
    """
    Every prompt token costs 2 operations per parameter and its attention; every decode step reads the
    weights, as they are stored, once, and the KV cache of every sequence in it. A shared prefix is computed
    once, and read once a step. Of several ranks, each does its share at the same time.
    """
    config, model, max_tokens = llm.config, llm.model_runner.model, workload.without_n().max_tokens
    hf_config, ranks = config.hf_config, config.tensor_parallel_size
    head = hf_config.vocab_size * hf_config.hidden_size // ranks
    width = hf_config.num_attention_heads // ranks * hf_config.head_dim * hf_config.num_hidden_layers
    formats = [layer.matrix for layer in model.modules() if isinstance(layer, LinearBase)]
    dense = [p for p in model.parameters() if p.dim() == 1 and p.is_floating_point()]  # norms, biases
    if isinstance(model.lm_head, ParallelLMHead):
        dense += model.lm_head.parameters()
    parameters = sum(math.prod(each.shape) for each in [*dense, *formats])
    stored = [*dense, *(tensor for each in formats for tensor in each.parameters.values())]

    def num_steps(counts: list[int]) -> int:
        return max(max(counts) - 1, (sum(counts) - len(counts)) // config.max_num_seqs)

    flops = 2 * head * len(workload.prompts)
    kv_reads = sum(n * (n - 1) // 2 for n in max_tokens)  # of what was sampled
    for begin, end, counts in workload.segments():
        flops += 2 * (parameters - head) * (end - begin) + 2 * width * (end**2 - begin**2)
        kv_reads += (end - begin) * num_steps(counts)
    kv_bytes = llm.model_runner.kv_cache.block_bytes // config.kvcache_block_size  # of one token
    read = kv_bytes * kv_reads + num_steps(max_tokens) * sum(tensor.nbytes for tensor in stored)
    seconds = flops / ceilings["flops"] + read / ceilings["bandwidth"]
    return {**ceilings, "prefill_flops": flops, "decode_bytes": read, "seconds": seconds}


def describe_floor(floor: dict[str, float], seconds: float) -> str:
    return (
        f"  floor {floor['seconds']:.2f} s: {floor['prefill_flops'] / 1e12:,.2f} TFLOP of prefill at "
        f"{floor['flops'] / 1e12:,.2f} TFLOP/s, {floor['decode_bytes'] / 1e12:,.2f} TB of decode at "
        f"{floor['bandwidth'] / 1e12:,.2f} TB/s (both measured now); "
        f"{floor['seconds'] / seconds:.1%} of the speed possible"
    )
