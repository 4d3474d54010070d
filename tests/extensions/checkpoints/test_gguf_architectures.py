"""GGUF files of architectures that transformers builds: greedy tokens as by transformers itself."""

import pytest
from gguf_files import write_gguf
from gguf_packer import decode, encode
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING
from transformers_checkpoints import assert_answers_as_transformers, make

from nanovllm.extensions.transformers.config import VERIFIED
from tiny_checkpoints import one_thread  # noqa: F401

LONG = dict(long_factor=[4.0, 3.0, 2.0, 1.5], short_factor=[1.0, 1.1, 1.2, 1.3])
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128} | LONG
# By the names of files, the model type and what its configuration has here.
CASES = {
    "gemma2": (
        "gemma2",
        dict(head_dim=16, query_pre_attn_scalar=16, attn_logit_softcapping=5.0, tie_word_embeddings=True),
    ),
    "phi3": ("phi3", dict(sliding_window=8)),
    "phi3, all of which attends to all": ("phi3", dict(sliding_window=None)),
    "phi3, longer": (
        "phi3",
        dict(
            rope_parameters=LONGROPE | {"partial_rotary_factor": 0.5},
            original_max_position_embeddings=128,
        ),
    ),
    "granite": (
        "granite",
        dict(attention_multiplier=0.3, embedding_multiplier=2.0, residual_multiplier=0.5, logits_scaling=1.5),
    ),
    "granite with biases": ("granite", dict(attention_bias=True, mlp_bias=True)),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "smollm3": ("smollm3", dict(num_hidden_layers=4, layer_types=None, use_sliding_window=False)),
    "glm4": ("glm4", dict(head_dim=16)),
    "command-r": ("cohere", dict(logit_scale=0.5, tie_word_embeddings=True)),
    "command-r with norms": ("cohere", dict(use_qk_norm=True, tie_word_embeddings=True)),
    "cohere2": (
        "cohere2",
        dict(
            num_hidden_layers=4,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            tie_word_embeddings=True,
        ),
    ),
    "starcoder2": ("starcoder2", {}),
    "starcoder2, tied": ("starcoder2", dict(tie_word_embeddings=True, sliding_window=None)),
    "stablelm": ("stablelm", dict(use_qkv_bias=True)),
    "stablelm, norms and branches": ("stablelm", dict(use_parallel_residual=True, qk_layernorm=True)),
}


def make_file(folder, case, quantisation="F32", **changes):
    """A file, and in its folder the same model for transformers."""
    kind, settings = CASES[case]
    if kind not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know it")
    assert kind in VERIFIED
    make(kind, folder, **settings | changes)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "norm" not in name:
            tensors[name] = decode(encode(tensor, quantisation), quantisation)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return write_gguf(folder, quantisation)


@pytest.mark.parametrize("quantisation", ["F32", "Q8_0"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(tmp_path, case, quantisation):
    file = make_file(tmp_path, case, quantisation)
    assert_answers_as_transformers(file, tmp_path, model_impl="auto")
