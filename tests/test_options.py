"""Options of `LLM` that scripts for other engines pass: what they do here, or what is said of them."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.foreign_options import REFUSED, WITHOUT_EFFECT
from tiny_checkpoints import EXACT, edit_json, make_checkpoint, one_thread  # noqa: F401

OPTIONS = dict(**EXACT, num_kvcache_blocks=40)
GREEDY = SamplingParams(0, 4, True)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=1, vocab_size=257)


def tokens(llm: LLM) -> list[int]:
    return llm.generate("hello", GREEDY, use_tqdm=False)[0]["token_ids"]


# --- without effect, or refused ---


def test_options_without_effect_are_named_in_one_line(folder):
    options = dict(trust_remote_code=True, swap_space=4, disable_log_stats=True, enable_chunked_prefill=False)
    options |= dict(
        tokenizer_mode="auto", pipeline_parallel_size=1, hf_token=None, guided_decoding_backend="auto"
    )
    with pytest.warns(UserWarning) as said, LLM(folder, **OPTIONS, **options) as llm:
        assert len(tokens(llm)) == 4
    assert [str(each.message) for each in said] == ["options without effect: " + ", ".join(options)]
    assert said[0].filename == __file__


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_would_change_results_is_refused_with_what_to_do(name):
    with pytest.raises(ValueError, match=f"{name}='something' is not offered: .*{REFUSED[name][1][:20]}"):
        Config.from_options("a model", {name: "something"})
    allowed, remedy = REFUSED[name]
    assert len(remedy) > 10
    for value in (None, *allowed):
        with pytest.warns(UserWarning, match=f"options without effect: {name}$"):
            Config.from_options("a model", {name: value})


def test_a_number_is_not_taken_for_a_flag():
    with pytest.raises(ValueError, match="enable_lora=0"):
        Config.from_options("a model", {"enable_lora": 0})


def test_no_foreign_option_is_one_of_this_engine_and_none_stands_twice():
    own = {*Config.__dataclass_fields__}
    assert not own & {*WITHOUT_EFFECT, *REFUSED}
    assert len({*WITHOUT_EFFECT, *REFUSED}) == len(WITHOUT_EFFECT) + len(REFUSED)


@pytest.mark.parametrize("name", ["kernels", "x" * 100, "logits_processor_pattern"])
def test_an_unknown_option_has_no_neighbour_that_is_none(name):
    with pytest.raises(TypeError, match=f"unknown option '{name}'; known ones: model, .*, token$"):
        Config.from_options("a model", {name: 1})


@pytest.mark.parametrize("name", ["awq", "gptq_marlin", "compressed-tensors"])
def test_the_format_of_quantised_weights_is_not_to_be_said(name):
    with pytest.raises(
        ValueError, match=f"quantization='{name}' is to be left out: .* found in the checkpoint"
    ):
        Config("a model", quantization=name)


# --- dtype, max_model_len ---


@pytest.mark.parametrize("name", ["dtype", "kv_cache_dtype"])
@pytest.mark.parametrize(
    "value, meant",
    [
        (torch.bfloat16, "bfloat16"),
        (torch.float16, "float16"),
        (torch.float32, "float32"),
        ("half", "float16"),
        ("float", "float32"),
    ],
    ids=str,
)
def test_dtypes_have_other_names(name, value, meant):
    assert getattr(Config("a model", device="cpu", **{name: value}), name) == meant


def test_a_dtype_of_torch_that_cannot_be_used_is_refused():
    with pytest.raises(ValueError, match="dtype must be one of .* got 'float64'"):
        Config("a model", dtype=torch.float64)


@pytest.mark.parametrize(
    "given, used", [({}, 512), ({"max_model_len": None}, 512), ({"max_model_len": 100}, 100)]
)
def test_the_checkpoint_limits_the_context_in_silence(folder, given, used):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LLM(folder, **OPTIONS, **given) as llm:
            assert llm.config.max_model_len == used


def test_none_is_all_of_a_long_context(tmp_path):
    folder = make_checkpoint(tmp_path, max_position_embeddings=6000)
    for given, used in ((None, 6000), (4096, 4096)):
        with LLM(folder, **EXACT, num_kvcache_blocks=400, max_model_len=given) as llm:
            assert llm.config.max_model_len == used


@pytest.mark.parametrize("asked", [513, 4096])
def test_a_longer_context_than_the_checkpoints_is_said_to_be_cut(folder, asked):
    message = f"max_model_len={asked} is cut to 512, which is the checkpoint's own limit"
    with pytest.warns(UserWarning, match=message) as said, LLM(folder, **OPTIONS, max_model_len=asked) as llm:
        assert llm.config.max_model_len == 512
    assert len(said) == 1 and said[0].filename == __file__


# --- where the tokenizer and the files come from ---


@pytest.fixture
def bare(tmp_path, folder) -> Path:
    """The checkpoint without its tokenizer."""
    kept = (file for file in folder.iterdir() if file.name not in TOKENIZER)
    (tmp_path / "bare").mkdir()
    for file in kept:
        shutil.copy(file, tmp_path / "bare")
    return tmp_path / "bare"


@pytest.mark.parametrize("has_config", [False, True])
def test_the_tokenizer_may_be_elsewhere(tmp_path, folder, bare, has_config):
    other = tmp_path / "tokenizer"
    other.mkdir()
    for name in (*TOKENIZER, *["config.json"] * has_config):
        shutil.copy(folder / name, other)
    with LLM(bare, **OPTIONS, tokenizer=other) as llm, LLM(folder, **OPTIONS, tokenizer=folder) as usual:
        assert tokens(llm) == tokens(usual)


def test_a_place_without_a_tokenizer_is_refused(tmp_path, folder, bare):
    with pytest.raises(ValueError, match="tokenizer: .*bare has none of tokenizer.json"):
        LLM(folder, **OPTIONS, tokenizer=bare)
    with pytest.raises(ValueError, match="tokenizer: .*'missing'.* there is no such folder"):
        LLM(folder, **OPTIONS, tokenizer="missing")


def test_a_hub_id_is_asked_for_with_revision_folder_and_token(folder, bare, monkeypatch):
    asked = []

    def fetch(name, **options):
        asked.append((name, {key: options.get(key) for key in ("revision", "cache_dir", "token")}))
        return str(bare if name == "owner/model" else folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    options = dict(revision="v2", download_dir="/cache", token="secret", tokenizer="owner/tokenizer")
    with LLM("owner/model", **OPTIONS, **options) as llm:
        assert len(tokens(llm)) == 4
        assert "secret" not in repr(llm.config)
    hub = {"cache_dir": "/cache", "token": "secret"}
    assert asked == [
        ("owner/model", {"revision": "v2", **hub}),
        ("owner/tokenizer", {"revision": None, **hub}),
    ]


def test_overrides_are_read_as_if_config_json_had_them(tmp_path, folder):
    edited = tmp_path / "edited"
    shutil.copytree(folder, edited)
    overrides = {"rope_theta": 500.0, "rope_parameters": None, "max_position_embeddings": 100}
    edit_json(edited / "config.json", **overrides)
    with LLM(folder, **OPTIONS, hf_overrides=overrides) as llm, LLM(edited, **OPTIONS) as expected:
        assert llm.config.max_model_len == 100
        assert tokens(llm) == tokens(expected)
        with LLM(folder, **OPTIONS, hf_overrides=overrides, tensor_parallel_size=2) as two:
            assert tokens(two) == tokens(expected)


def test_overrides_need_a_config_json():
    with pytest.raises(
        ValueError, match="hf_overrides are for config.json, which 'qwen3-0.6b' does not have"
    ):
        LLM("qwen3-0.6b", load_format="dummy", device="cpu", hf_overrides={"num_hidden_layers": 1})


@pytest.mark.parametrize(
    "option",
    [dict(tokenizer=5), dict(hf_overrides=str), dict(revision=1), dict(download_dir=b"x"), dict(token=3)],
)
def test_the_new_options_have_types(option):
    [(name, value)] = option.items()
    with pytest.raises(ValueError, match=f"{name} must be None or .*, got {value!r}"):
        Config("a model", **option)
