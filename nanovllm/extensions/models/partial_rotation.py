"""Heads of which the first rows are rotated only.

The core rotates a head's first half against its second. So the rows of queries and keys, which meet in a dot
product alone, are put into another order: of both halves the first rows are those that are to be rotated
against each other, and the table turns the others by nothing.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.extensions.models.decoder import Decoder, DecoderConfig
from nanovllm.models.qwen3 import Qwen3Attention

ROTATED = re.compile(r"\.[qk]_proj\.weight$")


class PartlyRotated(Decoder):
    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        half = config.head_dim // 2
        count = int(config.head_dim * config.rope_parameters["partial_rotary_factor"]) // 2
        for layer in self.model.layers[:1]:  # all have the same table
            layer.self_attn.rotary_emb.cos_sin_cache[:, count:half] = 1.0
        rows = torch.arange(config.head_dim, device="cpu")
        first, second, *others = rows.split([count, count, half - count, half - count])
        self.order = torch.cat((first, others[0], second, others[1]))
        self.is_gguf = (config.quantization_config or {}).get("quant_method") == "gguf"

    def converted(self, tensors: Iterable[Any], _known: Any) -> Iterator[Any]:
        """Once loaded, weights of GGUF files have no rows that could be moved: these are read in order."""
        for tensor in tensors:
            if hasattr(tensor, "order") and ROTATED.search(tensor.name):
                tensor = replace(tensor, order=in_all_heads(self.order, tensor.shape[0]).numpy())
            yield tensor

    def finish(self) -> None:
        """Put in order what has been loaded, before the layers' own `finish` packs it."""
        for layer in self.model.layers:
            self._put_in_order(layer.self_attn)

    def _put_in_order(self, attention: Qwen3Attention) -> None:
        layer, norms = attention.qkv_proj, (attention.q_norm, attention.k_norm)
        matrix, first_value = layer.matrix, layer.shards["v"].place.start
        rows = in_all_heads(self.order, first_value)
        rows = torch.cat((rows, torch.arange(first_value, matrix.shape[0], device="cpu")))
        for norm in filter(None, norms):
            move_rows(norm.weight, self.order)
        if layer.bias is not None:
            move_rows(layer.bias, rows)
        if not self.is_gguf:
            for name in matrix.parameters.keys() & {"weight", "scales", "zeros"}:
                height = 1 if name == "weight" else getattr(matrix, "tile", (1,))[0]
                move_rows(matrix.parameters[name], rows, height)


def in_all_heads(order: Tensor, num_rows: int) -> Tensor:
    """Where each row comes from, if those of each head are put in this order."""
    return torch.arange(num_rows, device="cpu").view(-1, len(order))[:, order].flatten()


def move_rows(param: Tensor, rows: Tensor, height: int = 1) -> None:
    """Put rows in order, or what belongs to tiles of so many. Raises ValueError if that would cut a tile."""
    tiles = rows[::height] // height
    if not torch.equal(tiles.repeat_interleave(height)[: len(rows)], rows // height):
        raise ValueError(f"weights with a scale for {height} rows of a head cannot be rotated in part")
    values = param.data if param.dim() == 1 else param.data.view(torch.uint8)  # fp8 has no index
    values.copy_(values[tiles.to(param.device)])
