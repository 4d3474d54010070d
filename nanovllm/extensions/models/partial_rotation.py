"""Rotary embedding of a part of each head: its first rows.

The core rotates a head's first half against its second. So the rows of queries and keys are put into another
order, the same for both, which changes no score: those that are to be rotated come first in the two halves,
and the angles of the others are 0.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.extensions.models.decoder import Decoder, DecoderConfig

ROTATED = ".q_proj.weight", ".k_proj.weight"


class PartlyRotated(Decoder):
    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        half = config.head_dim // 2
        count = int(config.head_dim * config.rope_parameters["partial_rotary_factor"]) // 2
        # Of all layers. The others' angles are 0, and scaled cosines would scale them, too.
        self.model.layers[0].self_attn.rotary_emb.cos_sin_cache[:, count:half] = 1.0
        rows = torch.arange(config.head_dim, device="cpu")
        first, second, *others = rows.split([count, count, half - count, half - count])
        self.order = torch.cat((first, others[0], second, others[1]))
        self.is_gguf = (config.quantization_config or {}).get("quant_method") == "gguf"

    def converted(self, tensors: Iterable[Any], _known: Any) -> Iterator[Any]:
        """GGUF files are read in this order: once loaded, their weights have no rows that could be moved."""
        for tensor in tensors:
            if hasattr(tensor, "order") and tensor.name.endswith(ROTATED):
                tensor = replace(tensor, order=in_all_heads(self.order, tensor.shape[0]).numpy())
            yield tensor

    def finish(self) -> None:
        """Put in order whatever else is loaded, before the layers' own `finish` packs it."""
        for layer in self.model.layers:
            attention, qkv = layer.self_attn, layer.self_attn.qkv_proj
            for norm in filter(None, (attention.q_norm, attention.k_norm)):
                move_rows(norm.weight, self.order)
            values = qkv.shards["v"].place
            others = torch.arange(values.start, values.stop, device="cpu")
            rows = torch.cat((in_all_heads(self.order, values.start), others))
            if qkv.bias is not None:
                move_rows(qkv.bias, rows)
            for name in {"weight", "scales", "zeros"} & qkv.matrix.parameters.keys():
                if not self.is_gguf:
                    height = 1 if name == "weight" else qkv.matrix.tile[0]
                    move_rows(qkv.matrix.parameters[name], rows, height)


def in_all_heads(order: Tensor, num_rows: int) -> Tensor:
    """Where each row comes from, if those of each head are put in this order."""
    return (torch.arange(0, num_rows, len(order), device="cpu")[:, None] + order).flatten()


def move_rows(param: Tensor, rows: Tensor, height: int = 1) -> None:
    """Put rows in order, or what belongs to tiles of so many. Raises ValueError if that would cut a tile."""
    tiles = rows[::height] // height
    if not torch.equal(tiles.repeat_interleave(height)[: len(rows)], rows // height):
        raise ValueError(
            f"weights with a scale for {height} rows of a head cannot be rotated in part; "
            "model_impl='transformers' can do without"
        )
    values = param.data if param.dim() == 1 else param.data.view(torch.uint8)  # fp8 has no index
    values.copy_(values[tiles.to(param.device)])
