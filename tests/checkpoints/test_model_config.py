"""ModelConfig: what passes its checks makes a model of finite numbers, and nobody changes it afterwards."""

import dataclasses
import json
import math
import pickle

import pytest
import torch
from engines import Core
from gguf_files import write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from loaded_models import assert_same_parameters, build_model, expected_parameters
from open_checkpoints import open_checkpoint
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.assembly import MODELS, get_model_class, read_config
from nanovllm.checkpoints.folder import INDEX, FolderCheckpoint
from nanovllm.checkpoints.model_config import ModelConfig
from nanovllm.config import CHECKS, Config
from nanovllm.extensions.checkpoints.gguf import GGUFCheckpoint
from nanovllm.extensions.checkpoints.untrusted import CheckedFolder
from nanovllm.extensions.models.config import DecoderConfig
from nanovllm.extensions.models.rope import ROPE_NUMBERS, ROPE_TYPES
from nanovllm.extensions.safety.options import ExtendedConfig
from nanovllm.extensions.transformers.config import transformers_config
from nanovllm.layers.rotary_embedding import get_rope
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


@pytest.mark.parametrize("name", MODELS)
def test_every_known_architecture_has_a_model(name):
    own = {"architectures": ["Unknown", name], "num_key_value_heads": 4}
    config = read_config("config.json", SMALL | own)
    assert config.architectures == [name]
    assert get_model_class(config).__name__ == name


def test_settings_can_be_read_by_their_names_and_not_be_set():
    config = read_config("config.json", SMALL | {"rms_norm_eps": 1e-5})
    assert (config.hidden_size, config.num_key_value_heads, config.head_dim) == (64, 4, 16)
    assert config.rms_norm_eps == 1e-5 and config.raw["rms_norm_eps"] == 1e-5
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 65


def test_another_architecture_is_named_even_where_its_sizes_have_other_names():
    with pytest.raises(
        ValueError, match="config.json: architecture 'GPT2LMHeadModel' of model type None is not"
    ):
        read_config("config.json", {"architectures": ["GPT2LMHeadModel"], "n_embd": 768})


MOE = SMALL | {"architectures": ["Qwen3MoeForCausalLM"]}


def test_the_number_of_experts_is_read_in_both_spellings():
    for name in ("num_experts", "num_local_experts"):
        assert read_config("config.json", MOE | {name: 9}).experts.num_experts == 9


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
        read_config("config.json", MOE | {name: value})


def windows(architecture, **changes):
    shape = SMALL | {"architectures": [f"{architecture}ForCausalLM"], "num_hidden_layers": 3}
    return read_config("config.json", shape | changes)


TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    "architecture, changes, expected",
    [
        ("Llama", {"sliding_window": 7}, (0, 0, 0)),
        ("Mistral", {}, (4096, 4096, 4096)),  # what a file that says nothing means
        ("Mistral", {"sliding_window": None}, (0, 0, 0)),
        ("Mistral", {"sliding_window": 7}, (7, 7, 7)),
        ("Mistral", {"use_sliding_window": False, "sliding_window": 7}, (7, 7, 7)),  # a field of Qwen's
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


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
# As transformers is asked for the same model.
QWEN3 = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=16, num_key_value_heads=4)


def with_scaling(model_impl: str = "auto", **scaling) -> DecoderConfig:
    return read_config("config.json", SMALL | QWEN3 | {"rope_scaling": scaling}, model_impl)


def rotations(config: DecoderConfig) -> torch.Tensor:
    return get_rope(config.head_dim, 8, config.rope_parameters).cos_sin_cache


