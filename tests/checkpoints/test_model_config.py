"""ModelConfig: what passes its checks makes a model of finite numbers, and nobody changes it afterwards."""

import dataclasses
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gguf import write_gguf
from test_loader import assert_same_parameters, build_model, expected_parameters

from nanovllm import LLM
from nanovllm.checkpoints import FolderCheckpoint, GGUFCheckpoint, open_checkpoint
from nanovllm.checkpoints.model_config import ARCHITECTURES, ROPE_NUMBERS, ROPE_TYPES, ModelConfig
from nanovllm.config import Config
from nanovllm.layers.rotary_embedding import get_rope
from nanovllm.models import get_model_class
from nanovllm.utils.loader import load_model
from tiny_checkpoints import EXACT, make_checkpoint

SMALL = dict(
    architectures=["LlamaForCausalLM"],
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    vocab_size=64,
    max_position_embeddings=64,
)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_known_architecture_has_a_model(name):
    own = {"architectures": ["Unknown", name], "num_key_value_heads": 4}
    config = ModelConfig.from_dict("config.json", SMALL | own)
    assert config.architectures == [name]
    assert get_model_class(config).__name__ == name


def test_settings_can_be_read_by_their_names_and_not_be_set():
    config = ModelConfig.from_dict("config.json", SMALL | {"rms_norm_eps": 1e-5})
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim) == (64, 4, 16)
    assert config.rms_norm_eps == 1e-5 and config.raw["rms_norm_eps"] == 1e-5
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 65


def test_another_architecture_is_named_even_where_its_sizes_have_other_names():
    with pytest.raises(
        ValueError, match="config.json: architecture 'GPT2LMHeadModel' of model type None is not"
    ):
        ModelConfig.from_dict("config.json", {"architectures": ["GPT2LMHeadModel"], "n_embd": 768})


MOE = SMALL | {"architectures": ["Qwen3MoeForCausalLM"]}


def test_the_number_of_experts_is_read_in_both_spellings():
    for name in ("num_experts", "num_local_experts"):
        assert ModelConfig.from_dict("config.json", MOE | {name: 9}).experts.num_experts == 9


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_experts", 0),
        ("num_experts", 2**12 + 1),
        ("num_experts_per_tok", 129),
        ("num_experts_per_tok", 0),
        ("moe_intermediate_size", 64.0),
        ("decoder_sparse_step", 0),
        ("norm_topk_prob", "true"),
        ("mlp_only_layers", 3),
        ("mlp_only_layers", [0, "1"]),
    ],
)
def test_impossible_experts_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"config.json: {name} must be"):
        ModelConfig.from_dict("config.json", MOE | {name: value})


def windows(architecture, **changes):
    shape = SMALL | {"architectures": [f"{architecture}ForCausalLM"], "num_hidden_layers": 3}
    return ModelConfig.from_dict("config.json", shape | changes)


TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    "architecture, changes, expected",
    [
        ("Llama", {"sliding_window": 7}, (0, 0, 0)),
        ("Mistral", {}, (4096, 4096, 4096)),  # what a file that says nothing means
        ("Mistral", {"sliding_window": None}, (0, 0, 0)),
        ("Mistral", {"sliding_window": 7}, (7, 7, 7)),
        ("Qwen2", {"sliding_window": 7, "max_window_layers": 1}, (0, 0, 0)),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}, (0, 7, 7)),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 7}, (0, 0, 0)),  # from layer 28 on
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 7, "layer_types": TYPES}, (7, 0, 7)),
        ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}, (7, 7, 7)),
        ("Gemma3", {"sliding_window": 7, "sliding_window_pattern": 2}, (7, 0, 7)),
        ("Gemma3", {"layer_types": TYPES}, (4096, 0, 4096)),
    ],
)
def test_which_layers_have_a_window_is_read_in_every_spelling(architecture, changes, expected):
    assert windows(architecture, **changes).windows == expected


def test_a_window_as_long_as_the_context_is_none():
    config = windows("Mistral", max_position_embeddings=5000)
    assert (config.context_limit, config.window(0), config.tokens_in_reach) == (5000, 4096, 4096)
    config = dataclasses.replace(config, max_model_len=4096)
    assert (config.window(0), config.tokens_in_reach) == (0, 0)
    mixed = windows("Gemma3", sliding_window=7, sliding_window_pattern=2)
    assert (mixed.window(0), mixed.window(1), mixed.tokens_in_reach) == (7, 0, 0)


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"sliding_window": 0}, "sliding_window"),
        ({"sliding_window": "all"}, "sliding_window"),
        ({"sliding_window": 64.0}, "sliding_window"),
        ({"sliding_window_pattern": "6"}, "sliding_window_pattern"),
        ({"layer_types": TYPES[:2]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ({"layer_types": [["full_attention"]] * 3}, "layer_types"),
        ({"sliding_window": None, "layer_types": TYPES}, "layer_types"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"rope_local_base_freq": 0}, "rope_theta"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "magic"}}}, "magic"),
        ({"rope_parameters": {"sliding_attention": {}, "full_attention": 7}}, "full_attention"),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": {}}}}, "rope_theta"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
    ],
    ids=str,
)
def test_what_makes_no_windows_is_refused_by_name(changes, name):
    with pytest.raises(ValueError, match=f"config.json: .*{name}"):
        windows("Gemma3", **changes)


