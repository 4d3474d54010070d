"""Quantised weights on a GPU, through the whole engine, against transformers with the unpacked ones."""

import pytest
import torch
from quantised_checkpoints import PACKERS, quantise
from test_gpu import GREEDY, make_prompts

from nanovllm import LLM
from tiny_checkpoints import load_reference, make_checkpoint

pytestmark = pytest.mark.gpu

# Every format, with sizes that its fastest kernels take, and once with some that they do not.
QUANTISED = [
    ("fp8 block", "qwen3", 512),
    ("fp8 block", "llama", 192),
    ("fp8 tensor", "llama", 512),
    ("float channel", "qwen2", 512),
    ("int channel", "qwen3", 512),
    ("int group, asymmetric", "qwen3", 512),
    ("pack 8", "qwen2", 512),
    ("pack 4", "qwen3", 512),
    ("pack 4, asymmetric", "llama", 192),
    ("gptq, ordered", "qwen3", 512),
    ("gptq, one group", "qwen3", 512),
    ("awq", "qwen2", 512),
]


def gaps(model, prompts: list[list[int]], results: list[dict]) -> torch.Tensor:
    """How much less likely each drawn token is to transformers than the likeliest, as logits."""
    found = []
    for prompt, result in zip(prompts, results, strict=False):
        ids = torch.tensor([[*prompt, *result["token_ids"]]], device="cuda")
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        found.append(logits.amax(-1) - chosen)
    return torch.cat(found)


def assert_answers_as(reference: str, prompts: list[list[int]], results: list[dict], name: str) -> None:
    """A token drawn at random has a gap of about 10. Input of 8 bits is rounded 16 times as coarsely."""
    found = gaps(load_reference(reference).cuda(), prompts, results)
    limit = 0.15 if name.startswith(("fp8", "float")) else 0.02
    limit *= 1 if len(results) > 2 else 10  # few tokens
    assert found.mean() < limit, (found.mean().item(), found.max().item())


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("name, architecture, size", QUANTISED)
def test_quantised_weights_answer_as_transformers_does_with_the_unpacked_ones(
    tmp_path, name, architecture, size, overlap
):
    sizes = dict(hidden_size=size, intermediate_size=size, head_dim=64, num_attention_heads=4)
    floats = make_checkpoint(tmp_path / "floats", architecture, seed=6, **sizes, num_key_value_heads=2)
    reference = tmp_path / "reference"
    folder = str(quantise(floats, tmp_path / "packed", PACKERS[name], reference))
    prompts = make_prompts(40)
    caches = {} if overlap else {"kv_cache_dtype": "int8", "enforce_eager": True}
    with LLM(folder, dtype="bfloat16", max_num_seqs=40, **caches) as llm:
        llm._overlap = overlap
        for batch in (1, 2, 20, 40):
            results = llm.generate(prompts[:batch], GREEDY, use_tqdm=False)
            assert_answers_as(reference, prompts, results, name)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["fp8 block", "float channel", "pack 4, asymmetric"])
def test_two_ranks_answer_as_transformers_does_too(tmp_path, name):
    sizes = dict(hidden_size=1024, intermediate_size=1024, head_dim=64, num_attention_heads=16)
    floats = make_checkpoint(tmp_path / "floats", "qwen3", seed=6, **sizes, num_key_value_heads=4)
    reference = tmp_path / "reference"
    folder = str(quantise(floats, tmp_path / "packed", PACKERS[name], reference))
    prompts = make_prompts(20)
    with LLM(folder, dtype="bfloat16", max_num_seqs=20, tensor_parallel_size=2) as llm:
        for batch in (1, 20):
            results = llm.generate(prompts[:batch], GREEDY, use_tqdm=False)
            assert_answers_as(reference, prompts, results, name)
