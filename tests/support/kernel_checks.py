"""What tests of kernels share: devices and dtypes, random inputs, pages of a KV cache, attention spelled out.

A test file of kernels runs as it is, where kernels need a GPU, and once more in a child process in which
Triton interprets them on the CPU (`assert_passes_in_the_interpreter`).
"""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels import kv_store, layernorm
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.kv_store import CacheLayout
from nanovllm.kernels.runtime import INTERPRETED
from nanovllm.layers.rotary_embedding import apply_rotary_emb
from nanovllm.layers.sampler import SamplingStep
from nanovllm.utils.context import Context

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])
DEVICES = ["cpu", GPU] if INTERPRETED else [GPU]
on_devices = pytest.mark.parametrize("device", DEVICES)
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter cannot multiply bfloat16 matrices
in_both_types = pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "half"])
NAN = float("nan")

# How keys and values lie in caches of these dtypes, if not as they are: extensions' tests add theirs.
LAYOUTS: dict[torch.dtype, Any] = {}


def layout_of(dtype):
    return LAYOUTS.get(dtype) or CacheLayout(dtype)


def assert_passes_in_the_interpreter(file: str) -> None:
    """Run a file's tests for CPUs again, in a child process in which Triton's kernels are interpreted."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", "cpu", file]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]


def error(got, expected):
    """Relative distance; NaN never passes a comparison with it."""
    got, expected = got.double(), expected.double()
    return ((got - expected).norm() / expected.norm().clamp_min(1e-12)).item()


def tolerance(dtype):
    return 1e-5 if dtype == torch.float32 else 8e-3


def rand(*shape, device="cpu", dtype=torch.float32):
    return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)


def on(device, large, small):
    return large if device == "cuda" else small


def store_torch(key, value, k_cache, v_cache, slots):
    """What the layout stores, without a kernel."""
    layout = LAYOUTS.get(k_cache.dtype)
    store = layout.store if layout else kv_store.store_kvcache_torch
    store(key, value, k_cache, v_cache, slots)


def empty_caches(blocks, block_size, kv_heads, head_dim, device, dtype):
    """NaN in every slot; 8-bit caches have any bytes and scales."""
    layout = layout_of(dtype)
    shape = layout.planes, blocks, *layout.page_shape(block_size, kv_heads, head_dim)
    pages = torch.full(shape, NAN if dtype.is_floating_point else 0, dtype=dtype)
    if not dtype.is_floating_point:
        pages.random_()
    pages = pages.to(device)
    return [pages[0], pages[-1]]


def random_slots(tokens, slots, device, dtype=torch.int32):
    """Distinct slots, the first slot among them, with one token in four not to be written."""
    mapping = 1 + torch.randperm(slots - 1, device=device)[:tokens].to(dtype)
    mapping[::4] = -1
    mapping[1] = 0
    return mapping


def paged_caches(lengths, block_size, kv_heads, head_dim, device, dtype):
    """Shuffled blocks with NaN wherever no token is, and tables that point far outside beyond the end."""
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks).tolist()
    tables = torch.full((len(lengths), max(needed, default=0) + 2), 2**30, dtype=torch.int32)
    caches = empty_caches(num_blocks, block_size, kv_heads, head_dim, device, dtype)
    sequences = []
    for i, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        tables[i, :count] = torch.tensor(blocks, dtype=torch.int32)
        slots = torch.tensor([blocks[t // block_size] * block_size + t % block_size for t in range(length)])
        kv = [rand(length, kv_heads, head_dim, device=device) for _ in caches]
        store_torch(*kv, *caches, slots.to(device).long())
        stored = [layout_of(dtype).as_stored(x) for x in kv]
        sequences.append([x.to(dtype) if dtype.is_floating_point else x for x in stored])
    return *caches, tables.to(device), sequences


def plain_attention(q, k, v, rule):
    """Causal attention in float64 of the last tokens: q [len_q, heads, dim], k, v [len_k, kv_heads, dim]."""
    names = "softcap", "window", "sinks", "slopes"
    softcap, window, sinks, slopes = (getattr(rule, name, None) for name in names)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    scores = q @ k.transpose(1, 2) * rule.scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    last = k.shape[1] - q.shape[1]  # the last key that the first query sees
    if slopes is not None:
        key = torch.arange(k.shape[1], device=q.device)
        scores += slopes.double()[:, None, None] * (key - key[last:, None])
    seen = torch.ones_like(scores, dtype=torch.bool).tril(last)
    if getattr(rule, "in_chunks", False):
        key = torch.arange(k.shape[1], device=k.device)
        seen &= key[last:, None] // window == key // window
    elif window:
        seen = seen.triu(last - window + 1)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:  # a key without a value
        sinks = sinks.double()[:, None, None].expand(-1, q.shape[1], 1)
        scores, v = torch.cat([scores, sinks], dim=-1), F.pad(v, (0, 0, 0, 1))
    return (scores.softmax(-1) @ v).transpose(0, 1)


class Plain:
    """Makes the variant of attention that a check is about, for any number of heads."""

    def rule(self, heads, head_dim, device):
        return AttentionVariant(head_dim**-0.5)


PLAIN = Plain()


def attention_tolerance(dtype, head_dim, cache_dtype=None):
    if dtype != torch.float32:
        return 1.5e-2 if cache_dtype in LAYOUTS else 8e-3
    if cache_dtype in LAYOUTS:
        return 1e-3  # they are multiplied in float16
    return 2e-6 if head_dim <= 256 else 4e-6  # a score is a sum of so many float32 products


def check_decode(
    attend, lengths, heads, kv_heads, head_dim, block_size, device, dtype, cache_dtype=None, features=PLAIN
):
    k_cache, v_cache, tables, sequences = paged_caches(
        lengths, block_size, kv_heads, head_dim, device, cache_dtype or dtype
    )
    q = rand(len(lengths), heads + 2 * kv_heads, head_dim, device=device, dtype=dtype)[:, :heads]
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    rule = features.rule(heads, head_dim, device)
    step = Context(context_lens=context_lens, block_tables=tables)
    out = attend(q, k_cache, v_cache, rule, step, layout_of(cache_dtype or dtype))
    assert out.shape == q.shape and out.dtype == dtype
    for i, (k, v) in enumerate(sequences):
        if lengths[i]:
            expected = plain_attention(q[i : i + 1], k, v, rule)
            assert error(out[i : i + 1], expected) < attention_tolerance(dtype, head_dim, cache_dtype)
        else:
            assert (out[i] == 0).all()


SHAPES = [(16, 8, 128), (4, 4, 64), (9, 3, 64), (8, 2, 80), (5, 1, 96), (7, 1, 128), (8, 1, 256), (2, 1, 16)]
SHAPES += [(3, 1, 20), (4, 2, 24), (4, 4, 40), (6, 2, 72), (2, 2, 8)]
KERNEL_SHAPES = [(2, 1, 64), (3, 1, 80), (4, 2, 128), (1, 1, 256), (3, 1, 20)] if INTERPRETED else SHAPES


def check_prefill(
    attend, lengths, heads, kv_heads, head_dim, device, dtype, block_size=0, cache_dtype=None, features=PLAIN
):
    """lengths: (len_q, len_k) of each sequence."""
    lens_q, lens_k = zip(*lengths, strict=True)
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).to(device, torch.int32) for x in (lens_q, lens_k))
    qkv = rand(sum(lens_q), heads + 2, head_dim, device=device, dtype=dtype)
    q, rule = qkv[:, :heads], features.rule(heads, head_dim, device)
    if block_size:
        k, v, tables, sequences = paged_caches(
            lens_k, block_size, kv_heads, head_dim, device, cache_dtype or dtype
        )
    else:
        kv = rand(sum(lens_k), 2 * kv_heads, head_dim, device=device, dtype=dtype)
        k, v, tables = kv[:, :kv_heads], kv[:, kv_heads:], None
        sequences = list(zip(k.split(lens_k), v.split(lens_k), strict=True))
    step = Context(True, cu_q, cu_k, max(lens_q), max(lens_k), block_tables=tables)
    out = attend(q, k, v, rule, step, layout_of(cache_dtype or dtype))
    assert out.shape == q.shape and out.dtype == dtype
    for queries, got, (keys, values) in zip(q.split(lens_q), out.split(lens_q), sequences, strict=True):
        if len(queries):
            expected = plain_attention(queries, keys, values, rule)
            assert error(got, expected) < attention_tolerance(dtype, head_dim)


ROPE_SHAPES = [
    (16, 8, 128),
    (8, 2, 192),
    (4, 1, 512),
    (4, 4, 64),
    (9, 3, 64),
    (7, 1, 96),
    (5, 5, 80),
    (4, 2, 256),
]
ROPE_SHAPES += [(3, 1, 20), (2, 2, 8), (2, 1, 112)]
ROPE_SHAPES = [(9, 3, 64), (5, 5, 80), (4, 2, 256), (3, 1, 20)] if INTERPRETED else ROPE_SHAPES

# Block sizes and numbers of sequences, of which many need no splits and one needs most.
SPLITS = [(16, 40), (48, 1), (256, 2)]
SPLITS = SPLITS if INTERPRETED else [(size, batch) for size in (16, 48, 256) for batch in (1, 2, 40)]


def rope_inputs(tokens, heads, kv_heads, head_dim, device, dtype):
    qkv = rand(tokens, (heads + 2 * kv_heads) * head_dim + 32, device=device, dtype=dtype)[:, :-32]
    angles = torch.arange(64)[:, None] / 10000 ** (torch.arange(head_dim // 2) / (head_dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
    return qkv, torch.randint(0, 64, (tokens,), device=device), cos_sin


def fused_norm_rope_store(qkv, heads, kv_heads, head_dim, *others):
    """The kernel, for q, k and v that lie side by side."""
    views = qkv.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=1)
    kv_store.qk_norm_rope_store(*views, *others)


def norm_rope_and_store(
    qkv, heads, kv_heads, head_dim, q_weight, k_weight, eps, positions, cos_sin, *stores, is_prefill=False
):
    """The parts, one after another."""
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=1)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    for x, weight in ((q, q_weight), (k, k_weight)):
        normed = x if weight is None else layernorm.rms_norm_torch(x, weight, eps)
        x.copy_(apply_rotary_emb(normed, cos, sin))
    layout = layout_of(stores[0].dtype)
    rotated, keys = layout.rotate(q, k)
    q.copy_(rotated)
    if stores[0].numel():
        store_torch(keys, v, *stores)
    k.copy_(layout.as_stored(keys) if is_prefill else keys)
    if is_prefill:
        v.copy_(layout.as_stored(v))


def sampling_inputs(batch, vocab, device, dtype=torch.float32):
    logits = rand(batch, vocab + 8, device=device, dtype=dtype)[:, :vocab]
    seeds = torch.randint(-(2**62), 2**62, (batch,), device=device)
    return logits, seeds, torch.randint(0, 5000, (batch,), dtype=torch.int32, device=device)


def drawn(sample, logits, temperatures, seeds, positions, vocab_start=0, lowest=None):
    return sample(
        logits, SamplingStep(None, temperatures, seeds, positions, vocab_start=vocab_start, lowest=lowest)
    )
