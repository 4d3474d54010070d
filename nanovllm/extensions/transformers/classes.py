"""Attention of types that compute it themselves, where others call a function; and ALiBi (Press et al. 2022).

Their modules get a class of our own, which has transformers' parameters, but calls `attend`. It is told the
slope of each head for ALiBi, as the type's own function has it. That what these functions make of slopes and
positions is rounded, by Falcon's to bfloat16 and by BLOOM's to the model's dtype, is left out.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.extensions.transformers.faster import note_rotation
from nanovllm.extensions.transformers.parts import attend


def gpt_neo(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, None]:
    """Scores are not scaled, and a local layer has a window."""
    window = module.config.window_size if module.attention_type == "local" else 0
    out, _ = attend(module, query, key, value, None, scaling=1.0, sliding_window=window)
    return out.transpose(1, 2), None


def falcon(
    module: nn.Module, hidden_states: Tensor, position_embeddings: tuple[Tensor, ...] = (), **_: Any
) -> tuple[Tensor, None]:
    """A head of keys and of values lies behind the queries that attend to it, and is cached once for all."""
    qkv = module.query_key_value(hidden_states)
    kv_heads = getattr(module, "num_kv_heads", module.num_heads)
    parts = qkv.unflatten(-1, (kv_heads, -1, module.head_dim)).tensor_split((-2, -1), dim=3)
    query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in parts)
    if module.slopes is None:
        query, key = note_rotation(query, key, *position_embeddings)
    out, _ = attend(module, query, key, value, None, slopes=module.slopes)
    return module.dense(out.flatten(2)), None


def bloom(module: nn.Module, hidden_states: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, None]:
    out, _ = falcon(module, hidden_states)
    return out + residual, None


def mpt(module: nn.Module, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(-module.clip_qkv, module.clip_qkv)
    heads = qkv.unflatten(-1, (3, module.n_heads, -1)).transpose(1, 3)
    out, _ = attend(module, *heads.unbind(2), None, scaling=module.softmax_scale, slopes=module.slopes)
    return module.out_proj(out.flatten(2)), None


CLASSES = {  # by model type: the class of attention, and what takes the place of its methods
    "gpt_neo": ("GPTNeoSelfAttention", {"_attn": gpt_neo}),
    "falcon": ("FalconAttention", {"forward": falcon}),
    "bloom": ("BloomAttention", {"forward": bloom}),
    "mpt": ("MptAttention", {"forward": mpt}),
}


def change_classes(model: Any) -> None:
    """Of the attention of a model whose type is one of CLASSES."""
    name, methods = CLASSES[model.config.model_type]
    slopes = slopes_of(model)
    for module in model.modules():
        if type(module).__name__ == name:
            module.__class__ = type(name, (type(module),), methods)
            module.slopes = slopes
    base = model.base_model
    base.use_alibi = False  # Falcon's, which like these two functions makes a tensor for every step
    base.build_alibi_tensor = base.build_mpt_alibi_tensor = lambda *_, **__: None


def slopes_of(model: Any) -> Tensor | None:
    """Float32 [heads], or None: by how much what is added to the scores of two keys differs."""
    modeling, config = sys.modules[type(model).__module__], model.config
    if config.model_type == "mpt":
        most = config.attn_config.alibi_bias_max  # which transformers takes to be 8
        added = modeling.build_mpt_alibi_tensor(config.n_heads, 2, most)
    elif getattr(config, "alibi", config.model_type == "bloom"):
        added = modeling.build_alibi_tensor(torch.ones(1, 2), config.num_attention_heads, torch.float32)
        if config.model_type == "falcon":  # added before scores are scaled
            added *= config.head_dim**-0.5
    else:
        return None
    return added.diff().flatten()
