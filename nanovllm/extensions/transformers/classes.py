"""Attention of types that have a class of it for each implementation, where others call a function.

A class of our own is registered under the function's name. It has transformers' parameters, but calls
`attend`.
"""

import importlib
from typing import Any

from torch import Tensor, nn

from nanovllm.extensions.transformers.faster import note_rotation
from nanovllm.extensions.transformers.parts import NAME, attend


def register_class(model_type: str) -> None:
    if model_type in METHODS:
        modeling = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        classes = getattr(modeling, f"{model_type.upper()}_ATTENTION_CLASSES")
        theirs = classes["eager"]
        classes[NAME] = type(theirs.__name__, (theirs,), METHODS[model_type])


def gpt_neo(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[Tensor, None]:
    """Scores are not scaled, and a local layer has a window."""
    window = module.config.window_size if module.attention_type == "local" else 0
    out, _ = attend(module, query, key, value, None, scaling=1.0, sliding_window=window)
    return out.transpose(1, 2), None


def falcon(
    module: nn.Module, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
) -> tuple[Tensor, None]:
    """A head of keys and of values lies behind the queries that attend to it, and is cached once for all."""
    qkv = module.query_key_value(hidden_states)
    heads = qkv.unflatten(-1, (module.num_kv_heads, -1, module.head_dim))
    parts = heads.tensor_split((-2, -1), dim=3)
    query, key, value = (part.flatten(2, 3).transpose(1, 2) for part in parts)
    query, key = note_rotation(query, key, *position_embeddings)
    out, _ = attend(module, query, key, value, None)
    return module.dense(out.flatten(2)), None


METHODS = {"gpt_neo": {"_attn": gpt_neo}, "falcon": {"forward": falcon}}  # by model type
