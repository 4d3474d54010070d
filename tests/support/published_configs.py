"""config.json of published models, with the sizes of a toy: all that decides how they are built is kept."""

import json
from pathlib import Path

from transformers import CONFIG_MAPPING
from transformers_checkpoints import save_random

OPT = dict(model_type="opt", architectures=["OPTForCausalLM"], vocab_size=320, hidden_size=64, ffn_dim=96)
OPT |= dict(num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=512, word_embed_proj_dim=64)
OPT |= dict(activation_function="relu", do_layer_norm_before=True, layerdrop=0.0, dropout=0.1)
OPT |= dict(bos_token_id=2, eos_token_id=2, pad_token_id=1, prefix="</s>", torch_dtype="float16")

GPTJ = dict(model_type="gptj", architectures=["GPTJForCausalLM"], vocab_size=320, n_embd=64, n_layer=2)
GPTJ |= dict(n_head=2, n_inner=None, n_positions=512, rotary=True, rotary_dim=8, scale_attn_weights=True)
GPTJ |= dict(activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=False)
GPTJ |= dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=256, eos_token_id=256)

CODEGEN = dict(model_type="codegen", architectures=["CodeGenForCausalLM"], vocab_size=320, n_embd=64)
CODEGEN |= dict(n_layer=2, n_head=4, n_ctx=512, n_inner=None, n_positions=512, rotary_dim=8)
CODEGEN |= dict(activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=False)
CODEGEN |= dict(scale_attn_weights=True, bos_token_id=1, eos_token_id=256, torch_dtype="float16")

NEO = dict(model_type="gpt_neo", architectures=["GPTNeoForCausalLM"], vocab_size=320, hidden_size=64)
NEO |= dict(num_layers=2, num_heads=4, intermediate_size=None, max_position_embeddings=512, window_size=16)
NEO |= dict(attention_types=[[["global", "local"], 1]], attention_layers=["global", "local"])
NEO |= dict(activation_function="gelu_new", layer_norm_epsilon=1e-5, bos_token_id=256, eos_token_id=256)
NEO |= dict(attention_dropout=0, embed_dropout=0, resid_dropout=0)

FALCON = dict(model_type="falcon", architectures=["FalconForCausalLM"], vocab_size=320, num_hidden_layers=2)
FALCON |= dict(alibi=False, bias=False, multi_query=True, parallel_attn=True, layer_norm_epsilon=1e-5)
FALCON |= dict(bos_token_id=11, eos_token_id=11, hidden_dropout=0.0, torch_dtype="bfloat16")
FALCON_40B = FALCON | dict(new_decoder_architecture=True, num_kv_heads=2, hidden_size=64)

FALCON_RW = FALCON | dict(alibi=True, bias=True, multi_query=False, parallel_attn=False, hidden_size=64)
FALCON_RW |= dict(new_decoder_architecture=False, apply_residual_connection_post_layernorm=False)

BLOOM = dict(model_type="bloom", architectures=["BloomForCausalLM"], vocab_size=320, n_layer=2, n_inner=None)
BLOOM |= dict(apply_residual_connection_post_layernorm=False, layer_norm_epsilon=1e-5, pretraining_tp=1)
BLOOM |= dict(attention_dropout=0.0, hidden_dropout=0.0, slow_but_exact=False, masked_softmax_fusion=True)
BLOOM |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=3, skip_bias_add=True, offset_alibi=100)

MPT_ATTENTION = dict(alibi=True, alibi_bias_max=8, attn_impl="torch", attn_pdrop=0, clip_qkv=None)
MPT_ATTENTION |= dict(attn_type="multihead_attention", attn_uses_sequence_id=False, prefix_lm=False)
MPT_ATTENTION |= dict(qk_ln=False, softmax_scale=None)
MPT = dict(model_type="mpt", architectures=["MPTForCausalLM"], vocab_size=320, d_model=64, n_layers=2)
MPT |= dict(expansion_ratio=4, learned_pos_emb=True, logit_scale=None, max_seq_len=512, no_bias=True)
MPT |= dict(attn_config=MPT_ATTENTION, emb_pdrop=0, resid_pdrop=0, embedding_fraction=1.0, use_cache=False)
MPT |= dict(norm_type="low_precision_layernorm", torch_dtype="bfloat16", init_device="cpu", verbose=0)
MPT |= dict(auto_map={"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"})

