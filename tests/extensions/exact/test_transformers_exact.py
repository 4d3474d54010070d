"""Models that transformers builds, in exact mode: found exact when they are loaded, or refused by name."""

import pytest
import torch
from exact_schedules import compare
from transformers.models.gpt2 import modeling_gpt2
from transformers_checkpoints import make

from nanovllm import LLM
from nanovllm.extensions.exact import backend_check
from tiny_checkpoints import one_thread  # noqa: F401

OPTIONS = dict(device="cpu", dtype="float32", model_impl="transformers")
SMALL_ENGINE = OPTIONS | dict(kvcache_block_size=16, num_kvcache_blocks=40)


def start(folder, **options) -> None:
    LLM(str(folder), **SMALL_ENGINE | options).exit()


@pytest.mark.usefixtures("no_forecast")
@pytest.mark.parametrize("kind", ["olmo2", "gpt2"])  # with norms of the engine, and of transformers
def test_a_sequence_in_any_company_has_the_logits_of_the_sequence_alone(tmp_path, kind):
    counts, different = compare(make(kind, tmp_path), 3, 0, 12, exact=True, **OPTIONS)
    assert counts["completions"] > 30 and not different, f"{len(different)}, first {different[0]}"


@pytest.mark.usefixtures("no_forecast")
def test_without_the_mode_the_same_schedules_change_logits(tmp_path):
    counts, different = compare(make("olmo2", tmp_path), 1, 0, 12, **OPTIONS)
    assert len(different) > counts["completions"] / 4


@pytest.mark.parametrize("fewest", [2, 100])
def test_a_type_that_computes_some_numbers_of_rows_in_another_way_is_refused_by_name(
    tmp_path, monkeypatch, fewest
):
    folder = make("gpt2", tmp_path)
    start(folder, exact=True)
    forward = modeling_gpt2.GPT2MLP.forward

    def other_forward(module, x):
        return forward(module, x) * (1 + 2**-20 * (x[..., 0].numel() >= fewest))

    monkeypatch.setattr(modeling_gpt2.GPT2MLP, "forward", other_forward)
    start(folder)
    with pytest.raises(ValueError, match="exact=True cannot be used with model type 'gpt2' through transf"):
        start(folder, exact=True)


def test_the_head_is_exact_although_transformers_multiplies_by_it(tmp_path, monkeypatch):
    monkeypatch.setattr(backend_check, "exact_linear", torch.nn.functional.linear)
    with pytest.raises(ValueError, match="model type 'olmo2'"):
        start(make("olmo2", tmp_path), exact=True)


def test_a_type_with_experts_is_refused_by_name_even_if_no_bits_are_seen_to_differ(tmp_path):
    with pytest.raises(ValueError, match="exact=True cannot be used with model type 'olmoe'"):
        start(make("olmoe", tmp_path), exact=True, dtype="bfloat16")


@pytest.mark.parametrize("kind", ["gemma2", "bloom"])
def test_other_attention_than_plain_is_refused(tmp_path, kind):
    with pytest.raises(ValueError, match="exact=True cannot be used with windows, caps, sinks or slopes"):
        start(make(kind, tmp_path), exact=True)


def test_several_ranks_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"exact=True needs tensor_parallel_size to be one of \[1\], got 2"):
        start(make("olmo2", tmp_path), exact=True, tensor_parallel_size=2)
