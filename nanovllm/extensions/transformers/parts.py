"""What stands in place of the attention of a model that transformers has built.

transformers calls attention and what makes its masks by functions that are registered under a name. Before
the model has memory it is tried out on the meta device, where tensors have shapes only: then each attention
module gets what it asks for, and a forward that depends on data fails, which no CUDA graph could hold either.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.extensions.transformers.faster import hands_over_rotation
from nanovllm.layers.attention import Attention

NAME = "nano_vllm"  # of the functions
OTHER_MASK = -1  # in place of a window; some models make such a mask, but no layer uses it


def register() -> None:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, note_window)


def note_window(*, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> Tensor:
    """
    transformers' interface, called when a model is tried out only: a mask that says how far its layers look
    back; OTHER_MASK if the function of (batch, head, query, key) is neither causal nor of a window.
    """
    window = local_size or 0
    distance = window or 64
    query = torch.tensor(2 * window + 64, device="cpu")
    sees = {1: False, 0: True, 1 - distance: True, -distance: window == 0}
    is_known = all(bool(mask_function(0, 0, query, query + step)) is seen for step, seen in sees.items())
    mask = torch.empty(1, 1, 1, 1, device="meta")
    mask.window = window if is_known else OTHER_MASK
    return mask


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """
    transformers' interface: query, key and value [1, heads, tokens, head_dim], rotated already or with a
    `rotation`, to [1, tokens, heads, head_dim]. Positions and masks follow from the step's context.
    """
    _, num_heads, num_tokens, _ = query.shape
    value_dim = value.shape[-1]
    if query.is_meta:
        options["sliding_window"] = getattr(attention_mask, "window", options.get("sliding_window"))
        attention = make_attention(module, query, key, value, options)
        vars(module)["nano_vllm_attention"] = attention  # not a child, or it would have two names
        if not hands_over_rotation(query, key, value):
            vars(module).pop("forward", None)  # it rotates by itself again
        return query.new_empty(1, num_tokens, num_heads, value_dim), None
    attention: Attention = module.nano_vllm_attention
    if value_dim < attention.head_dim:
        value = F.pad(value, (0, attention.head_dim - value_dim))
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    if hasattr(query, "rotation"):
        rotation = query.rotation
        qkv = torch.cat((q, k, v), dim=1).flatten(1)
        q, k, v = attention.rotate_and_store(rotation.positions, qkv, rotation, None, None)
    else:
        q, k, v = attention.store(q.contiguous(), k.contiguous(), v.contiguous())
    return attention(q, k, v).view(1, num_tokens, num_heads, attention.head_dim)[..., :value_dim], None


def make_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> Attention:
    """As a module asks for it, in `features` too. Raises ValueError for what is not computed here."""
    name = f"{type(module).__name__} is not supported"
    if options.get("position_bias") is not None:
        raise ValueError(f"{name}: its attention depends on distances between tokens")
    if options["sliding_window"] == OTHER_MASK:
        raise ValueError(f"{name}: its mask is neither causal nor of a window")
    if hasattr(module, "nano_vllm_attention"):
        raise ValueError(f"{name}: it attends more than once")
    (_, num_heads, num_tokens, head_dim), (_, num_kv_heads, *_) = query.shape, key.shape
    is_usual = key.shape == (1, num_kv_heads, num_tokens, head_dim) and value.shape[:3] == key.shape[:3]
    if not is_usual or value.shape[-1] > head_dim or not getattr(module, "is_causal", True):
        raise ValueError(f"{name}: it attends not only to the tokens before")
    sinks = options.get("s_aux")
    if not isinstance(sinks, nn.Parameter | None):
        raise ValueError(f"{name}: its sinks are computed")
    scaling = options.get("scaling")
    scale = head_dim**-0.5 if scaling is None else float(scaling)
    attention = Attention(num_heads, head_dim, scale, num_kv_heads)
    attention.features = {
        "window": options["sliding_window"] or 0,
        "softcap": options.get("softcap") or 0.0,
        "sinks": sinks,
        "slopes": options.get("slopes"),
    }
    # Layers that do the same with the same keys and values share one cache.
    return vars(key).setdefault((value, num_heads, scale, *attention.features.values()), attention)
