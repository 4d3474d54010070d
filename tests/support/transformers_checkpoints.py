"""Small random checkpoints of any model type that transformers knows."""

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from nanovllm import LLM, SamplingParams
from tiny_checkpoints import EXACT, SMALL, assert_greedy, load_reference

# Of mixtures of experts, by the names that configurations have.
EXPERTS = dict(num_experts=12, num_local_experts=12, n_routed_experts=12, num_experts_per_tok=2)
EXPERTS |= dict(
    n_shared_experts=1,
    moe_intermediate_size=24,
    expert_ffn_hidden_size=24,
    shared_expert_intermediate_size=24,
)
# Layers of both kinds, where there are two: a window, and experts.
MIXED = dict(sliding_window=8, first_k_dense_replace=1, num_dense_layers=1, moe_layer_start_index=1)
MIXED |= dict(use_sliding_window=True, layer_types=["sliding_attention", "full_attention"])
# What a type needs besides.
LATENT = dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, v_head_dim=8)
LATENT |= dict(qk_nope_head_dim=8, qk_rope_head_dim=8, n_group=2, topk_group=1, first_k_dense_replace=1)
CHANGES = dict.fromkeys("deepseek_v2 deepseek_v3 glm4_moe_lite axk1 minicpm3".split(), LATENT)
CHANGES["youtu"] = LATENT | {"pad_token_id": None}  # a row of whose embedding transformers clears
CHANGES["gemma4_text"] = dict(
    vocab_size_per_layer_input=320,
    hidden_size_per_layer_input=16,
    head_dim=16,
    global_head_dim=32,
    num_hidden_layers=4,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
)
CHANGES["gemma3n_text"] = dict(
    vocab_size_per_layer_input=300,  # larger ids have none
    hidden_size_per_layer_input=16,
    head_dim=16,
    num_hidden_layers=4,
    num_kv_shared_layers=2,
    layer_types=["sliding_attention", "full_attention"] * 2,
    activation_sparsity_pattern=[0.9, 0.9, 0.0, 0.0],
    intermediate_size=[96, 96, 128, 128],
    laurel_rank=8,
)
CHANGES |= dict.fromkeys(["codegen", "gptj"], {"rotary_dim": 8})
CHANGES["gpt_neo"] = {"attention_types": [[["global", "local"], 1]], "window_size": 8}
CHANGES["granitemoehybrid"] = {"layer_types": ["attention"] * 2}
CHANGES |= dict.fromkeys("hunyuan_v1_dense hunyuan_v1_moe ministral dots1 helium".split(), {"head_dim": 16})


def settings_of(kind: str) -> set[str]:
    cls = CONFIG_MAPPING[kind]
    known = {"tie_word_embeddings", *getattr(cls, "attribute_map", {})}
    return known | ({field.name for field in fields(cls)} if is_dataclass(cls) else set(cls().to_dict()))


def make(kind: str, folder: Path, has_own_defaults: bool = False, **changes) -> Path:
    """
    A checkpoint with those settings of SMALL that its configuration has, and, unless with its class's own
    defaults, of MIXED.
    """
    cls, known = CONFIG_MAPPING[kind], settings_of(kind)
    wanted = SMALL | EXPERTS | ({"tie_word_embeddings": None} if has_own_defaults else MIXED)
    settings = {name: value for name, value in wanted.items() if name in known and value is not None}
    settings |= {"eos_token_id": 1, "bos_token_id": 1, "pad_token_id": 1}
    save_random(cls(**settings | CHANGES.get(kind, {}) | changes), folder)
    return folder


def save_random(config: PretrainedConfig, folder: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.3 if name.endswith("bias") else 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # of routers
                buffer.normal_(0, 0.3)
    model.save_pretrained(folder)


PROMPTS = [[1, 2, 3], [*range(40)], [7] * 17, [*range(39), 5]]
GREEDY = SamplingParams(0, 6, True)


def assert_answers_as_transformers(folder: Path, reference: Path | None = None, **options) -> None:
    """Chunks of prompts, hits in the cache and several sequences in a step."""
    theirs = load_reference(reference or folder)
    usual = dict(num_kvcache_blocks=40, max_num_batched_tokens=24, model_impl="transformers")
    options = EXACT | usual | options
    with LLM(str(folder), **options) as llm:
        results = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        scores = llm.score(PROMPTS, use_tqdm=False)
    for prompt, result, score in zip(PROMPTS, results, scores, strict=True):
        logits = assert_greedy(theirs, prompt, result["token_ids"])[: len(prompt) - 1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(prompt)[1:, None]).sum().item()
        assert score["logprob"] == pytest.approx(expected, abs=2e-3)
