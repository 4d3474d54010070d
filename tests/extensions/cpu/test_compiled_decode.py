"""The compiled decode step against the torch path and float32, and who does not get one."""

import importlib.util
import os
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from gguf_files import byte_level_metadata, write_gguf
from smollm2 import smollm2_gguf  # noqa: F401  a fixture

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.cpu import decode
from nanovllm.extensions.cpu.packing import BYTES, GROUP, HALF, HALVES, LANES, NIBBLES, pack, quantise
from nanovllm.extensions.quantised.gguf import is_readable
from tiny_checkpoints import make_checkpoint

pytest.importorskip("numba")
needs_known_codes = pytest.mark.skipif(
    not is_readable(), reason="torch packs codes for this CPU in an order that is not known"
)
WIDE = dict(hidden_size=128, intermediate_size=192, vocab_size=259)  # heads of 32; 64 outputs of each shard
LONG = dict(hidden_size=256, intermediate_size=512)  # blocks have 256 inputs
FORMS = [
    ("llama", "Q4_1", {}),
    ("llama", "Q8_0", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    ("qwen2", "Q4_0", {}),
    ("qwen3", "Q5_1", dict(head_dim=32)),
    ("llama", {"": "Q4_K", "attn_v": "Q6_K", "ffn_down": "Q6_K"}, LONG),
    ("qwen2", {"": "Q4_1", "attn_v": "Q8_0", "ffn_gate": "Q5_0"}, {}),
]
PROMPTS = [[5, 6, 7], [*range(20, 60)], [9], [*range(100, 133)], [1, 2], [3], [4, 3, 2], [*range(15)]]


def make_gguf(folder, architecture="llama", kind="Q4_1", **overrides):
    make_checkpoint(folder, architecture, **WIDE | overrides)
    return write_gguf(folder, kind, **byte_level_metadata("qwen2"))


def make_engine(file, **options):
    options = dict(dtype="bfloat16", device="cpu", max_model_len=256, kvcache_block_size=16) | options
    return LLM(str(file), **options)


def is_compiled(llm) -> bool:
    return isinstance(getattr(llm.model_runner.model.forward, "__self__", None), decode.CompiledStep)


def decoded_logits(llm, prompts, tokens) -> torch.Tensor:
    """Log-probabilities [steps, sequences, vocabulary] where every sequence goes on with these tokens."""
    found, forced = [], iter(tokens)
    runner = llm.model_runner
    compute, sampler = runner.model.compute_logits, runner.sampler
    runner.model.compute_logits = lambda hidden: found.append(compute(hidden).float().clone()) or found[-1]
    runner.sampler = lambda logits, step: torch.full((len(logits),), next(forced))
    try:
        params = SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        runner.model.compute_logits, runner.sampler = compute, sampler
    return torch.stack(found[1:]).log_softmax(-1)


def test_packed_matrices_multiply():
    """Of every kind of blocks, one below the other."""
    compiled = decode.load_functions()
    rng = torch.Generator().manual_seed(0)
    groups, rows, parts, matrix, weight = 5, 4, [], [], []
    for kind, tiles in ((NIBBLES, 2), (BYTES, 1), (HALVES, 3)):
        limit, size = 8 if kind == NIBBLES else 128, HALF if kind == HALVES else GROUP
        shape = tiles * LANES, groups * GROUP // size
        codes = torch.randint(-limit, limit, (*shape, size), dtype=torch.int8, generator=rng)
        scales, zeros = torch.randn(2, *shape, generator=rng).bfloat16().float()
        zeros *= kind != HALVES
        bias = torch.randn(shape[0], generator=rng)
        parts.append(pack(codes, scales, zeros, kind, bias))
        first = matrix[-1][3] if matrix else 0
        matrix.append((parts[-1].data_ptr(), kind, first, first + tiles))
        weight.append(
            torch.cat(((codes * scales[..., None] + zeros[..., None]).flatten(1), bias[:, None]), 1)
        )
    weight, bias = torch.cat(weight)[:, :-1], torch.cat(weight)[:, -1]
    outputs, x = len(bias), torch.randn(rows, groups * GROUP, generator=rng)
    found = np.zeros((rows, outputs), np.float32)
    matrix = np.array(matrix)
    compiled.compute_logits((matrix, x.numpy(), found), 1)
    expected = x.double() @ weight.double().t() + bias
    error = (torch.from_numpy(found) - expected).abs().max() / expected.std()
    assert error < 3e-4  # inputs have 15 bits
    found[:] = 0
    compiled.compute_logits((matrix, np.zeros_like(x), found), 1)
    assert np.array_equal(found, np.broadcast_to(bias, found.shape))


@pytest.mark.slow  # Numba compiles in another process
def test_a_cpu_without_the_instruction_multiplies_too():
    code = "from nanovllm.extensions.cpu import decode, vectors; decode.load_functions(); "
    code += "import sys, pytest; assert not vectors.HAS_DOT; "
    code += f"sys.exit(pytest.main(['-qk', 'packed_matrices', '-p', 'no:cacheprovider', {__file__!r}]))"
    environment = os.environ | {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=200)


def test_a_head_is_quantised_to_8_bits():
    weight = torch.randn(LANES + 3, 2 * GROUP)
    blocks = quantise(weight)[:, 4 * LANES :].view(2, 2, -1)  # [tiles, groups, bytes]
    codes = blocks[:, :, 4 * LANES :].view(2, 2, 8, LANES, 4).permute(0, 3, 1, 2, 4).reshape(32, 2, GROUP)
    pairs = blocks[:, :, : 4 * LANES].contiguous().view(torch.bfloat16).view(2, 2, LANES, 2).float()
    scales = pairs[..., 0].transpose(1, 2).reshape(32, 2, 1)
    restored = ((codes.float() - 128) * scales).flatten(1)
    assert not restored[len(weight) :].any()
    assert (
        (restored[: len(weight)] - weight).abs()
        <= 0.51 * scales[: len(weight)].repeat_interleave(GROUP, 1).flatten(1)
    ).all()


@needs_known_codes
@pytest.mark.parametrize("architecture, kind, overrides", FORMS)
def test_logits_are_as_close_to_float32_as_those_of_the_torch_path(tmp_path, architecture, kind, overrides):
    file = make_gguf(tmp_path, architecture, kind, **overrides)
    tokens = [11, 12, 250, 13, 14, 77]
    logits = []
    for options in ({"dtype": "float32"}, {"enforce_eager": True}, {}):
        with make_engine(file, **options) as llm:
            assert is_compiled(llm) != bool(options)
            logits.append([decoded_logits(llm, prompts, tokens) for prompts in (PROMPTS, PROMPTS[1:2])])
    for expected, plain, found in zip(*logits, strict=True):
        assert (found - expected).abs().mean() < 1.2 * (plain - expected).abs().mean()


@needs_known_codes
def test_more_rows_than_it_takes_and_fewer_are_computed_on_one_cache(tmp_path):
    prompts = [[i, i + 1] for i in range(9)]
    file = make_gguf(tmp_path)
    lengths = [SamplingParams(temperature=0, max_tokens=4 + i, ignore_eos=True) for i in range(len(prompts))]
    results = []
    for eager in (True, False):
        with (
            make_engine(file, enforce_eager=eager) as llm,
            mock.patch.object(
                llm.model_runner.model, "forward", wraps=llm.model_runner.model.forward
            ) as forward,
        ):
            results.append([each["token_ids"] for each in llm.generate(prompts, lengths, use_tqdm=False)])
            rows = {len(call.args[0]) for call in forward.call_args_list}
            assert {8, 9} <= rows
    same = sum(a == b for a, b in zip(*results, strict=True))
    assert same >= 7  # rounding may change a token


@needs_known_codes
def test_threads_compute_the_same_bits(tmp_path):
    file, before, found = make_gguf(tmp_path), torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with make_engine(file) as llm:
                assert llm.model_runner.model.forward.__self__.num_threads == threads
                found.append(decoded_logits(llm, PROMPTS, [1, 2, 3]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "options, overrides, kind",
    [
        ({"enforce_eager": True}, {}, "Q4_1"),
        ({"dtype": "float32"}, {}, "Q4_1"),
        ({"kv_cache_dtype": "int8"}, {}, "Q4_1"),
        ({}, {}, "F16"),
        ({}, LONG, "Q2_K"),  # zeros for 16 inputs
        ({}, {}, {"": "Q4_1", "attn_k": "F16"}),
        ({}, {"num_attention_heads": 16, "num_key_value_heads": 8}, "Q4_1"),  # heads of 8
    ],
)
def test_others_keep_the_torch_path(tmp_path, options, overrides, kind):
    with make_engine(make_gguf(tmp_path, kind=kind, **overrides), **options) as llm:
        assert not is_compiled(llm)


def test_without_numba_nothing_changes(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba" else find(name))
    with make_engine(make_gguf(tmp_path)) as llm:
        assert not is_compiled(llm)


@needs_known_codes
@pytest.mark.slow
def test_smollm2_stays_close_to_float32(smollm2_gguf):  # noqa: F811
    text = "The history of the city begins with a small settlement on the river, which grew quickly."
    found = []
    for options in ({"dtype": "float32"}, {}):
        with make_engine(smollm2_gguf, **options) as llm:
            assert is_compiled(llm) != bool(options)
            tokens = llm.tokenizer.encode(text)
            found.append(decoded_logits(llm, [tokens[:4]], tokens[4:]))
    expected, log_probs = found
    assert (expected.exp() * (expected - log_probs)).sum(-1).mean() < 1e-3
