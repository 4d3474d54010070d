"""Every kernel of the core against its reference in torch, and the references against plain arithmetic.

The references run as they are, on any device. The kernels run in Triton's interpreter, in a child process
because its switch must be set before Triton is imported, and where there is a GPU for real.
"""

from types import SimpleNamespace

import pytest
import torch
from kernel_checks import (
    KERNEL_SHAPES,
    NAN,
    ROPE_SHAPES,
    SHAPES,
    SPLITS,
    assert_passes_in_the_interpreter,
    check_decode,
    check_prefill,
    drawn,
    empty_caches,
    error,
    fused_norm_rope_store,
    in_both_types,
    norm_rope_and_store,
    on,
    on_devices,
    rand,
    random_slots,
    rope_inputs,
    sampling_inputs,
    tolerance,
)

from nanovllm.engine.slots import DeviceSlots, SlotLayout
from nanovllm.kernels import (
    activation,
    decode_attention,
    decode_inputs,
    kv_store,
    layernorm,
    prefill_attention,
    sampling,
)
from nanovllm.kernels.runtime import HAVE_TRITON, INTERPRETED


@pytest.mark.skipif(INTERPRETED or not HAVE_TRITON, reason="this is the child process, or Triton is missing")
def test_the_kernels_agree_with_their_references_in_tritons_interpreter():
    assert_passes_in_the_interpreter(__file__)


@on_devices
@in_both_types
@pytest.mark.parametrize("hidden", [64, 576, 1000, 4096])
def test_rms_norm_matches_its_reference_and_leaves_its_input(device, dtype, hidden):
    rows = on(device, 300, 3)
    x = rand(rows, 2 * hidden, device=device, dtype=dtype)[:, :hidden]
    residual = rand(rows, hidden, device=device, dtype=dtype)
    weight = rand(hidden, device=device, dtype=dtype)
    before, residual_before = x.clone(), residual.clone()
    normed = layernorm.add_rms_norm(x, None, weight, 1e-6)[0]
    assert error(normed, layernorm.rms_norm_torch(x, weight, 1e-6)) < tolerance(dtype)
    normed, total = layernorm.add_rms_norm(x, residual, weight, 1e-6)
    expected_normed, expected_total = layernorm.add_rms_norm_torch(x, residual, weight, 1e-6)
    assert torch.equal(total, expected_total) and error(normed, expected_normed) < tolerance(dtype)
    assert normed.dtype == total.dtype == dtype
    assert torch.equal(x, before) and torch.equal(residual, residual_before)


def test_the_reference_of_rms_norm_divides_by_the_root_of_the_mean_square():
    x, weight = rand(5, 48), rand(48)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    assert error(layernorm.rms_norm_torch(x, weight, 1e-6), expected) < 1e-6


@on_devices
@in_both_types
@pytest.mark.parametrize("width", [8, 1536, 3072])
def test_activations_of_gates_match_their_references(device, dtype, width):
    x = 3 * rand(on(device, 200, 3), 2 * width + 16, device=device, dtype=dtype)[:, : 2 * width]
    assert error(activation.silu_and_mul(x), activation.silu_and_mul_torch(x)) < tolerance(dtype)


@on_devices
@in_both_types
@pytest.mark.parametrize(
    "kv_heads, head_dim, slot_type", [(2, 64, torch.int32), (3, 80, torch.int64), (1, 20, torch.int32)]
)
def test_storing_writes_the_slots_asked_for_and_nothing_else(device, dtype, kv_heads, head_dim, slot_type):
    tokens, block_size = on(device, 300, 9), 16
    qkv = rand(tokens, 3 * kv_heads, head_dim, device=device, dtype=dtype)
    key, value = qkv[:, kv_heads : 2 * kv_heads], qkv[:, 2 * kv_heads :]
    slots = random_slots(tokens, 32 * block_size, device, slot_type)
    caches = empty_caches(32, block_size, kv_heads, head_dim, device, dtype)
    kv_store.store_kvcache(key, value, *caches, slots)
    for cache, new in zip(caches, (key, value), strict=True):
        expected = torch.full_like(cache, NAN).view(-1, kv_heads, head_dim)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = new[token]
        torch.testing.assert_close(cache.view_as(expected), expected, rtol=0, atol=0, equal_nan=True)