@pytest.mark.parametrize(
    "others, own", [({}, 1 + 0.1 * math.log(4)), ({"mscale": 3, "mscale_all_dim": 3}, 1)]
)
def test_yarns_own_factor_is_multiplied_by_attn_factor(others, own):
    """As in DeepSeek-R1-0528-Qwen3-8B, where the product is 1."""
    scaling = YARN | others | {"attn_factor": 1 / own}
    expected = rotations(with_scaling(**YARN, attention_factor=1.0))
    torch.testing.assert_close(rotations(with_scaling(**scaling)), expected)
    raw = with_scaling("transformers", **scaling).raw
    assert transformers_config(raw).rope_parameters["attention_factor"] == pytest.approx(1.0)
    assert raw["rope_scaling"] == scaling  # the file's own


PUBLISHED = [
    {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16, "finetuned": True},
    {"type": "default", "rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True},
    {**YARN, "attention_factor": None, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    {**YARN, "extrapolation_factor": 1, "apply_yarn_scaling": True},
    {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0},
]


@pytest.mark.parametrize("scaling", PUBLISHED, ids=str)
@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_rotary_settings_that_change_nothing_are_no_error(scaling, model_impl):
    assert with_scaling(model_impl, **scaling).max_position_embeddings == 64


@pytest.mark.parametrize(
    "scaling, message",
    [
        (
            {"llama_4_scaling_beta": 0.1},
            "rotary setting 'llama_4_scaling_beta' is not known; known ones: .*attn_factor",
        ),
        ({"scale": 2.0, "attention": 7}, "rotary setting 'attention' is not known"),
        ({"attn_factor": 0.8, "attention_factor": 0.8}, "attn_factor, .*, and attention_factor, .* exclude"),
        ({"attn_factor": "0.8"}, "attn_factor must be .*number from .* got '0.8'"),
        ({"attn_factor": 0}, "attn_factor must be .*number from .* got 0"),
        ({"extrapolation_factor": 0.5}, "extrapolation_factor = 0.5 is not supported, only 1"),
        ({"apply_yarn_scaling": False}, "apply_yarn_scaling = False is not supported, only True"),
    ],
    ids=str,
)
@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_rotary_settings_that_nobody_would_honour_are_refused_by_name(scaling, message, model_impl):
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        with_scaling(model_impl, **YARN, **scaling)


def test_attn_factor_through_transformers_is_for_yarn_alone():
    with pytest.raises(
        ValueError, match="attn_factor is for rope_type 'yarn' in all layers alike, got 'linear'"
    ):
        with_scaling("transformers", rope_type="linear", factor=2.0, attn_factor=0.8)


numbers = st.sampled_from([1e-6, 0.5, 1, 2, 2.0000001, 1e4, 2**24, 1e15]) | st.floats(1e-6, 1e15)


@settings(deadline=None, max_examples=300)
@given(
    rope_type=st.sampled_from([*ROPE_TYPES]), chosen=st.dictionaries(st.sampled_from(ROPE_NUMBERS), numbers)
)
def test_rotary_settings_are_refused_or_make_finite_tables(rope_type, chosen):
    rope = {"rope_type": rope_type, "factors": [0.5] * 8, "factor": 2.0, **chosen}
    try:
        config = read_config("config.json", SMALL | {"rope_parameters": rope})
    except ValueError as error:
        assert str(error).startswith("config.json: ")
        return
    table = get_rope(config.head_dim, min(config.context_limit, 100), config.rope_parameters).cos_sin_cache
    assert table.isfinite().all()


# The core alone, which knows Qwen3


def core_config(**changes) -> ModelConfig:
    return ModelConfig.from_dict("config.json", SMALL | QWEN3 | changes)


@pytest.mark.parametrize("spelled", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}], ids=str)
def test_the_core_reads_of_qwen3_what_all_readers_read(spelled):
    settings = {
        "attention_bias": True,
        "torch_dtype": "bfloat16",
        "layer_types": ["full_attention"],
        **spelled,
    }
    ours, theirs = core_config(**settings), read_config("config.json", SMALL | QWEN3 | settings)
    assert type(ours) is ModelConfig and ours.rope_parameters["rope_theta"] == 5e5
    for name in {*ours.__dataclass_fields__} - {"rope_parameters"}:
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("divided_sizes", "tokens_in_reach"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert [ours.usual_dtype(device) for device in ("cpu", "cuda")] == ["float32", "bfloat16"]
    torch.testing.assert_close(rotations(ours), rotations(theirs))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures must be \['Qwen3ForCausalLM'\]"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        ({"layer_types": ["sliding_attention"]}, "layer_types = "),
        ({"rope_scaling": YARN}, "rope_scaling = .* is not supported"),
        ({"rope_parameters": YARN}, "rope_parameters must be of rope_type"),
        ({"rope_parameters": {}}, "rope_theta must be a number"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = .* is not supported"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide"),
    ],
    ids=str,
)
def test_the_core_refuses_by_name_what_only_extensions_read(changes, message):
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        core_config(**changes)


