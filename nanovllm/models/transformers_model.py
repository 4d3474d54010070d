"""Any decoder that transformers can build: its modules, with this project's attention and matrix products.

transformers computes everything between the products as its authors wrote it. Its attention modules call a
function that is registered under a name; here that is one which stores keys and values in the paged cache and
attends to those of each sequence, so that many sequences can be computed as one row of tokens. Linear layers
become this project's, so that formats of weights work. Nothing here knows an architecture by name.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.checkpoints.transformers_config import transformers_config
from nanovllm.distributed.group import get_group
from nanovllm.layers.attention import Attention
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.quantization.scaled import Part
from nanovllm.utils.context import get_context

NAME = "nano_vllm"  # of the attention function
# What attention functions may be given that this project's attention does not compute.
UNKNOWN_ARGUMENTS = ("softcap", "s_aux", "position_bias")


class TransformersForCausalLM(nn.Module):
    """Its parameters have the names that transformers gives them, which are those of checkpoints."""

    packed_modules_mapping: dict[str, tuple[str, Any]] = {}

    def __init__(self, config: ModelConfig):
        super().__init__()
        if get_group().size > 1:
            raise ValueError("tensor_parallel_size must be 1 for an architecture that transformers builds")
        model = build(config)
        self._base = (model.base_model,)  # not a child, or its parameters would have two names
        self.attention = nn.ModuleList(self._give_attention(config))
        for parent in [*self._base[0].modules()]:
            for name, child in [*parent.named_children()]:
                if type(child) is nn.Linear:
                    setattr(
                        parent, name, Linear(child.in_features, child.out_features, child.bias is not None)
                    )
        give_memory(model)
        head = Head(model)
        for name, child in model.named_children():
            self.add_module(name, child)
        object.__setattr__(self, "lm_head", head)  # under its own name it is a child already
        # A mask of four dimensions is one that transformers passes on as it is, and `attend` needs none.
        self.register_buffer("no_mask", torch.empty(1, 1, 1, 1), persistent=False)

    def _give_attention(self, config: ModelConfig) -> Iterator[Attention]:
        """Each layer's attention module gets a part of the cache."""
        found = {
            module.layer_idx: module
            for module in self._base[0].modules()
            if type(getattr(module, "layer_idx", None)) is int and "ttention" in type(module).__name__
        }
        if [*sorted(found)] != [*range(config.num_hidden_layers)]:
            name = type(self._base[0]).__name__
            raise ValueError(
                f"{name} is not supported: not each of its layers has attention of the usual kind"
            )
        for _, module in sorted(found.items()):
            scale = config.head_dim**-0.5  # `attend` is told if it is another
            heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
            attention = Attention(heads, config.head_dim, scale, kv_heads)
            module.nano_vllm_attention = (attention,)  # not a child, either
            yield attention

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """input_ids, positions int64 [tokens] -> hidden states [tokens, hidden_size]."""
        tokens = {"input_ids": input_ids[None], "position_ids": positions[None]}
        return self._base[0](**tokens, attention_mask=self.no_mask, use_cache=False).last_hidden_state[0]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """-> logits [sequences, vocab_size]."""
        return self.lm_head(hidden_states)


def build(config: ModelConfig) -> Any:
    """
    The model of transformers, its parameters without memory. Raises ValueError if it does not let other
    attention be used.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *_args, **_options: None)  # `attend` needs no mask
    theirs = transformers_config(config.raw)
    theirs.num_hidden_layers = config.num_hidden_layers
    with without_memory():
        try:
            dtype = torch.get_default_dtype()
            model = AutoModelForCausalLM.from_config(theirs, attn_implementation=NAME, dtype=dtype)
        except Exception as error:  # whatever a foreign file makes of foreign code
            raise ValueError(f"transformers cannot build the model: {error!r:.300}") from error
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{name} is not supported: its attention cannot be replaced")
    if many := [name for name, param in model.named_parameters() if param.dim() > 2]:
        raise ValueError(f"{name} is not supported: {many[0]} is no matrix, but holds experts or filters")
    if model.base_model is model or model.get_output_embeddings() is None:
        raise ValueError(f"{name} is not supported: it has no head for a vocabulary")
    return model.eval()


@contextmanager
def without_memory() -> Iterator[None]:
    """Parameters that this thread makes here take no memory, but buffers have their values."""
    register, thread = nn.Module.register_parameter, threading.get_ident()

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == thread:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=False)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def give_memory(model: nn.Module) -> None:
    """
    Give the parameters that have no memory some; what is tied stays so. Buffers that checkpoints have become
    parameters, which are loaded.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    model.tie_weights()
    for module in model.modules():
        for name in {*module._buffers} - module._non_persistent_buffers_set:
            buffer = module._buffers.pop(name)
            setattr(module, name, nn.Parameter(buffer, requires_grad=False))
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param.device.type == "meta":
                if param not in made:
                    made[param] = nn.Parameter(
                        torch.empty(param.shape, dtype=param.dtype), requires_grad=False
                    )
                setattr(module, name, made[param])


class Linear(LinearBase):
    """For input of any number of dimensions. Not split: every rank would hold all of it."""

    def __init__(self, input_size: int, output_size: int, bias: bool):
        super().__init__({None: Part((output_size, input_size))}, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.format.multiply(rows, self.bias).view(*x.shape[:-1], -1)


def attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: Any, scaling: float | None = None, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """
    transformers' interface: query, key and value [1, heads, tokens, head_dim], rotated already, to [1,
    tokens, heads, head_dim]. Positions and masks follow from the step's context.
    """
    attention: Attention = module.nano_vllm_attention[0]
    for name in UNKNOWN_ARGUMENTS:
        if options.get(name) is not None:
            raise ValueError(f"{type(module).__name__} is not supported: its attention has {name}")
    shape = 1, attention.num_kv_heads, query.shape[2], attention.head_dim
    if key.shape != shape or value.shape != shape or not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} is not supported: not all heads or layers are alike")
    if scaling is not None:
        attention.rule = attention.rule._replace(scale=float(scaling))
    q, k, v = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
    out = attention(*attention.store(q, k, v))
    return out.view(1, len(q), attention.num_heads, attention.head_dim), None


class Head:
    """
    The LM head with all that transformers' forward does behind it (scales, caps), for hidden states
    [tokens, hidden_size].
    """

    vocab_start = 0

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """-> logits [sequences, vocab_size], in a prefill of the last token of each."""
        context = get_context()
        if context.is_prefill:
            hidden_states = hidden_states[context.cu_seqlens_q[1:].long() - 1]
        return self.logits(hidden_states)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """-> logits [tokens, vocab_size]."""
        name = self.model.base_model_prefix
        base = self.model._modules[name]
        self.model._modules[name] = Given(hidden_states[None])
        try:
            return self.model(input_ids=None, inputs_embeds=hidden_states[None], use_cache=False).logits[0]
        finally:
            self.model._modules[name] = base

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


class Given(nn.Module):
    """In place of the layers: what they have computed already."""

    def __init__(self, hidden_states: torch.Tensor):
        super().__init__()
        self.hidden_states = hidden_states

    def forward(self, *_args: Any, **_options: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.hidden_states)