@on_devices
@in_both_types
@pytest.mark.parametrize("heads, kv_heads, head_dim", ROPE_SHAPES)
@pytest.mark.parametrize("norm", [True, False])
def test_norm_rope_and_store_in_one_are_the_parts_one_after_another(
    device, dtype, heads, kv_heads, head_dim, norm
):
    tokens = on(device, 70, 5)
    qkv, positions, cos_sin = rope_inputs(tokens, heads, kv_heads, head_dim, device, dtype)
    weights = [rand(head_dim, device=device, dtype=dtype) if norm else None for _ in "qk"]
    slots = random_slots(tokens, 128, device)
    caches = empty_caches(8, 16, kv_heads, head_dim, device, dtype)
    expected, expected_caches = qkv.clone(), [cache.clone() for cache in caches]
    arguments = (heads, kv_heads, head_dim, *weights, 1e-6, positions, cos_sin)
    fused_norm_rope_store(qkv, *arguments, *caches, slots, kv_store.StoreHooks())
    norm_rope_and_store(expected, *arguments, *expected_caches, slots)
    assert error(qkv, expected) < tolerance(dtype)
    for cache, twin in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(cache.isnan(), twin.isnan())
        assert error(cache.nan_to_num(0), twin.nan_to_num(0)) < tolerance(dtype)


@on_devices
def test_caches_may_be_empty_where_nothing_is_stored(device):
    qkv, positions, cos_sin = rope_inputs(3, 4, 2, 64, device, torch.float32)
    expected, cache = qkv.clone(), torch.empty(0, device=device)
    arguments = (4, 2, 64, None, None, 1e-6, positions, cos_sin, cache, cache, torch.full_like(positions, -1))
    fused_norm_rope_store(qkv, *arguments, kv_store.StoreHooks())
    norm_rope_and_store(expected, *arguments)
    assert error(qkv, expected) < 1e-6


@pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)
@pytest.mark.parametrize("block_size", [16, 48])
def test_the_decode_reference_attends_to_exactly_the_context(heads, kv_heads, head_dim, block_size):
    lengths = [1, 16, 0, 17, 100, 48, 33, 0]
    check_decode(
        decode_attention.paged_decode_attention_torch,
        lengths, heads, kv_heads, head_dim, block_size, "cpu", torch.float32,
    )  # fmt: skip


@on_devices
@in_both_types
@pytest.mark.parametrize("heads, kv_heads, head_dim", KERNEL_SHAPES)
def test_decode_attends_to_exactly_the_context(device, dtype, heads, kv_heads, head_dim):
    lengths = on(device, [1, 16, 0, 17, 1000, 513, 64, 4000, 255], [1, 0, 33, 70])
    attend = decode_attention.paged_decode_attention
    check_decode(attend, lengths, heads, kv_heads, head_dim, 16, device, dtype)


@on_devices
@pytest.mark.parametrize("block_size, batch", SPLITS)
def test_decode_is_right_for_every_block_size_and_number_of_splits(device, block_size, batch):
    batch = min(batch, on(device, 40, 6))
    longest = on(device, 3000, 150)
    lengths = [longest] + torch.randint(0, longest, (batch - 1,)).tolist()
    attend = decode_attention.paged_decode_attention
    for _ in range(2):  # the second run finds the arrival counters as the first one left them
        check_decode(attend, lengths, 4, 2, 64, block_size, device, torch.float32)


@on_devices
def test_decode_combines_more_splits_than_it_loads_at_a_time(device):
    attend = decode_attention.paged_decode_attention
    # In the interpreter, which has 4 multiprocessors, twelve splits, of which eleven have tokens.
    check_decode(attend, [on(device, 4000, 700)], 2, 1, 64, 256, device, torch.float32)


PREFILL_LENGTHS = [(5, 5), (1, 40), (0, 7), (33, 33), (16, 70), (64, 64)]


@pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)
@pytest.mark.parametrize("block_size", [0, 16])
def test_the_prefill_reference_is_causal_and_aligned_at_the_end(heads, kv_heads, head_dim, block_size):
    attend = prefill_attention.varlen_prefill_attention_torch
    check_prefill(attend, PREFILL_LENGTHS, heads, kv_heads, head_dim, "cpu", torch.float32, block_size)


@on_devices
@in_both_types
@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize("heads, kv_heads, head_dim", KERNEL_SHAPES)
def test_prefill_is_causal_and_aligned_at_the_end(device, dtype, heads, kv_heads, head_dim, block_size):
    large = [*PREFILL_LENGTHS, (1000, 1000), (200, 1500), (129, 385), (1, 1)]
    lengths = on(device, large, [(3, 3), (40, 70), (1, 37)])
    attend = prefill_attention.varlen_prefill_attention
    check_prefill(attend, lengths, heads, kv_heads, head_dim, device, dtype, block_size)


