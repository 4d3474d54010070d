"""A trainer's model with the engine's bits: transformers' forward pass, made of the engine's functions.

A policy is trained on the log-probabilities of tokens that the engine has drawn. Where both do not compute
the same numbers, the training corrects for differences that are no more than rounding. `make_exact(model)`
changes a model of transformers in place:

- Sequences go through its layers as through the engine's, one behind the other and without padding: a batch
  is packed in front of the first layer and padded again behind the last.
- Products, norms, rotations, SwiGLU, experts and attention are what the engine calls in exact mode. Residual
  additions are the same as they are.
- Gradients are the ordinary ones: those of the same formulas in plain torch, and of experts those that
  transformers computes.

Weights and their names stay, so optimizers and checkpoints know nothing of it.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from nanovllm.assembly import moe, read_config, token_logprobs
from nanovllm.extensions.exact.attention import ExactBackend
from nanovllm.extensions.exact.products import exact_linear, exact_mixture, exact_silu_and_mul
from nanovllm.kernels.activation import silu_and_mul_torch
from nanovllm.kernels.kv_store import CacheLayout
from nanovllm.kernels.layernorm import add_rms_norm, rms_norm_torch
from nanovllm.kernels.runtime import next_power_of_2
from nanovllm.layers.attention import Attention
from nanovllm.layers.rotary_embedding import RotaryEmbedding, get_rope
from nanovllm.utils.context import reset_context, set_context
from nanovllm.utils.validation import check

MODELS = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"]
NO_OPTIONS = (
    "inputs_embeds",
    "past_key_values",
    "cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
)


def make_exact(model: nn.Module) -> nn.Module:
    """
    Have a model of transformers that is one of MODELS compute the bits of an engine with exact=True and the
    same weights, dtype and kind of device. The model is changed, and returned. ValueError, here or from its
    forward pass, for what the engine has no equal of: dropout, windows, caches, autocast, attention weights,
    hidden states of layers, logits of routers.

    Positions count the tokens that the attention mask shows, from 0 in each row, unless position_ids are
    given. Wherever these do not go on by one a sequence begins, so that a row may hold several.
    """
    config = _check_model(model)
    for module in model.modules():
        for mark, exact in EXACT_LAYERS.items():
            if hasattr(module, mark):
                module.__class__ = exact

    @cache
    def rotary_emb(length: int, device: torch.device) -> RotaryEmbedding:
        return get_rope(config.head_dim, length, config.rope_parameters).to(device)

    model.model.forward = partial(forward_packed, model.model, rotary_emb)
    model.config._attn_implementation = "nanovllm_exact"  # for which transformers makes no masks
    return model


def logprobs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """
    Log-probabilities float32 [...], with gradients, of tokens int64 [...] that were drawn at this temperature
    from logits [..., vocabulary]: those that the engine tells with logprobs_mode="processed".
    """
    columns = tokens.reshape(-1, 1)
    temperatures = torch.full_like(columns[:, 0], temperature, dtype=torch.float32)
    return Recomputed.apply(
        lambda rows: token_logprobs(rows, columns, temperatures)[0],
        lambda rows: (rows.float() / temperature).log_softmax(1).gather(1, columns),
        logits.flatten(0, -2),
    ).view(tokens.shape)


def _check_model(model: nn.Module) -> Any:
    """The configuration, as the engine reads it."""
    name = type(model).__name__
    check(name in MODELS, f"model must be one of transformers' {MODELS}", name)
    dropout = model.config.attention_dropout
    check(not dropout, "attention_dropout must be 0", dropout)
    config = read_config(name, model.config.to_dict() | {"architectures": [name]})
    window = max(config.windows)
    check(not window, "attention must be without a sliding window", window)
    for path, module in model.named_modules():
        kind = type(module)
        is_known = kind is nn.Linear or not hasattr(module, "in_features")
        check(is_known, f"{path} must be an nn.Linear", kind.__name__)
        is_list = isinstance(getattr(module, "experts", None), nn.ModuleList)
        check(not is_list, f"{path}.experts must be stacked, as transformers 5 has them", "ModuleList")
    weights = {f"{weight.dtype} on {weight.device}" for weight in model.parameters()}
    check(len(weights) == 1, "weights must have one dtype and be on one device", sorted(weights))
    check(weights != {"torch.float16 on cpu"}, "weights on a CPU must be float32 or bfloat16", "float16")
    return config


# Around the decoder's layers


class Packed(NamedTuple):
    """The sequences of a batch without their padding."""

    positions: Tensor  # int64 [tokens]
    rotary_emb: RotaryEmbedding  # with the engine's table
    step: dict[str, Any]  # as `set_context` takes it


def forward_packed(
    decoder: nn.Module,
    rotary_emb: Callable,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    **options: Any,
) -> Any:
    """The forward pass of a decoder, whose result has zeros for padding."""
    for name in NO_OPTIONS:
        given = options.pop(name, getattr(decoder.config, name, None))
        check(given is None or given is False, f"{name} is not possible with exactness", given)
    shape, device = input_ids.shape, input_ids.device
    is_cast = torch.is_autocast_enabled(device.type)
    check(not is_cast, "autocast must be off, and weights in the dtype to compute in", is_cast)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    check(mask.shape == shape, f"attention_mask must have the shape {[*shape]}", [*mask.shape])
    mask = mask.bool()
    positions = (mask.cumsum(1) - 1 if position_ids is None else position_ids.expand(shape))[mask]
    goes_on = (positions.diff() == 1) & (mask.nonzero()[:, 0].diff() == 0)
    bounds = F.pad(~goes_on, (1, 1), value=True).nonzero()[:, 0].int()
    longest = int(bounds.diff().max())
    step = dict(cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest)
    step["slot_mapping"] = torch.full_like(positions, -1, dtype=torch.int32)  # nothing is stored
    table = rotary_emb(next_power_of_2(int(positions.max()) + 1), device)
    options |= dict(use_cache=False, packed=Packed(positions, table, step))
    output = type(decoder).forward(decoder, input_ids[mask][None], None, positions[None], **options)
    [hidden] = output.last_hidden_state
    output.last_hidden_state = hidden.new_zeros(*shape, hidden.shape[1]).masked_scatter(
        mask[..., None], hidden
    )
    return output


# Layers, which take the places of transformers' own


class ExactLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x.flatten(0, -2), self.weight, self.bias).unflatten(0, x.shape[:-1])


class ExactNorm(nn.Module):
    @property
    def eps(self) -> float:
        return self.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return Recomputed.apply(
            lambda x, weight: add_rms_norm(x, None, weight, self.eps)[0],
            lambda x, weight: rms_norm_torch(x, weight, self.eps),
            x,
            self.weight,
        )


class ExactMLP(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        [gate_up] = torch.cat((self.gate_proj(x), self.up_proj(x)), dim=2)
        return self.down_proj(Recomputed.apply(exact_silu_and_mul, silu_and_mul_torch, gate_up)[None])


class ExactMixture(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        [x], gate = hidden_states, self.gate
        logits = Product.apply(x, gate.weight, None)
        chosen = moe.choose_experts(logits.detach(), gate.top_k, gate.norm_topk_prob)
        matrices = self.experts.gate_up_proj, self.experts.down_proj
        weights = moe.ExpertWeights(*(each.flatten(0, 1) for each in matrices), self.experts.num_experts)
        return Recomputed.apply(
            lambda x, *_: exact_mixture(moe, x, weights, chosen, is_prefill=True),
            partial(self.plain, chosen.experts.long()),
            x,
            logits,
            *matrices,
        )[None]

    def plain(self, experts: Tensor, x: Tensor, logits: Tensor, gate_ups: Tensor, downs: Tensor) -> Tensor:
        """
        The sum of what `experts` [tokens, top_k] make of x [tokens, hidden], weighted by the router's logits
        [tokens, experts]: computed by transformers' own module, with these matrices of all experts.
        """
        shares = logits.softmax(1, dtype=torch.float32).gather(1, experts)
        if self.gate.norm_topk_prob:
            shares = shares / shares.sum(1, keepdim=True)
        matrices = {"gate_up_proj": gate_ups, "down_proj": downs}
        return functional_call(self.experts, matrices, (x, experts, shares.to(x.dtype)))


class ExactAttention(nn.Module):
    def forward(self, hidden_states: Tensor, packed: Packed, **_options: Any) -> tuple[Tensor, None]:
        projections = self.q_proj, self.k_proj, self.v_proj
        heads = [project(hidden_states[0]).unflatten(1, (-1, self.head_dim)) for project in projections]
        norms = [getattr(self, name, None) for name in ("q_norm", "k_norm")]
        weights = [norm.weight for norm in norms if norm]
        exact, plain = partial(self.exact, packed, norms), partial(self.plain, packed)
        return self.o_proj(Recomputed.apply(exact, plain, *heads, *weights)[None]), None

    def exact(
        self, packed: Packed, norms: list[Any], q: Tensor, k: Tensor, v: Tensor, *_weights: Tensor
    ) -> Tensor:
        """
        Attention of q, k and v [tokens, heads of each, head_dim], of which q and k are normalised, if there
        are norms for it, and rotated: by a layer of the engine, which stores nothing. [tokens, heads *
        head_dim].
        """
        layer = Attention(q.shape[1], self.head_dim, self.scaling, k.shape[1])
        layer.backend = ExactBackend(CacheLayout(q.dtype))
        layer.k_cache = layer.v_cache = v.new_empty(0)
        set_context(True, **packed.step)
        qkv = torch.cat((q, k, v), dim=1)
        try:
            return layer(*layer.rotate_and_store(packed.positions, qkv, packed.rotary_emb, *norms))
        finally:
            reset_context()

    def plain(self, packed: Packed, q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> Tensor:
        if weights:
            q, k = (
                rms_norm_torch(x, weight, self.q_norm.eps) for x, weight in zip((q, k), weights, strict=True)
            )
        q, k = packed.rotary_emb(packed.positions, q, k)
        attended = []
        for begin, end in pairwise(packed.step["cu_seqlens_q"].tolist()):
            heads = (x[None, begin:end].transpose(1, 2) for x in (q, k, v))
            [y] = F.scaled_dot_product_attention(*heads, is_causal=True, scale=self.scaling, enable_gqa=True)
            attended.append(y.transpose(0, 1).flatten(1))
        return torch.cat(attended)


# By what their modules have.
EXACT_LAYERS = {
    "in_features": ExactLinear,
    "variance_epsilon": ExactNorm,
    "gate_proj": ExactMLP,
    "experts": ExactMixture,
    "q_proj": ExactAttention,
}


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return exact_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            grad @ weight if of_x else None,
            grad.T @ x if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


class Recomputed(torch.autograd.Function):
    """exact(*inputs), with the gradients of plain(*inputs), which is computed in the backward pass."""

    @staticmethod
    def forward(ctx: Any, exact: Callable, plain: Callable, *inputs: Tensor) -> Tensor:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[2:], strict=True)
        inputs = [each.detach().requires_grad_(is_needed) for each, is_needed in needed]
        with torch.enable_grad():
            output = ctx.plain(*inputs)
        output.backward(grad)
        return None, None, *(each.grad for each in inputs)
