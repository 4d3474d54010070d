"""What tests of layers share: their formulas, and layers as one of several ranks builds them."""

import math

import pytest
import torch

from nanovllm.distributed.group import Group, use_group
from nanovllm.layers.attention import Attention
from nanovllm.layers.layernorm import RMSNorm, Stream
from nanovllm.layers.rotary_embedding import RotaryEmbedding, get_rope
from nanovllm.utils.context import reset_context
from tiny_checkpoints import one_thread  # noqa: F401

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return dict(atol=1e-5, rtol=1e-5) if dtype == torch.float32 else dict(atol=2e-2, rtol=2e-2)


@pytest.fixture(autouse=True)
def without_context():
    yield
    reset_context()


def rms_norm_formula(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def make_rope(head_dim: int = 16, theta: float = 10000.0, length: int = 4096) -> RotaryEmbedding:
    return get_rope(head_dim, length, {"rope_type": "default", "rope_theta": theta})


def rotate(x: list[float], position: int, theta: float) -> list[float]:
    """One head, one position, straight from the definition: halves, not neighbouring pairs."""
    half = len(x) // 2
    out = [0.0] * len(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[half + i] * math.sin(angle)
        out[half + i] = x[half + i] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def attention_formula(q, k, v, scale):
    """Causal attention of one sequence: the queries are the last len(q) of its positions."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * scale
    future = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.double()).reshape(len(q), -1).float()


def paged(lengths: list[int], block_size: int, num_blocks: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Block tables over a shuffled pool, and the slots of each sequence's positions."""
    ids = torch.randperm(num_blocks).tolist()
    tables = torch.zeros(len(lengths), max(-(-length // block_size) for length in lengths), dtype=torch.int32)
    slots = []
    for row, length in zip(tables, lengths, strict=True):
        count = -(-length // block_size)
        row[:count] = torch.tensor([ids.pop() for _ in range(count)])
        positions = torch.arange(length)
        slots.append(row[positions // block_size].long() * block_size + positions % block_size)
    return tables, slots


def stored(layer: Attention, q, k, v) -> torch.Tensor:
    """Store keys and values, which are rotated by nothing at position 0, and attend."""
    qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    rope, positions = make_rope(layer.head_dim), torch.zeros(len(q), dtype=torch.int64)
    return layer(*layer.rotate_and_store(positions, qkv, rope, None, None))


class OneRank(Group):
    """Sums over the ranks are this rank's part."""

    def all_reduce(self, x):
        return x

    def all_reduce_add_rms_norm(self, x, residual, weight, eps):
        return rms_norm_formula(x + residual, weight, eps).float(), x + residual


def on_rank(rank, size, make):
    """Build a layer as that rank would."""
    with use_group(OneRank(rank, size)):
        return make()


def normalised(x: torch.Tensor) -> Stream:
    """A stream whose norm gives x."""
    return Stream(x, RMSNorm(x.shape[-1]), x)


def load(param: torch.nn.Parameter, weight: torch.Tensor, *shard_id) -> None:
    param.weight_loader(param, weight, *shard_id)


TP_SIZES = pytest.mark.parametrize("tp_size", [1, 2, 4])
