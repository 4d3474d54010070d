"""Quantised weights on a GPU, through the whole engine, against transformers with the unpacked ones."""

import pytest
import torch
from gpu_checks import GREEDY, assert_answers_as, make_prompts
from quantised_checkpoints import PACKERS, awq, mxfp4, quantise

from nanovllm import LLM
from tiny_checkpoints import make_checkpoint

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
    ("nf4, nested", "llama", 512),
    ("nf4", "qwen3", 192),
    ("int8 of bitsandbytes", "qwen2", 512),
    *((name, "qwen3_moe", 512) for name in ("fp8 block", "float channel", "int channel", "pack 4", "awq")),
    ("nf4", "qwen3_moe", 512),
    ("fp8 tensor", "qwen3_moe", 192),
    ("mxfp4", "gpt_oss", 512),
    ("mxfp4", "gpt_oss", 192),
]
BATCHES = 1, 2, 20, 40


def rounded_group(name: str, size: int) -> int | None:
    """For how many inputs of a product activations get a scale of 8 bits; None: they keep 16."""
    if name == "fp8 block":
        return 128 if size % 512 == 0 else None
    return 0 if name.startswith(("fp8", "float")) else None


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("name, architecture, size", QUANTISED)
def test_quantised_weights_answer_as_transformers_does_with_the_unpacked_ones(
    tmp_path, name, architecture, size, overlap
):
    assert_answers(tmp_path, name, architecture, size, overlap, rounded_group(name, size))


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "plain"])
@pytest.mark.parametrize("name, architecture", [("awq of 128", "qwen2"), ("pack 4, channel", "qwen3_moe")])
def test_int4_with_inputs_of_8_bits_answers_as_transformers_does_with_such(
    tmp_path, name, architecture, overlap
):
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    assert_answers(tmp_path, name, architecture, 512, overlap, 0, activation_dtype="fp8")


@pytest.mark.parametrize("name", ["awq", "gptq, one group", "nf4", "pack 8"])
def test_weights_of_models_in_float16_answer_as_transformers_does_too(tmp_path, name):
    assert_answers(tmp_path, name, "llama", 512, True, None, dtype="float16")


def assert_answers(tmp_path, name, architecture, size, overlap, group, **options) -> None:
    """`group`: as `rounded_group` has it."""
    sizes = dict(hidden_size=size, intermediate_size=size, head_dim=64, num_attention_heads=4)
    if architecture == "qwen3_moe":
        sizes["moe_intermediate_size"] = size // 2
    floats = make_checkpoint(tmp_path / "floats", architecture, seed=6, **sizes, num_key_value_heads=2)
    reference = tmp_path / "reference"
    packer = (PACKERS | {"mxfp4": mxfp4(), "awq of 128": awq(128)})[name]
    folder = str(quantise(floats, tmp_path / "packed", packer, reference))
    prompts = make_prompts(40)
    if not overlap:
        options |= {"kv_cache_dtype": "int8", "enforce_eager": True}
    with LLM(folder, **{"dtype": "bfloat16", "max_num_seqs": 40} | options) as llm:
        llm._overlap = overlap
        results = [result for n in BATCHES for result in llm.generate(prompts[:n], GREEDY, use_tqdm=False)]
    assert_answers_as(reference, [prompt for n in BATCHES for prompt in prompts[:n]], results, group)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["fp8 block", "float channel", "pack 4, asymmetric"])
def test_two_ranks_answer_as_transformers_does_too(tmp_path, name):
    sizes = dict(hidden_size=1024, intermediate_size=1024, head_dim=64, num_attention_heads=16)
    floats = make_checkpoint(tmp_path / "floats", "qwen3", seed=6, **sizes, num_key_value_heads=4)
    reference = tmp_path / "reference"
    folder = str(quantise(floats, tmp_path / "packed", PACKERS[name], reference))
    prompts = make_prompts(20)
    with LLM(folder, dtype="bfloat16", max_num_seqs=20, tensor_parallel_size=2) as llm:
        results = [
            result for n in BATCHES[:3] for result in llm.generate(prompts[:n], GREEDY, use_tqdm=False)
        ]
    group = rounded_group(name, 1024)
    assert_answers_as(reference, [prompt for n in BATCHES[:3] for prompt in prompts[:n]], results, group)
