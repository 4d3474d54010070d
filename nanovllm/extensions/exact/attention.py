"""The back-end of exact attention."""

from torch import Tensor

from nanovllm.extensions.exact.kernels.attention import exact_attention
from nanovllm.extensions.exact.kernels.attention_torch import ExactVariant
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.runtime import use_triton
from nanovllm.layers.attention import Attention, AttentionBackend
from nanovllm.utils.context import Context


class ExactBackend(AttentionBackend):
    """For layers whose variants have no hooks; see `options`."""

    def for_layer(self, layer: Attention) -> AttentionBackend:
        if any(layer.variant.hooks[:-1]):
            raise ValueError("exact=True cannot be used with windows, caps, sinks or slopes of attention")
        return self

    def attend(self, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, step: Context) -> Tensor:
        """As `prefill` and `decode`."""
        if step.block_tables is None and self.layout.dtype.is_floating_point:
            # As the cache holds them, whose dtype may be narrower: other steps read them there.
            k, v = (x.to(self.layout.dtype).to(q.dtype) for x in (k, v))
        if use_triton(q):
            return exact_attention(q, k, v, variant, step, self.layout)
        attend = super().prefill if step.is_prefill else super().decode
        return attend(q, k, v, ExactVariant(variant.scale), step)

    prefill = decode = attend
