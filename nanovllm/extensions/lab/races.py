"""Short runs of one part of the core each, to time it. They look the part up anew, since it may be
replaced."""

import json
import tempfile
from functools import cache
from pathlib import Path

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.lab.simulator import Simulator
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.layers import attention, sampler
from nanovllm.layers.sampler import SamplingStep
from nanovllm.utils.context import Context


def schedule() -> None:
    """300 requests through a simulated engine: the host's work alone."""
    lengths = range(10, 910, 3)
    params = [SamplingParams(temperature=0.0, max_tokens=length // 4, ignore_eos=True) for length in lengths]
    with Simulator(num_kvcache_blocks=1500, kvcache_block_size=16) as engine:
        engine.generate([list(range(length)) for length in lengths], params, use_tqdm=False)


def attend() -> None:
    """Decode attention of 16 sequences with 500 tokens each."""
    q, k, v, step = attention_inputs()
    attention.AttentionBackend().decode(q, k, v, AttentionVariant(0.125), step)


@cache
def attention_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Context]:
    torch.manual_seed(0)
    q, k, v = torch.randn(16, 8, 64), *torch.randn(2, 16 * 32, 16, 4, 64)
    tables = torch.randperm(16 * 32).int().view(16, 32)
    return (
        q,
        k,
        v,
        Context(False, context_lens=torch.full((16,), 500, dtype=torch.int32), block_tables=tables),
    )


def sample() -> None:
    """A token for each of 64 sequences, from 32,000 logits."""
    logits, step = sampling_inputs()
    sampler.Sampler()(logits, step)


@cache
def sampling_inputs() -> tuple[torch.Tensor, SamplingStep]:
    torch.manual_seed(0)
    numbers = torch.arange(64)
    return torch.randn(64, 32000), SamplingStep(numbers, torch.full((64,), 0.7), numbers, numbers, 0)


def compute_logits() -> None:
    """Sixteen tokens for each of eight sequences, by a small model of random weights."""
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SMALL_MODEL))
        with LLM(folder, load_format="dummy", device="cpu", num_kvcache_blocks=16) as llm:
            llm.generate([[1, 2, 3]] * 8, params, use_tqdm=False)


SMALL_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
