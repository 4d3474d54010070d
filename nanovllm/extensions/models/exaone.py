"""EXAONE 3 and 3.5: Llama by other names, in config.json (see config.py) and of tensors."""

from collections.abc import Iterable, Iterator
from typing import Any

from nanovllm.extensions.models.decoder import renamed
from nanovllm.extensions.models.gguf import GGUFModel
from nanovllm.extensions.models.llama import LlamaForCausalLM

# Parts of a tensor's name, and what Llama calls them.
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
    gguf = GGUFModel("exaone", "exaone")

    def converted(self, tensors: Iterable[Any], _known: Any) -> Iterator[Any]:
        """A checkpoint's tensors by Llama's names."""
        return renamed(tensors, dict(map(str.split, NAMES.strip().splitlines())))
