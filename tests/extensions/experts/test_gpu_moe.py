"""Mixtures of experts on a GPU, through the whole engine, against transformers."""

import pytest
import torch
from gpu_checks import GREEDY, MODES, assert_answers_as, assert_greedy, make_prompts
from transformers_checkpoints import make

from nanovllm import LLM
from tiny_checkpoints import load_reference, make_checkpoint

pytestmark = pytest.mark.gpu

MODELS = {
    "as published": dict(hidden_size=512, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128),
    "an MLP in every other layer": dict(num_hidden_layers=4, decoder_sparse_step=2),
    "rows of no 16 bytes": dict(hidden_size=60, num_experts=7, moe_intermediate_size=20),
    "glm4_moe": dict(num_hidden_layers=3, use_qk_norm=True, attention_bias=True),
    "qwen2_moe": dict(use_sliding_window=False, layer_types=None, shared_expert_intermediate_size=128),
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    sizes = dict(head_dim=64, num_attention_heads=4, num_key_value_heads=2) | MODELS[request.param]
    folder = tmp_path_factory.mktemp("checkpoint")
    if request.param in ("glm4_moe", "qwen2_moe"):
        return str(make(request.param, folder, hidden_size=256, moe_intermediate_size=64, **sizes))
    return str(make_checkpoint(folder, "qwen3_moe", seed=4, **sizes))


@pytest.mark.parametrize("mode", ["graphs", "eager", "preemption", "chunks"])
@pytest.mark.usefixtures("no_forecast")
def test_tokens_are_greedy_decoding_of_transformers_in_float32(checkpoint, mode):
    reference, prompts = load_reference(checkpoint).cuda(), make_prompts()
    with LLM(checkpoint, **MODES[mode]) as llm:
        for batch in (1, 3, 20):
            results = llm.generate(prompts[:batch], GREEDY, use_tqdm=False)
            for prompt, result in zip(prompts, results, strict=False):
                assert_greedy(reference, prompt, result["token_ids"], 2e-3)


def assert_near(checkpoint: str, **options) -> None:
    prompts, batches = make_prompts(100), (1, 2, 4, 20, 100)
    with LLM(checkpoint, dtype="bfloat16", max_num_seqs=100, **options) as llm:
        results = [result for n in batches for result in llm.generate(prompts[:n], GREEDY, use_tqdm=False)]
    assert_answers_as(checkpoint, [prompt for n in batches for prompt in prompts[:n]], results)


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_bfloat16_stays_near_transformers(checkpoint, enforce_eager):
    assert_near(checkpoint, enforce_eager=enforce_eager)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_stay_near_transformers_too(checkpoint):
    assert_near(checkpoint, tensor_parallel_size=2)
