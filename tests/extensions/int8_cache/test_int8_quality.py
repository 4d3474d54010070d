"""How close a model stays to itself when its KV cache has 8 bits: the KL divergence of the next token's
distribution, and how often its best token is the same.
"""

import random
from pathlib import Path

import pytest
import torch
from open_checkpoints import open_checkpoint
from safetensors.torch import load_file, save_file
from smollm2 import smollm2_gguf  # noqa: F401

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.kv_store import CacheLayout
from tiny_checkpoints import ARCHITECTURES, make_checkpoint

ROOT = Path(__file__).parents[3]


@torch.no_grad()
def next_logprobs(model: str | Path, tokens: list[int], **options) -> torch.Tensor:
    """Of the token after each of these, float32 [tokens, vocabulary]."""
    hidden = []
    with LLM(str(model), device="cpu", dtype="float32", **options) as llm:
        transformer, head = llm.model_runner.model.model, llm.model_runner.model.lm_head
        transformer.register_forward_hook(lambda _module, _inputs, output: hidden.append(output.clone()))
        llm.generate([tokens], SamplingParams(0, 1, True), use_tqdm=False)
        return head.logits(torch.cat(hidden)).log_softmax(-1)


def divergence(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """The mean Kullback-Leibler divergence."""
    return (exact.exp() * (exact - rounded)).sum(-1).mean().item()


def agreement(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """How often the best token is the same."""
    return (exact.argmax(-1) == rounded.argmax(-1)).float().mean().item()


@pytest.mark.slow
def test_smollm2_stays_close_to_itself(smollm2_gguf):  # noqa: F811
    """Over 1,000 tokens of prose and code, in chunks that read those before them from the cache."""
    files = ["README.md", "nanovllm/engine/scheduler.py"]
    text = "".join((ROOT / file).read_text()[:2200] for file in files)
    tokens = open_checkpoint(str(smollm2_gguf)).tokenizer().encode(text)[:1000]
    assert len(tokens) == 1000
    exact, rounded = (
        next_logprobs(
            smollm2_gguf, tokens, num_kvcache_blocks=8, max_num_batched_tokens=500, kv_cache_dtype=dtype
        )
        for dtype in ("float32", "int8")
    )
    assert divergence(exact, rounded) < 1e-3
    assert agreement(exact, rounded) > 0.985


@pytest.fixture
def fp8_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are stored as e4m3 numbers, unscaled."""
    store = CacheLayout.store

    def store_rounded(key: torch.Tensor, value: torch.Tensor, *arguments) -> None:
        for x in (key, value):
            x.copy_(x.clamp(-448, 448).to(torch.float8_e4m3fn))
        store(key, value, *arguments)

    monkeypatch.setattr(CacheLayout, "store", staticmethod(store_rounded))


def make_tokens() -> list[int]:
    pick = random.Random(0)
    return [pick.randrange(256) for _ in range(300)]


TINY = dict(num_kvcache_blocks=24, kvcache_block_size=16)


@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_random_models_stay_close_to_themselves(tmp_path, architecture, head_dim):
    folder = make_checkpoint(tmp_path, architecture, seed=5, head_dim=head_dim, tokenizer=False)
    tokens = make_tokens()
    exact, rounded = (next_logprobs(folder, tokens, **TINY, kv_cache_dtype=x) for x in ("float32", "int8"))
    # Where two experts are nearly as likely, a little is enough for the other one.
    most, least = (4e-3, 0.93) if architecture in ("qwen3_moe", "gpt_oss") else (1e-3, 0.95)
    assert 0 < divergence(exact, rounded) < most
    assert agreement(exact, rounded) > least


def test_large_biases_of_keys_do_not_blur_the_others(tmp_path, request):
    """Where unscaled fp8 fails."""
    folder = make_checkpoint(tmp_path, "qwen2", seed=5, head_dim=128, tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("k_proj.bias"):
            tensor.view(-1, 128)[:, [42, 125, 5]] = torch.tensor([50.0, -20.0, 10.0])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = make_tokens()
    exact, rounded = (next_logprobs(folder, tokens, **TINY, kv_cache_dtype=x) for x in ("float32", "int8"))
    assert divergence(exact, rounded) < 1e-3
    assert agreement(exact, rounded) > 0.95
    request.getfixturevalue("fp8_cache")
    fp8 = next_logprobs(folder, tokens, **TINY)
    assert divergence(exact, fp8) > 5e-3
    assert agreement(exact, fp8) < 0.9