@on_devices
@pytest.mark.parametrize("block_size", [16, 48])
def test_decode_inputs_are_those_of_the_reference_and_padding_stays_empty(device, block_size):
    generator, num_blocks, padding = torch.Generator().manual_seed(0), 70, 3
    lengths = torch.tensor([1, block_size, 600, 0, block_size + 1, 32 * block_size, 70 * block_size])
    rows = torch.tensor([4, padding, 0, 6, 2, padding, 5, 1, padding], dtype=torch.int32, device=device)
    tables = torch.randint(1, 10_000, (7, num_blocks), generator=generator, dtype=torch.int32)
    tokens = torch.randint(0, 150_000, (7,), generator=generator, dtype=torch.int32)
    seeds = torch.randint(-(2**62), 2**62, (7,), generator=generator)
    layout = SlotLayout(
        SimpleNamespace(max_num_seqs=6, max_model_len=70, kvcache_block_size=1, num_kvcache_blocks=-1)
    )
    given, twins = (DeviceSlots(layout, device).inputs for _ in range(2))
    for one, other, values in zip(given, twins, (tokens, lengths, tables, torch.rand(7), seeds), strict=True):
        other.copy_(one.copy_(values))
    got = decode_inputs.decode_inputs(rows, given, block_size)
    expected = decode_inputs.decode_inputs_torch(rows, twins, block_size)
    used = torch.arange(num_blocks, device=device) * block_size < expected.context_lens[:, None].clamp_min(1)
    for name in got._fields:
        one, other = getattr(got, name), getattr(expected, name)
        if name == "block_tables":
            one, other = one[used], other[used]
        assert one.dtype == other.dtype and torch.equal(one, other), name
    assert all(map(torch.equal, given, twins))
    assert got.slot_mapping[rows == padding].tolist() == [-1] * 3
    assert torch.equal(given[1].cpu(), (lengths + (lengths > 0)).int())


@on_devices
@in_both_types
@pytest.mark.parametrize("vocab", [50, 4096, 9000])
def test_sampling_draws_the_token_that_its_reference_draws(device, dtype, vocab):
    vocab, batch = vocab * on(device, 16, 1), on(device, 64, 3)
    logits, seeds, positions = sampling_inputs(batch, vocab, device, dtype)
    temperatures = torch.tensor([0.0, 0.7, 1.5], device=device).repeat(batch)[:batch]
    draw = logits, temperatures, seeds, positions, 11
    values, tokens = drawn(sampling.sample, *draw)
    expected_values, expected_tokens = drawn(sampling.sample_torch, *draw)
    assert tokens.dtype == torch.int64 and torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(values, expected_values, rtol=1e-5, atol=1e-5)


@on_devices
def test_the_kernels_noise_is_the_references_noise_bit_for_bit(device):
    """Where all logits are equal the largest hash wins, so thousands of draws compare the bits."""
    batch = on(device, 2000, 40)
    _, seeds, positions = sampling_inputs(batch, 1, device)
    logits, ones = torch.zeros(batch, 512, device=device), torch.ones(batch, device=device)
    expected = drawn(sampling.sample_torch, logits, ones, seeds, positions, 151000)
    assert torch.equal(drawn(sampling.sample, logits, ones, seeds, positions, 151000)[1], expected[1])


def samplers():
    return [sampling.sample_torch, *([sampling.sample] if INTERPRETED else [])]


@pytest.mark.parametrize("sample", samplers())
def test_equal_scores_go_to_the_lowest_token(sample):
    logits = torch.zeros(2, 5000)
    logits[0, [4999, 4097, 17]] = 1.0
    zeros = torch.zeros(2, dtype=torch.int64)
    values, tokens = drawn(sample, logits, torch.zeros(2), zeros, zeros)
    assert tokens.tolist() == [17, 0] and values.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("sample", samplers())
def test_shards_of_the_vocabulary_draw_what_the_whole_would(sample):
    logits, seeds, positions = sampling_inputs(6, 300, "cpu")
    temperatures = torch.full((6,), 0.8)
    values, tokens = drawn(sample, logits, temperatures, seeds, positions)
    shards = [drawn(sample, logits[:, i : i + 100], temperatures, seeds, positions, i) for i in (0, 100, 200)]
    shard_values, shard_tokens = (torch.stack(x) for x in zip(*shards, strict=True))
    best, winner = shard_values.max(dim=0)
    assert torch.equal(best, values)
    assert torch.equal(shard_tokens.gather(0, winner[None])[0], tokens)


def test_tokens_are_drawn_with_the_probabilities_of_the_softmax():
    draws, temperature = 40000, 0.7
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, float("-inf")])
    expected = (logits / temperature).softmax(-1) * draws
    numbers, zeros = torch.arange(draws), torch.zeros(draws, dtype=torch.int64)
    for seeds, positions in ((numbers, zeros), (zeros, numbers)):
        draw = logits.expand(draws, -1), torch.full((draws,), temperature), seeds, positions
        _, tokens = drawn(sampling.sample_torch, *draw)
        counts = torch.bincount(tokens, minlength=6)
        assert counts[5] == 0
        # Chi-squared with 4 degrees of freedom exceeds 23.5 once in ten thousand times.
        assert ((counts - expected)[:5] ** 2 / expected[:5]).sum() < 23.5