GRANITE = dict(model_type="granitemoehybrid", architectures=["GraniteMoeHybridForCausalLM"], vocab_size=320)
GRANITE |= dict(num_hidden_layers=2, layer_types=["attention"] * 2, hidden_size=64, hidden_act="silu")
GRANITE |= dict(num_attention_heads=4, num_key_value_heads=1, attention_bias=False, intermediate_size=96)
GRANITE |= dict(num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=96, rms_norm_eps=1e-5)
GRANITE |= dict(position_embedding_type="rope", rope_theta=10000000, rope_scaling=None, logits_scaling=8)
GRANITE |= dict(embedding_multiplier=12, residual_multiplier=0.22, attention_multiplier=0.0625)
GRANITE |= dict(max_position_embeddings=512, tie_word_embeddings=True, mamba_n_heads=4, mamba_d_head=32)
GRANITE |= dict(bos_token_id=256, eos_token_id=256, pad_token_id=257)

# The window is smaller, so that prompts pass it.
GEMMA_3N = dict(model_type="gemma3n_text", architectures=["Gemma3nForCausalLM"], vocab_size=320)
GEMMA_3N |= dict(vocab_size_per_layer_input=256, hidden_size_per_layer_input=8, hidden_size=64, head_dim=16)
GEMMA_3N |= dict(num_attention_heads=4, num_key_value_heads=1, max_position_embeddings=512, sliding_window=8)
GEMMA_3N |= dict(altup_active_idx=0, altup_coef_clip=120.0, altup_correct_scale=True, altup_num_inputs=4)
GEMMA_3N |= dict(altup_lr_multiplier=1.0, laurel_rank=8, final_logit_softcapping=30.0, rms_norm_eps=1e-6)
GEMMA_3N |= dict(hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=16, rope_theta=1000000.0)
GEMMA_3N |= dict(rope_local_base_freq=10000.0, rope_scaling=None, attention_bias=False, use_cache=True)
LAYERS = ["sliding_attention"] * 4 + ["full_attention"]

PUBLISHED = {
    "facebook/opt-125m": OPT | dict(_remove_final_layer_norm=False),
    "facebook/opt-350m": OPT | dict(do_layer_norm_before=False, word_embed_proj_dim=32),
    "facebook/galactica-1.3b": OPT
    | dict(activation_function="gelu", bos_token_id=0, learned_embeddings=True, scale_embeddings=False),
    "EleutherAI/gpt-j-6b": GPTJ | dict(gradient_checkpointing=False, summary_type="cls_index"),
    "togethercomputer/GPT-JT-6B-v1": GPTJ | dict(torch_dtype="float16"),
    "nomic-ai/gpt4all-j": GPTJ | dict(torch_dtype="float32", use_cache=False),
    "Salesforce/codegen-350M-mono": CODEGEN,
    "Salesforce/codegen-2B-multi": CODEGEN | dict(n_embd=80, rotary_dim=16),
    "Salesforce/codegen-16B-nl": CODEGEN | dict(n_embd=128, n_head=8, rotary_dim=4),
    "EleutherAI/gpt-neo-125m": NEO,
    "EleutherAI/gpt-neo-2.7B": NEO
    | dict(
        num_layers=4, attention_types=[[["global", "local"], 2]], attention_layers=["global", "local"] * 2
    ),
    "roneneldan/TinyStories-1M": NEO
    | dict(num_heads=16, gradient_checkpointing=False, torch_dtype="float32"),
    "tiiuae/falcon-7b": FALCON
    | dict(new_decoder_architecture=False, num_attention_heads=71, hidden_size=568)
    | dict(apply_residual_connection_post_layernorm=False),
    "tiiuae/falcon-40b": FALCON_40B | dict(num_attention_heads=16),
    "tiiuae/falcon-11B": FALCON_40B
    | dict(num_attention_heads=8, num_ln_in_parallel_attn=1, ff_factor=4, ffn_hidden_size=256)
    | dict(rope_theta=500042, max_position_embeddings=512, activation="gelu", tie_word_embeddings=False),
    "tiiuae/falcon-rw-1b": FALCON_RW | dict(num_attention_heads=8, bos_token_id=1, eos_token_id=2),
    "tiiuae/falcon-rw-7b": FALCON_RW | dict(num_attention_heads=4),
    "bigscience/bloom-560m": BLOOM | dict(n_embed=64, num_attention_heads=16),
    "bigscience/bloom-7b1": BLOOM
    | dict(hidden_size=64, n_head=4, seq_length=512, unk_token_id=0, attention_softmax_in_fp32=True),
    "bigscience/bloom": BLOOM | dict(n_embed=112, num_attention_heads=14, pretraining_tp=4, seq_length=512),
    "mosaicml/mpt-7b": MPT | dict(n_heads=4),
    "mosaicml/mpt-7b-8k": MPT | dict(n_heads=4, attn_config=MPT_ATTENTION | {"clip_qkv": 0.5}),
    "mosaicml/mpt-30b": MPT | dict(d_model=112, n_heads=7),
    "ibm-granite/granite-4.0-micro": GRANITE | dict(num_attention_heads=8, logits_scaling=10),
    "ibm-granite/granite-4.0-1b": GRANITE,
    "ibm-granite/granite-4.0-350m": GRANITE | dict(residual_multiplier=0.263, logits_scaling=4),
    "google/gemma-3n-E4B": GEMMA_3N
    | dict(num_hidden_layers=15, num_kv_shared_layers=5, layer_types=LAYERS * 3, num_key_value_heads=2)
    | dict(intermediate_size=[96] * 15, activation_sparsity_pattern=[0.95] * 5 + [0.0] * 10),
    "google/gemma-3n-E2B": GEMMA_3N
    | dict(num_hidden_layers=10, num_kv_shared_layers=4, layer_types=LAYERS * 2, intermediate_size=[96] * 10)
    | dict(activation_sparsity_pattern=[0.95] * 4 + [0.0] * 6),
    # As "MatFormer" slices of it are exported: networks of different widths.
    "a slice of google/gemma-3n-E4B": GEMMA_3N
    | dict(num_hidden_layers=10, num_kv_shared_layers=5, layer_types=LAYERS * 2)
    | dict(intermediate_size=[64] * 3 + [96] * 7, activation_sparsity_pattern=[0.95] * 3 + [0.0] * 7),
}

