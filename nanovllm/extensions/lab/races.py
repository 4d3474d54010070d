"""Two runs that are timed, of the host's work alone and of a whole engine."""

import json
import tempfile
from pathlib import Path

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.lab.simulator import Simulator

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


def schedule() -> None:
    """300 requests through a simulated engine: the host's work alone."""
    lengths = range(10, 910, 3)
    params = [SamplingParams(temperature=0.0, max_tokens=length // 4, ignore_eos=True) for length in lengths]
    with Simulator(num_kvcache_blocks=1500, kvcache_block_size=16) as engine:
        engine.generate([list(range(length)) for length in lengths], params, use_tqdm=False)


def generate() -> None:
    """64 tokens for each of eight sequences, by a small model of random weights."""
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SMALL_MODEL))
        with LLM(folder, load_format="dummy", device="cpu", num_kvcache_blocks=16) as llm:
            llm.generate([[1, 2, 3]] * 8, params, use_tqdm=False)
