"""EXAONE 3 and 3.5: Llama by other names, in config.json (see config.py) and of tensors."""

from nanovllm.extensions.models.gguf import GGUFModel
from nanovllm.extensions.models.llama import LlamaForCausalLM

NAMES = """
    transformer.wte.            model.embed_tokens.
    transformer.h.              model.layers.
    transformer.ln_f.           model.norm.
    .attn.attention.out_proj.   .self_attn.o_proj.
    .attn.attention.            .self_attn.
    .ln_1.                      .input_layernorm.
    .ln_2.                      .post_attention_layernorm.
    .mlp.c_fc_0.                .mlp.gate_proj.
    .mlp.c_fc_1.                .mlp.up_proj.
    .mlp.c_proj.                .mlp.down_proj.
"""


class ExaoneForCausalLM(LlamaForCausalLM):
    model_type = "exaone"
    renamed_parts = dict(map(str.split, NAMES.strip().splitlines()))
    gguf = GGUFModel("exaone", "exaone")