def test_layers_with_a_window_have_rotary_settings_of_their_own():
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": scaling}
    by_kind = {"full_attention": scaling | {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 2e4}}
    for spelled in (old, {"rope_parameters": by_kind}):
        config = windows("Gemma3", **spelled)
        everywhere, local = config.rope_parameters, config.local_rope_parameters
        assert (everywhere["rope_theta"], everywhere["factor"]) == (5e5, 8.0)
        assert (local["rope_theta"], local["rope_type"]) == (2e4, "default")
    config = windows("Gemma3")
    assert (config.rope_parameters["rope_theta"], config.local_rope_parameters["rope_theta"]) == (1e6, 1e4)


numbers = st.sampled_from([1e-6, 0.5, 1, 2, 2.0000001, 1e4, 2**24, 1e15]) | st.floats(1e-6, 1e15)


@settings(deadline=None, max_examples=300)
@given(
    rope_type=st.sampled_from([*ROPE_TYPES]), chosen=st.dictionaries(st.sampled_from(ROPE_NUMBERS), numbers)
)
def test_rotary_settings_are_refused_or_make_finite_tables(rope_type, chosen):
    rope = {"rope_type": rope_type, "factors": [0.5] * 8, "factor": 2.0, **chosen}
    try:
        config = ModelConfig.from_dict("config.json", SMALL | {"rope_parameters": rope})
    except ValueError as error:
        assert str(error).startswith("config.json: ")
        return
    table = get_rope(config.head_dim, min(config.context_limit, 100), config.rope_parameters).cos_sin_cache
    assert table.isfinite().all()


# Config


def test_nothing_can_be_set_in_a_checked_config(tmp_path):
    config = Config("a model", device="cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_num_seqs = 0
    with LLM(str(make_checkpoint(tmp_path)), **EXACT, num_kvcache_blocks=8) as llm:
        with pytest.raises(dataclasses.FrozenInstanceError):
            llm.config.eos = 3


def test_a_checkpoint_completes_a_config_and_leaves_the_first_one_alone(tmp_path):
    config = Config("a model", device="cpu", max_model_len=100)
    complete = config.with_checkpoint(open_checkpoint(make_checkpoint(tmp_path)))
    assert (config.model, config.hf_config, config.max_model_len) == ("a model", None, 100)
    assert (complete.model, complete.max_model_len) == (str(tmp_path), 100)
    assert (complete.hf_config.max_model_len, complete.hf_config.context_limit) == (100, 512)


def test_a_config_that_is_filled_in_asks_no_device_again(tmp_path, monkeypatch):
    """In a forked process the answer would be that there is none."""
    config = Config("a model", device="cpu").with_checkpoint(open_checkpoint(make_checkpoint(tmp_path)))
    monkeypatch.setattr(Config, "_resolve_device", lambda _: pytest.fail("asked for devices"))
    assert dataclasses.replace(config, max_num_batched_tokens=16).max_num_batched_tokens == 16


# Opened checkpoints


def test_a_process_opens_its_checkpoint_once(tmp_path, monkeypatch):
    opened, init = [], FolderCheckpoint.__init__
    monkeypatch.setattr(FolderCheckpoint, "__init__", lambda self, *a: opened.append(a) or init(self, *a))
    with LLM(str(make_checkpoint(tmp_path)), **EXACT, num_kvcache_blocks=8):
        assert len(opened) == 1


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_an_opened_checkpoint_can_be_sent_to_another_process(tmp_path, kind):
    folder = make_checkpoint(tmp_path)
    sent = pickle.dumps(open_checkpoint(write_gguf(folder) if kind == "gguf" else folder))
    assert len(sent) < 2000
    checkpoint = pickle.loads(sent)
    assert type(checkpoint) is (GGUFCheckpoint if kind == "gguf" else FolderCheckpoint)
    model = build_model(folder)
    load_model(model, checkpoint)
    assert_same_parameters(model, expected_parameters(folder))