GLM = dict(model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"], vocab_size=320, hidden_size=64)
GLM |= dict(num_attention_heads=8, num_key_value_heads=2, head_dim=16, partial_rotary_factor=0.5)
GLM |= dict(intermediate_size=96, moe_intermediate_size=24, num_experts_per_tok=3, n_shared_experts=1)
GLM |= dict(n_group=1, topk_group=1, norm_topk_prob=True, num_nextn_predict_layers=1, rms_norm_eps=1e-5)
GLM |= dict(attention_bias=True, attention_dropout=0.0, hidden_act="silu", tie_word_embeddings=False)
GLM |= dict(max_position_embeddings=512, rope_scaling=None, rope_theta=1000000, torch_dtype="bfloat16")
GLM |= dict(pad_token_id=255, eos_token_id=[255, 256, 257])
LARGE_GLM = GLM | dict(num_hidden_layers=5, n_routed_experts=20, first_k_dense_replace=3, use_qk_norm=True)

QWEN2_MOE = dict(model_type="qwen2_moe", architectures=["Qwen2MoeForCausalLM"], vocab_size=320)
QWEN2_MOE |= dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, hidden_act="silu")
QWEN2_MOE |= dict(num_hidden_layers=2, max_window_layers=1, max_position_embeddings=512, rope_theta=1e6)
QWEN2_MOE |= dict(intermediate_size=96, moe_intermediate_size=24, shared_expert_intermediate_size=96)
QWEN2_MOE |= dict(num_experts=15, num_experts_per_tok=4, decoder_sparse_step=1, norm_topk_prob=False)
QWEN2_MOE |= dict(sliding_window=256, use_sliding_window=False, rms_norm_eps=1e-6, router_aux_loss_coef=0.001)
QWEN2_MOE |= dict(tie_word_embeddings=False, torch_dtype="bfloat16", bos_token_id=255, eos_token_id=255)

# Of models that have a class here.
NATIVE = {
    "zai-org/GLM-4.5-Air": GLM
    | dict(num_hidden_layers=3, n_routed_experts=16, first_k_dense_replace=1, use_qk_norm=False)
    | dict(routed_scaling_factor=1.0),
    "zai-org/GLM-4.5": LARGE_GLM | dict(routed_scaling_factor=2.5),
    "zai-org/GLM-4.6": LARGE_GLM | dict(routed_scaling_factor=2.5, max_position_embeddings=792),
    "Qwen/Qwen1.5-MoE-A2.7B": QWEN2_MOE,
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": QWEN2_MOE | dict(output_router_logits=False, eos_token_id=256),
    "Qwen/Qwen2-57B-A14B-Instruct": QWEN2_MOE
    | dict(num_attention_heads=7, num_key_value_heads=1, hidden_size=112, num_hidden_layers=3)
    | dict(num_experts=16, num_experts_per_tok=8, shared_expert_intermediate_size=192),
}


def make_published(name: str, folder: Path) -> Path:
    """A checkpoint of such a model with random weights."""
    fields = (PUBLISHED | NATIVE)[name]
    save_random(CONFIG_MAPPING[fields["model_type"]](**fields), folder)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder
