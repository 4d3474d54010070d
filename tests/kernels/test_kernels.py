"""Kernels of extensions against their references, and the core's in sizes and dtypes beyond tests/core.

The kernels run twice: through Triton's interpreter on the CPU, in a child process because its switch must be
set before Triton is imported, and where there is a GPU, for real (`-m gpu`).
"""

import itertools
import random

import pytest
import torch
from compiled_kernels import run_compiled
from extension_kernels import INT8, gemv_torch, sum_and_norm
from kernel_checks import (
    KERNEL_SHAPES,
    NAN,
    ROPE_SHAPES,
    SPLITS,
    assert_passes_in_the_interpreter,
    check_decode,
    check_prefill,
    drawn,
    empty_caches,
    error,
    fused_norm_rope_store,
    in_both_types,
    needs_cuda,
    norm_rope_and_store,
    on,
    on_devices,
    paged_caches,
    plain_attention,
    rand,
    random_slots,
    rope_inputs,
    sampling_inputs,
    tolerance,
)

from nanovllm.extensions.int8_cache.kernels import int8_cache
from nanovllm.extensions.int8_cache.layout import Int8Layout
from nanovllm.extensions.logits.kernels import filtering, likelihood, logit_edits
from nanovllm.extensions.models import gemma3
from nanovllm.extensions.products.kernels import gemv
from nanovllm.extensions.ranks.kernels import all_reduce
from nanovllm.extensions.structured.kernels import token_masks
from nanovllm.kernels import decode_attention, kv_store, layernorm, prefill_attention, sampling
from nanovllm.kernels.attention_variant import AttentionVariant
from nanovllm.kernels.kv_store import ROWS
from nanovllm.kernels.runtime import HAVE_TRITON, INTERPRETED
from nanovllm.utils.context import Context


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or not HAVE_TRITON, reason="this is the child process, or Triton is missing")
def test_the_kernels_agree_with_their_twins_in_tritons_interpreter():
    assert_passes_in_the_interpreter(__file__)


@pytest.mark.parametrize("length", [0, 1, 100])
def test_the_decode_twin_computes_a_sequence_alone_from_8_bits(length):
    attend = decode_attention.paged_decode_attention_torch
    check_decode(attend, [length], 4, 2, 64, 16, "cpu", torch.float32, INT8)


@on_devices
@in_both_types
@pytest.mark.parametrize("width", [8, 1536, 3072])
def test_gelu_of_gates_matches_its_reference(device, dtype, width):
    x = 3 * rand(on(device, 200, 3), 2 * width + 16, device=device, dtype=dtype)[:, : 2 * width]
    assert error(gemma3.gelu_and_mul(x), gemma3.gelu_and_mul_torch(x)) < tolerance(dtype)


@on_devices
@in_both_types
@pytest.mark.parametrize("heads, kv_heads, head_dim", KERNEL_SHAPES[:: 2 if INTERPRETED else 1])
def test_8_bit_caches_are_attended_to_as_they_are_stored(device, dtype, heads, kv_heads, head_dim):
    lengths = on(device, [1, 16, 0, 17, 1000, 513, 64, 4000, 255], [1, 0, 33, 70])
    attend = decode_attention.paged_decode_attention
    check_decode(attend, lengths, heads, kv_heads, head_dim, 16, device, dtype, INT8)
    large = [(5, 5), (1, 40), (0, 7), (33, 33), (16, 70), (64, 64), (1000, 1000), (200, 1500), (129, 385)]
    lengths = on(device, large, [(3, 3), (40, 70), (1, 37)])
    attend = prefill_attention.varlen_prefill_attention
    check_prefill(attend, lengths, heads, kv_heads, head_dim, device, dtype, 16, INT8)


COMPILED_DECODE = """
from extension_kernels import INT8
from kernel_checks import check_decode
from nanovllm.kernels.decode_attention import paged_decode_attention

for processors in 1, 40:  # several programs share a context where there are many
    runtime.compiling_for.multi_processor_count = processors
    for cache_dtype in None, INT8:
        shape = 8, 2, 128, 256, "cpu", torch.bfloat16, cache_dtype
        check_decode(paged_decode_attention, [300, 129, 0], *shape)
"""


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or not HAVE_TRITON, reason="compiles with Triton")
def test_compiled_decode_attention_is_right_without_a_gpu():
    run_compiled(COMPILED_DECODE)


