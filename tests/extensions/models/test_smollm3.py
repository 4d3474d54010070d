"""SmolLM3, of whose layers some rotate nothing."""

import pytest
from transformers_checkpoints import assert_answers_as_transformers, make

from nanovllm import LLM
from tiny_checkpoints import EXACT, edit_json, one_thread  # noqa: F401

FIELDS = dict(no_rope_layers=None, layer_types=None, use_sliding_window=None, sliding_window=None)


def rotates(folder) -> list[bool]:
    with LLM(str(folder), **EXACT, num_kvcache_blocks=8) as llm:
        layers = llm.model_runner.model.model.layers
        return [bool(layer.self_attn.rotary_emb.cos_sin_cache.chunk(2, dim=1)[1].any()) for layer in layers]


@pytest.mark.parametrize("interval, expected", [(None, [1, 1, 1, 0, 1]), (2, [1, 0, 1, 0, 1])])
def test_every_fourth_layer_rotates_nothing_or_as_the_file_says(tmp_path, interval, expected):
    plain = dict(num_hidden_layers=5, layer_types=None, use_sliding_window=False)
    folder = make("smollm3", tmp_path, **plain, no_rope_layer_interval=interval or 4)
    edit_json(folder / "config.json", **FIELDS, no_rope_layer_interval=interval)
    assert_answers_as_transformers(folder, model_impl="native")
    assert rotates(folder) == expected
    edit_json(folder / "config.json", no_rope_layers=[0, 0, 1, 1, 0])
    assert_answers_as_transformers(folder, model_impl="native")
    assert rotates(folder) == [0, 0, 1, 1, 0]


def test_layers_may_have_windows(tmp_path):
    assert_answers_as_transformers(make("smollm3", tmp_path), model_impl="native")


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("no_rope_layers", [1], "no_rope_layers must have 0 or 1 for each layer, got"),
        ("no_rope_layers", 3, "no_rope_layers must have 0 or 1 for each layer, got 3"),
        ("no_rope_layer_interval", 0, "no_rope_layer_interval must be an integer from 1"),
        ("use_sliding_window", True, "use_sliding_window needs layer_types"),
    ],
)
def test_settings_that_are_not_possible_are_refused_by_name(tmp_path, field, value, message):
    folder = make("smollm3", tmp_path)
    edit_json(folder / "config.json", **FIELDS | {field: value})
    with pytest.raises(ValueError, match=message):
        LLM(str(folder), **EXACT)