def test_the_core_opens_folders_by_itself(tmp_path):
    folder = make_checkpoint(tmp_path)
    checkpoint = FolderCheckpoint(str(folder))
    tokenizer = checkpoint.tokenizer()
    assert type(checkpoint.hf_config()) is ModelConfig and tokenizer.decode(tokenizer.encode("ab")) == "ab"
    model = build_model(folder)
    load_model(model, folder)
    assert_same_parameters(model, expected_parameters(folder))
    for name in ("../config.json", "/etc/hostname", "nothing.safetensors"):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(ValueError, match=f"{name}' is missing, or is not a file in the folder"):
            checkpoint.shards()


def test_the_core_reads_a_tied_weight_that_is_stored_under_both_of_its_names(tmp_path):
    folder = make_checkpoint(tmp_path, tie_word_embeddings=True)
    model, file = build_model(folder), folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    load_model(model, FolderCheckpoint(str(folder)))
    assert_same_parameters(model, expected_parameters(folder))


# Config


def test_options_that_nobody_knows_are_refused_by_name():
    for engine in (LLM, Core):
        with pytest.raises(TypeError, match="'max_seqs'"):
            engine("a model", max_seqs=1)
    with pytest.raises(TypeError, match="eos is no option"):
        LLM("a model", eos=1)


def test_an_option_that_no_part_serves_must_be_left_alone():
    assert Config("a model", device="cpu").lora is None
    with pytest.raises(ValueError, match="lora must be None: no part of this engine serves it"):
        Config("a model", device="cpu", lora="an adapter")


@pytest.mark.parametrize(
    "option", [{"load_format": "gguf"}, {"kv_cache_dtype": "int8"}, {"quantization": "fp8"}], ids=str
)
def test_the_core_refuses_what_extensions_serve_also_where_there_are_some(tmp_path, option):
    [(name, value)] = option.items()
    with pytest.raises(ValueError, match=name):
        Core(str(make_checkpoint(tmp_path)), device="cpu", **option)
    assert getattr(ExtendedConfig("a model", device="cpu", **option), name) == value


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
    monkeypatch.setitem(CHECKS, "device", lambda *_: pytest.fail("asked for devices"))
    assert dataclasses.replace(config, max_num_batched_tokens=16).max_num_batched_tokens == 16


# Opened checkpoints


def test_a_process_opens_its_checkpoint_once(tmp_path, monkeypatch):
    opened, init = [], CheckedFolder.__init__
    monkeypatch.setattr(CheckedFolder, "__init__", lambda self, *a: opened.append(a) or init(self, *a))
    with LLM(str(make_checkpoint(tmp_path)), **EXACT, num_kvcache_blocks=8):
        assert len(opened) == 1


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_an_opened_checkpoint_can_be_sent_to_another_process(tmp_path, kind):
    folder = make_checkpoint(tmp_path)
    sent = pickle.dumps(open_checkpoint(write_gguf(folder) if kind == "gguf" else folder))
    assert len(sent) < 2000
    checkpoint = pickle.loads(sent)
    assert type(checkpoint) is (GGUFCheckpoint if kind == "gguf" else CheckedFolder)
    model = build_model(folder)
    load_model(model, checkpoint)
    assert_same_parameters(model, expected_parameters(folder))