@on_devices
@pytest.mark.parametrize("block_size, batch", SPLITS)
def test_decode_of_8_bits_is_right_for_every_block_size_and_number_of_splits(device, block_size, batch):
    batch = min(batch, on(device, 40, 6))
    longest = on(device, 3000, 150)
    lengths = [longest] + torch.randint(0, longest, (batch - 1,)).tolist()
    attend = decode_attention.paged_decode_attention
    for _ in range(2):  # the second run finds the arrival counters as the first one left them
        check_decode(attend, lengths, 4, 2, 64, block_size, device, torch.float32, INT8)


@on_devices
@in_both_types
@pytest.mark.parametrize("heads, kv_heads, head_dim", ROPE_SHAPES)
@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize("block_size", [16, 48])
def test_8_bit_pages_are_written_as_the_twins_write_them(
    device, dtype, heads, kv_heads, head_dim, is_prefill, block_size
):
    """But for a byte that is off by one, where a number lies between two or a scale is rounded otherwise."""
    tokens = on(device, 70, 5)
    qkv, positions, cos_sin = rope_inputs(tokens, heads, kv_heads, head_dim, device, dtype)
    weights = [rand(head_dim, device=device, dtype=dtype) for _ in "qk"]
    slots = random_slots(tokens, 8 * block_size, device)
    caches = empty_caches(8, block_size, kv_heads, head_dim, device, INT8)
    before = caches[0].clone()
    expected, twins = qkv.clone(), [caches[0].clone()] * 2
    arguments = (heads, kv_heads, head_dim, *weights, 1e-6, positions, cos_sin)
    hooks = Int8Layout().store_hooks(caches[0], head_dim, is_prefill)
    fused_norm_rope_store(qkv, *arguments, *caches, slots, hooks)
    norm_rope_and_store(expected, *arguments, *twins, slots, is_prefill=is_prefill)
    assert error(qkv, expected) < 8e-3
    block_table = torch.arange(8, device=device)
    like = torch.empty(head_dim)
    found = Int8Layout().read(*caches, block_table, 0, 8 * block_size, like)
    wanted = Int8Layout().read(*twins, block_table, 0, 8 * block_size, like)
    written = slots[slots >= 0].long()
    for got, want in zip(found, wanted, strict=True):
        assert error(got[:, written], want[:, written]) < 8e-3
    if is_prefill:  # it attends to what is stored
        kv = qkv.unflatten(-1, (-1, head_dim))[slots >= 0, heads:].split(kv_heads, dim=1)
        for got, want in zip(found, kv, strict=True):
            assert torch.equal(got[:, written].transpose(0, 1).to(dtype), want)
    for cache in (caches[0], twins[0]):  # what is not to be written stays
        pages = int8_cache._parts(cache, head_dim), int8_cache._parts(before, head_dim)
        for got, want, tokens_last in zip(*pages, (False, True, False), strict=True):
            got, want = (x.mT if tokens_last else x for x in (got, want))
            got, want = (x.transpose(1, 2).flatten(0, 1).transpose(1, 2).flatten(0, 1) for x in (got, want))
            others = torch.ones(len(got), dtype=torch.bool, device=device)
            others[written] = False
            assert torch.equal(got[others].view(torch.uint8), want[others].view(torch.uint8))


@pytest.mark.gpu
@needs_cuda
def test_more_tokens_than_a_grid_dimension_holds_are_rotated_and_stored():
    tokens = 70_000
    qkv, positions, cos_sin = rope_inputs(tokens, 1, 1, 64, "cuda", torch.float32)
    caches = empty_caches(tokens // 16 + 1, 16, 1, 64, "cuda", torch.float32)
    slots, expected, twins = torch.arange(tokens, device="cuda"), qkv.clone(), [x.clone() for x in caches]
    arguments = (1, 1, 64, None, None, 1e-6, positions, cos_sin)
    fused_norm_rope_store(qkv, *arguments, *caches, slots, kv_store.StoreHooks())
    norm_rope_and_store(expected, *arguments, *twins, slots)
    torch.testing.assert_close([qkv, *caches], [expected, *twins], equal_nan=True)


@pytest.mark.alone
@pytest.mark.gpu
@needs_cuda
def test_decode_reaches_blocks_beyond_two_gigabytes():
    blocks, block_size = 9000, 256
    caches = [torch.zeros(blocks, block_size, 4, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    q, k, v = (rand(1, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    slot = torch.tensor([(blocks - 1) * block_size], device="cuda")
    kv_store.store_kvcache(k, v, *caches, slot)
    table, length = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([[blocks - 1]], [1]))
    step = Context(context_lens=length, block_tables=table)
    out = decode_attention.paged_decode_attention(q, *caches, AttentionVariant(1.0), step, ROWS)
    assert torch.equal(out, v)


@pytest.mark.gpu
@needs_cuda
def test_one_captured_decode_graph_serves_every_length():
    k_cache, v_cache, tables, sequences = paged_caches([900, 1200], 16, 2, 64, "cuda", torch.float32)
    q, rule = rand(2, 4, 64, device="cuda"), AttentionVariant(0.125)
    context_lens = torch.tensor([1, 1], dtype=torch.int32, device="cuda")
    attend = decode_attention.paged_decode_attention
    step = Context(context_lens=context_lens, block_tables=tables)
    attend(q, k_cache, v_cache, rule, step, ROWS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, k_cache, v_cache, rule, step, ROWS)
    for lengths in ([1, 1200], [900, 0], [64, 65], [513, 1199]):
        context_lens.copy_(torch.tensor(lengths))
        out.fill_(NAN)
        graph.replay()
        for i, length in enumerate(lengths):
            k, v = (x[:length] for x in sequences[i])
            expected = plain_attention(q[i : i + 1], k, v, rule) if length else torch.zeros_like(q[:1])
            assert error(out[i : i + 1], expected) < 2e-6


FLOATS = [torch.float32, torch.float16, torch.bfloat16]
UNLIKE = [(one, other) for one in FLOATS for other in FLOATS if one != other]
UNLIKE = UNLIKE[:4] if INTERPRETED else UNLIKE  # see HALF
unlike_caches = pytest.mark.parametrize("dtype, cache_dtype", UNLIKE)


@on_devices
@unlike_caches
def test_caches_of_another_dtype_are_written_as_the_twins_write_them(device, dtype, cache_dtype):
    qkv, positions, cos_sin = rope_inputs(5, 3, 2, 24, device, dtype)
    weights = [rand(24, device=device, dtype=dtype) for _ in "qk"]
    arguments = (3, 2, 24, *weights, 1e-6, positions, cos_sin)
    slots = random_slots(5, 32, device)
    key, value = (rand(5, 2, 24, device=device, dtype=dtype) for _ in "kv")
    caches, fused = (empty_caches(2, 16, 2, 24, device, cache_dtype) for _ in range(2))
    kv_store.store_kvcache(key, value, *caches, slots)
    fused_norm_rope_store(qkv.clone(), *arguments, *fused, slots, kv_store.StoreHooks())
    expected, expected_fused = (empty_caches(2, 16, 2, 24, device, cache_dtype) for _ in range(2))
    kv_store.store_kvcache_torch(key, value, *expected, slots)
    norm_rope_and_store(qkv, *arguments, *expected_fused, slots)
    close = 2 * max(torch.finfo(dtype).eps, torch.finfo(cache_dtype).eps)  # the interpreter rounds to zero
    torch.testing.assert_close(
        [*caches, *fused], [*expected, *expected_fused], rtol=close, atol=close, equal_nan=True
    )


@on_devices
@unlike_caches
@pytest.mark.parametrize("head_dim", [24, 128])
def test_caches_of_another_dtype_are_attended_to_in_the_queries(device, dtype, cache_dtype, head_dim):
    if device == "cpu" and head_dim > 24:
        pytest.skip("takes long in the interpreter")
    sizes = 3, 1, head_dim
    lengths = on(device, [1, 0, 2000, 70], [1, 0, 33])
    for attend in (decode_attention.paged_decode_attention, decode_attention.paged_decode_attention_torch):
        for batches in on(device, (1, 60), (1,)):  # split and not
            check_decode(attend, lengths * batches, *sizes, 16, device, dtype, cache_dtype)
    lengths = on(device, [(100, 500), (300, 300), (1, 70)], [(3, 3), (20, 40)])
    for attend in (
        prefill_attention.varlen_prefill_attention,
        prefill_attention.varlen_prefill_attention_torch,
    ):
        check_prefill(attend, lengths, *sizes, device, dtype, 16, cache_dtype)


@on_devices
@in_both_types
def test_thresholds_are_those_of_the_twin(device, dtype, monkeypatch):
    """Also where not all that matters is among the best of every lane."""
    vocab, block = on(device, 40_000, 400), on(device, filtering.BLOCK, 64)
    monkeypatch.setattr(filtering, "BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, vocab, generator=generator) * torch.linspace(0.3, 4, 40)[:, None]
    logits[0, : vocab // 2] = -torch.inf
    logits[1, :: int(block)] += 50  # in one lane
    logits[2] = 0.0
    logits[3:5] -= 100.0
    logits[5:8, ::3] -= 1e30  # as bans are
    temperatures = torch.rand(40, generator=generator) + 0.3
    temperatures[39] = 0.0
    filters = torch.zeros(40, 3)
    filters[:24, 0] = torch.tensor([3, 40, 7, 1, 2, 9, 20, 30, 50, 60, 64, 65, 90, 128, 200, 299] + [5] * 8)
    filters[16:20, 0] = torch.tensor([vocab - 1, vocab, vocab + 1, 2**20])
    filters[:, 1] = 1.0
    filters[10:34, 1] = torch.linspace(0.01, 0.999, 24)
    filters[28:, 2] = torch.linspace(0.0001, 1, 12)
    logits, temperatures, filters = logits.to(device, dtype), temperatures.to(device), filters.to(device)
    thresholds = filtering.filter_thresholds(logits, temperatures, filters)
    expected = filtering.filter_thresholds_torch(logits, temperatures, filters)
    kept, expected = ((logits.float() >= bounds[:, None]).sum(1) for bounds in (thresholds, expected))
    assert kept[39] == vocab
    if device == "cuda":  # sums of so many are rounded differently
        assert ((kept - expected).abs() <= 1 + expected * 1e-4).all()
    else:
        assert torch.equal(kept, expected)


@on_devices
@in_both_types
def test_tokens_below_the_threshold_are_not_drawn(device, dtype):
    logits, seeds, positions = sampling_inputs(12, 3000, device, dtype)
    temperatures = torch.tensor([0.0, 0.7, 1.5], device=device).repeat(4)
    thresholds = logits.float().topk(40).values[:, -1].clone()
    thresholds[:3] = -torch.inf
    draw = logits, temperatures, seeds, positions, 0, thresholds
    tokens, expected = (drawn(sample, *draw)[1] for sample in (sampling.sample, sampling.sample_torch))
    assert torch.equal(tokens, expected)
    assert (logits.float().gather(1, tokens[:, None])[:, 0] >= thresholds).all()
    assert torch.equal(tokens[:3], drawn(sampling.sample, *draw[:5])[1][:3])


def edit_inputs(device, batch=5, rows=8, vocab=700):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, vocab, generator=generator) * 5
    where = torch.randperm(rows, generator=generator)[:batch].int()
    return generator, logits.to(device), where.to(device)


def pack_rules(rules: list[tuple[int, float, list[int]]]) -> torch.Tensor:
    """(position from which it holds no longer, what it adds, tokens) each, as `apply_rules` wants them."""
    fields, before = [], []
    for until, added, (*prefix, token) in rules:
        before += prefix
        bits = torch.tensor(added).view(torch.int32).item()
        fields.append(
            (until, bits, token, 1 + len(rules) * logit_edits.RULE_FIELDS + len(before), len(prefix))
        )
    fields = torch.tensor(fields, dtype=torch.int32).reshape(-1, logit_edits.RULE_FIELDS)
    return torch.tensor([len(rules), *fields.T.flatten().tolist(), *before], dtype=torch.int32)


@on_devices
def test_rules_change_what_their_twin_changes(device):
    """Row by row none, one, and more than all programs look at together; words of any length there is."""
    generator, logits, rows = edit_inputs(device, batch=6, vocab=1500)
    numbers, positions = (0, 1, 200, 1100, 1100, 8), (0, 1, 3, 1000, 1030, 5000)
    pick, length = random.Random(0), logit_edits.HISTORY
    history = torch.randint(0, 2, (8, length), generator=generator, dtype=torch.int32)
    rules, holds_after_long = {}, []
    for row, position, number in zip(rows.tolist(), positions, numbers, strict=True):
        history[row, position:] = -1  # as nothing is drawn there yet
        newest_last, words = history[row].roll(-position).tolist(), []
        for token in range(number):
            prefix = [pick.randrange(2) for _ in range(pick.choice([0, 0, 1, 3, 17]))]
            if token % 8 == 1 and position:  # one that was drawn, but for its first token perhaps
                prefix = newest_last[-pick.randint(1, min(length, position)) :]
                prefix[0] = pick.randrange(2)
            until = pick.randint(0, 2 * position + 1)
            words.append((until, pick.choice([-1e30, pick.uniform(-9, 9)]), [*prefix, token]))
            if len(prefix) > 500 and newest_last[-len(prefix) :] == prefix and until > position:
                holds_after_long.append((row, token))
        if number:
            rules[row] = pack_rules(words).to(device)
    addresses = torch.tensor([rules[row].data_ptr() if row in rules else 0 for row in range(8)])
    positions, history = torch.tensor(positions, device=device), history.to(device)
    got, expected = logits.clone(), logits.clone()
    logit_edits.apply_rules(got, rows, positions, rules, addresses.to(device), history)
    logit_edits.apply_rules_torch(expected, rows, positions, rules, history)
    assert torch.equal(got, expected)
    changed = got != logits
    assert not changed[0].any() and (changed[2:].sum(1) < torch.tensor(numbers[2:], device=device)).all()
    found = {(rows[i].item(), token) for i, token in changed.nonzero().tolist()}
    assert len(holds_after_long) > 5 and found.issuperset(holds_after_long)


@on_devices
def test_a_bias_and_bans_of_one_token_have_the_same_bits_in_any_order(device):
    """As programs add them. Where a token is banned its bias is lost."""
    meeting = [(5, 0.1, [3]), (5, -1e30, [3]), (5, -1e30, [3]), (5, 0.3, [4]), (5, -1e30, [5])]
    expected = [0.7, 0.7, 0.7, -2e30, torch.tensor(0.7).add(0.3).item(), -1e30]
    for words in itertools.permutations(meeting):
        logits, position = torch.full((1, 6), 0.7, device=device), torch.zeros(1, dtype=torch.int64)
        rules = {0: pack_rules(words).to(device)}
        addresses = torch.tensor([rules[0].data_ptr()], device=device)
        history = torch.full((1, logit_edits.HISTORY), -1, dtype=torch.int32, device=device)
        row, position = position.int().to(device), position.to(device)
        logit_edits.apply_rules(logits, row, position, rules, addresses, history)
        assert torch.equal(logits[0].cpu(), torch.tensor(expected))


@pytest.fixture
def short_blocks(device, monkeypatch):
    """In the interpreter, so that small vocabularies have several."""
    if device == "cpu":
        monkeypatch.setattr(likelihood, "BLOCK", 64)


def likelihood_inputs(device, dtype, rows, vocab, is_processed):
    logits = (3 * rand(rows, vocab, device=device)).to(dtype)
    logits[1, : vocab // 2] = -torch.inf
    token_ids = vocab - 1 - torch.arange(3 * rows, device=device).view(rows, 3)
    lowest = logits.float().topk(40).values[:, -1].clone()
    lowest[::3] = -torch.inf
    temperatures = torch.linspace(0.3, 2, rows, device=device)
    return logits, token_ids, *((temperatures, lowest) if is_processed else (None, None))


@on_devices
@in_both_types
@pytest.mark.parametrize("is_processed", [False, True])
@pytest.mark.parametrize("vocab", [256, 300, 301])
@pytest.mark.usefixtures("short_blocks")
def test_log_probabilities_are_those_of_the_twin(device, dtype, vocab, is_processed):
    given = likelihood_inputs(device, dtype, 9, on(device, 100 * vocab, vocab), is_processed)
    found, ranks = likelihood.token_logprobs(*given)
    expected, expected_ranks = likelihood.token_logprobs_torch(*given)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    assert torch.equal(ranks, expected_ranks)
    assert found.isinf().any() == is_processed


@on_devices
@pytest.mark.parametrize("is_processed", [False, True])
@pytest.mark.parametrize("vocab", [256, 301])
@pytest.mark.usefixtures("short_blocks")
def test_log_probabilities_of_a_row_have_its_bits_wherever_it_stands(device, vocab, is_processed):
    """Among others or alone, at an address that is aligned or not, as bfloat16 or, where others change it,
    as float32."""
    rows = on(device, 300, 5)
    given = likelihood_inputs(device, torch.bfloat16, rows, on(device, 100 * vocab, vocab), is_processed)
    logits, *others = given
    expected, _ = likelihood.token_logprobs(*given)
    wide = logits.new_zeros(rows, logits.shape[1] + 3)
    wide[:, 3:] = logits
    for same in (logits.float(), wide[:, 3:], wide.float()[:, 3:]):
        assert torch.equal(likelihood.token_logprobs(same, *others)[0], expected)
    for i in range(rows):
        alone = (None if each is None else each[i : i + 1] for each in given)
        assert torch.equal(likelihood.token_logprobs(*alone)[0], expected[i : i + 1])


@on_devices
def test_token_flags_change_what_their_twin_changes(device):
    generator, logits, rows = edit_inputs(device, vocab=9000)
    flags = torch.randint(0, 3, (8, 9000), generator=generator, dtype=torch.int32)
    flags += torch.randint(0, 2, flags.shape, generator=generator).int() * logit_edits.IN_PROMPT
    flags += (torch.rand(flags.shape, generator=generator) < 0.1).int() * logit_edits.BANNED
    penalties = torch.tensor([[0.5, 0.2, 1.3], [1, 1, 0], [-1, -0.5, 0.7], [0, 0, 1], [0, 2, 1]])
    got, expected = logits.clone(), logits.clone()
    logit_edits.apply_token_flags(got, rows, penalties.to(device), flags.to(device))
    logit_edits.apply_token_flags_torch(expected, rows, penalties.to(device), flags.to(device))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(got[1], logits[1])
    assert torch.equal(got.isinf(), expected.isinf()) and got.isinf().any()


def mask_inputs(device):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (3, 282), generator=generator, dtype=torch.int64).int().to(device)
    index = torch.tensor([2, -1, 0, 1, -1, 2, 0], dtype=torch.int32, device=device)  # longer than the batch
    return index, bits


def masked_by_hand(logits, index, bits, vocab_start):
    masked, tokens = logits.clone(), range(vocab_start, vocab_start + logits.shape[1])
    for row, mask in enumerate(index[: len(logits)].tolist()):
        words = [] if mask < 0 else bits[mask].tolist()
        banned = [mask >= 0 and not words[token // 32] >> (token % 32) & 1 for token in tokens]
        masked[row, torch.tensor(banned, device=logits.device)] = -torch.inf
    return masked


SHARDS = pytest.mark.parametrize("vocab, vocab_start", [(9000, 0), (5000, 4000), (5, 8995), (31, 33)])


@on_devices
@in_both_types
@SHARDS
def test_masks_rule_out_their_tokens_and_touch_no_other_row(device, dtype, vocab, vocab_start):
    masks, logits = mask_inputs(device), rand(5, vocab, device=device, dtype=dtype)
    twin = logits.clone()
    token_masks.apply_masks_torch(twin, *masks, vocab_start)
    expected = masked_by_hand(logits, *masks, vocab_start)
    assert torch.equal(twin, expected)
    token_masks.apply_masks(logits, *masks, vocab_start)
    assert torch.equal(logits, expected)


# Matrix products of a few rows

MATVEC_SHAPES = [(96, 6), (4500, 2)] if INTERPRETED else [(576, 3402), (12288, 600), (96, 6), (100, 10)]


@on_devices
@in_both_types
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("in_features, out_features", MATVEC_SHAPES)
def test_a_small_product_with_its_neighbours_matches_its_twin(device, dtype, rows, in_features, out_features):
    x = rand(rows, in_features + 16, device=device, dtype=dtype)[:, :in_features]
    weight = rand(out_features, in_features, device=device, dtype=dtype) * in_features**-0.5
    weight, bias = weight.to(dtype), rand(out_features, device=device, dtype=dtype)
    norm_weight, residual = (
        rand(in_features, device=device, dtype=dtype),
        rand(rows, out_features, device=device),
    )
    for options in (
        {},
        {"bias": bias, "residual": residual.to(dtype)},
        {"norm_weight": norm_weight, "eps": 1e-6},
        {"norm_weight": norm_weight, "eps": 1e-6, "silu_and_mul": True, "bias": bias},
    ):
        got = gemv.gemv(x, weight, **options)
        wide = {name: v.double() if isinstance(v, torch.Tensor) else v for name, v in options.items()}
        expected = gemv_torch(x.double(), weight.double(), **wide)
        assert got.dtype == dtype and error(got, expected) < tolerance(dtype)


# Sums over ranks


on_ranks = pytest.mark.skipif(not INTERPRETED, reason="test_all_reduce.py runs this on GPUs")
on_the_cpu = pytest.mark.parametrize("device", ["cpu"])


def make_ranks(size, dtype=torch.float32, half_bytes=1 << 14):
    sizes = dict(max_num_seqs=8, half_bytes=half_bytes)
    num_words = all_reduce.PeerMemory.num_words(size, **sizes)
    buffers = torch.zeros(size, -(-num_words // 4) * 4, dtype=torch.int32)[:, :num_words]
    addresses = [buffer.data_ptr() for buffer in buffers]
    return [all_reduce.PeerMemory(i, addresses, buffers[i], dtype, **sizes) for i in range(size)]


def begin(function, rank, *args):
    """
    Make a call without waiting for other ranks, to send what they wait for: its result is right only if they
    have sent theirs. The rank has this call still before it.
    """
    turn = rank.turn
    rank.aborted.fill_(1)
    result = function(rank, *args)
    rank.aborted.zero_()
    rank.turn = turn
    return result


@on_ranks
@on_the_cpu
@in_both_types
def test_ranks_that_write_into_each_others_memory_sum_up(device, dtype):
    first, second = make_ranks(2, dtype)

    def in_turn(function, first_args, second_args):
        begin(function, first, *first_args)
        of_second = function(second, *second_args)
        return function(first, *first_args), of_second

    parts, residual, weight = [rand(3, 72, dtype=dtype) for _ in range(2)], rand(3, 72, dtype=dtype), rand(72)
    expected = sum_and_norm(parts, residual, weight.to(dtype), 1e-6)
    args = [(part, residual, weight.to(dtype), 1e-6) for part in parts]
    for results in in_turn(all_reduce.PeerMemory.all_reduce_add_rms_norm, *args):
        assert all(error(*pair) < tolerance(dtype) for pair in zip(results, expected, strict=True))
    scores, tokens = torch.tensor([[1.0, -0.0, -2.0], [0.5, 0.0, 3.0]]), torch.tensor([[1, 2, 3], [7, 8, 9]])
    for best in in_turn(all_reduce.PeerMemory.best_token, *zip(scores, tokens, strict=True)):
        assert best.tolist() == [1, 2, 9]


@on_ranks
@on_the_cpu
def test_a_rank_may_send_its_next_sum_before_another_has_read_the_last(device):
    slow, fast = make_ranks(2)
    add, of_slow, of_fast = all_reduce.PeerMemory.all_reduce, rand(2, 3, 72), rand(2, 3, 72)
    begin(add, slow, of_slow[0])
    assert error(fast.all_reduce(of_fast[0]), of_slow[0] + of_fast[0]) < 1e-6
    begin(add, fast, of_fast[1])
    for i in range(2):
        assert error(slow.all_reduce(of_slow[i]), of_slow[i] + of_fast[i]) < 1e-6


@on_ranks
@on_the_cpu
def test_a_rank_may_begin_a_step_while_another_is_in_the_last_and_it_begins_where_a_captured_one_does(device):
    slow, fast = make_ranks(2)
    add, best_token = all_reduce.PeerMemory.all_reduce, all_reduce.PeerMemory.best_token
    of_slow, of_fast = rand(2, 3, 72), rand(2, 3, 72)
    scores, tokens = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[1, 2], [7, 8]])
    begin(add, slow, of_slow[0])
    fast.all_reduce(of_fast[0])
    slow.all_reduce(of_slow[0])
    begin(best_token, slow, scores[0], tokens[0])
    assert fast.best_token(scores[1], tokens[1]).tolist() == [7, 2]
    begin(add, fast, of_fast[1])
    assert slow.best_token(scores[0], tokens[0]).tolist() == [7, 2]
    slow.turn = 0  # as if the slow one's steps were replayed, which changes nothing on the host
    assert error(begin(add, slow, of_slow[1]), of_slow[1] + of_fast[1]) < 1e-6


@on_ranks
@on_the_cpu
@pytest.mark.parametrize("rank", range(3))
def test_each_rank_sums_up_its_share_of_rows_that_the_ranks_do_not_divide(device, rank, monkeypatch):
    """Six rows where four fit at a time: three and three."""
    monkeypatch.setattr(all_reduce, "TWO_HOPS_BYTES", 0)
    ranks, add = make_ranks(3, half_bytes=2 * 4 * 8 * 4), all_reduce.PeerMemory.all_reduce_add_rms_norm
    parts, residual, weight = list(rand(3, 6, 8)), rand(6, 8), rand(8)
    args = residual, weight, 1e-6
    for other in {0, 1, 2} - {rank}:
        begin(add, ranks[other], parts[other], *args)
    got = begin(add, ranks[rank], parts[rank], *args)
    for one, other in zip(got, sum_and_norm(parts, *args), strict=True):
        assert error(one[rank::3], other[rank::3]) < 1e-6


@on_devices
@pytest.mark.parametrize("shape", [(0, 64), (2, 3, 4, 64), (1, 64)])
def test_rms_norm_takes_any_number_of_leading_dimensions(device, shape):
    x, weight = rand(*shape, device=device), rand(64, device=device)
    normed = layernorm.add_rms_norm(x, None, weight, 1e-6)[0]
    assert normed.shape == x.shape
    torch.testing.assert_close(normed, layernorm.rms_norm_torch(x, weight, 1e-6))


def test_the_decode_reference_gives_zeros_when_every_row_is_padding():
    check_decode(decode_attention.paged_decode_attention_torch, [0, 0], 4, 2, 64, 16, "cpu", torch.float32)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slot", [-1, 0, 37])
def test_a_token_alone_is_stored_as_among_others(slot, cache_dtype):
    alone, among = (empty_caches(3, 16, 2, 64, "cpu", cache_dtype) for _ in range(2))
    key, value, slots = rand(2, 2, 64), rand(2, 2, 64), torch.tensor([slot, -1])
    kv_store.store_kvcache_torch(key[:1], value[:1], *alone, slots[:1])
    kv_store.store_kvcache_torch(key, value, *among, slots)
    for one, other in zip(alone, among, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [0, 1, 100])
def test_the_decode_reference_computes_a_sequence_alone(length, cache_dtype):
    attend = decode_attention.paged_decode_attention_torch
    check_decode(attend, [length], 4, 2, 64, 16, "cpu", torch.float32, cache_dtype)


@on_devices
def test_prefill_reads_pages_of_256_tokens(device):
    lengths = on(device, [(300, 600), (512, 512)], [(20, 300)])
    check_prefill(prefill_attention.varlen_prefill_attention, lengths, 2, 1, 64, device, torch.float32, 256)


def test_noise_is_finite_for_every_hash():
    bits = torch.tensor([0, 2**23 - 1], dtype=torch.float32)
    assert (-(-((bits + 0.5) * 2.0**-23).log()).log()).isfinite().all()
