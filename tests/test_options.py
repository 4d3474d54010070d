"""Options that scripts for other engines pass: what they do here, or what is said of them."""

import asyncio
import functools
import inspect
import io
import pydoc
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from forked_ranks import forked_ranks  # noqa: F401
from open_checkpoints import open_checkpoint
from tqdm import tqdm

from nanovllm import LLM, AsyncLLM, EngineArgs, SamplingParams
from nanovllm.config import Config
from nanovllm.extensions.api.engine_args import command_line_options
from nanovllm.extensions.api.foreign_options import FILLED_IN, NEUTRAL, REFUSED, WITHOUT_EFFECT, make_config
from nanovllm.extensions.safety.options import ExtendedConfig
from tiny_checkpoints import EXACT, edit_json, make_checkpoint, one_thread, spell_rope  # noqa: F401

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
    usual = dict(tokenizer_mode="auto", pipeline_parallel_size=1, hf_token=None, worker_use_ray=None)
    with pytest.warns(UserWarning) as said, LLM(folder, **OPTIONS, **usual, **options) as llm:
        assert len(tokens(llm)) == 4
    assert [str(each.message) for each in said] == ["options without effect: " + ", ".join(options)]
    assert said[0].filename == __file__


TAKES_FOREIGN = [
    lambda **options: make_config("a model", options),
    SamplingParams,
    functools.partial(EngineArgs, "a model"),
]


@pytest.mark.parametrize("take", TAKES_FOREIGN, ids=["LLM", "SamplingParams", "EngineArgs"])
def test_an_option_that_would_change_results_is_refused_with_what_to_do(take):
    for name, remedy in REFUSED.items():
        neutral = NEUTRAL.get(name)
        told = re.escape(f"{name}='something' is not offered: {remedy}")
        with pytest.raises(ValueError, match=told):
            take(**{name: "something"})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for value in (None, *(neutral if isinstance(neutral, tuple) else [neutral])):
                take(**{name: value})
    for name in WITHOUT_EFFECT:
        with pytest.warns(UserWarning, match=f"^options without effect: {name}$") as said:
            assert take(**{name: "something"}) == take()
        assert len(said) == 1


def test_a_number_is_not_taken_for_a_flag():
    with pytest.raises(ValueError, match="enable_lora=0"):
        make_config("a model", {"enable_lora": 0})


def test_no_foreign_option_is_one_of_this_engine_and_none_stands_twice():
    own = {*Config.__dataclass_fields__, *SamplingParams.__struct_fields__}
    assert not own & {*WITHOUT_EFFECT, *REFUSED}
    assert len({*WITHOUT_EFFECT, *REFUSED}) == len(WITHOUT_EFFECT) + len(REFUSED)


@pytest.mark.parametrize("name", ["kernels", "x" * 100, "logits_processor_pattern"])
def test_an_unknown_option_has_no_neighbour_that_is_none(name):
    with pytest.raises(TypeError, match=f"unknown option '{name}'; known ones: model, .*, extensions$"):
        make_config("a model", {name: 1})


@pytest.mark.parametrize(
    "name, told",
    [
        ("max_new_tokens", "'max_tokens'"),
        ("temprature", "'temperature'"),
        ("penalty", "'presence_penalty'|'repetition_penalty'|known ones: temperature, max_tokens, "),
    ],
)
def test_a_wrong_name_of_a_sampling_parameter_gets_one_like_it(name, told):
    with pytest.raises(TypeError, match=f"unknown option '{name}'; .*({told})"):
        SamplingParams(**{name: 1})


# --- calls ---


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **OPTIONS, enable_prefix_caching=False) as llm:
        yield llm


CHAT = [{"role": "user", "content": "hello"}]
CALLS: dict[str, Callable] = {
    "generate": lambda llm, **options: llm.generate("hello", GREEDY, **options),
    "generate_iter": lambda llm, **options: [
        result for _, result in llm.generate_iter("hello", GREEDY, **options)
    ],
    "chat": lambda llm, **options: llm.chat(CHAT, GREEDY, **options),
    "stream": lambda llm, **options: list(llm.stream("hello", GREEDY, **options)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_takes_the_options_of_vllm(llm, call):
    expected = CALLS[call](llm)
    usual = dict(lora_request=None, tokenization_kwargs={}, guided_options_request=None, priority=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CALLS[call](llm, **usual) == expected
    with pytest.warns(UserWarning, match="^options without effect: priority$") as said:
        assert CALLS[call](llm, priority=[1]) == expected
    assert said[0].filename == __file__
    with pytest.raises(ValueError, match="lora_request='x' is not offered: LLM.model, lora="):
        CALLS[call](llm, lora_request="x")
    with pytest.raises(TypeError, match=r"sampling parameter: pass SamplingParams\(temperature=0\)"):
        CALLS[call](llm, temperature=0)
    with pytest.raises(TypeError, match="unknown option 'sampling_parms'; .* 'sampling_params'"):
        CALLS[call](llm, sampling_parms=GREEDY)
    assert llm.is_finished() and CALLS[call](llm) == expected


def test_an_engine_for_tasks_takes_the_options_of_vllm(folder):
    with AsyncLLM(folder, **OPTIONS) as engine:
        result = asyncio.run(engine.generate("hello", GREEDY, "a", lora_request=None, trace_headers=None))
        assert result.request_id == "a" and len(result["token_ids"]) == 4
        with pytest.raises(TypeError, match=r"pass SamplingParams\(max_tokens=3\)"):
            engine.generate("hello", max_tokens=3)
        with pytest.raises(AttributeError, match="'AsyncLLM' object has no attribute 'sleep': llm.exit"):
            engine.sleep()


def test_a_sampling_parameter_is_no_option_of_the_engine():
    with pytest.raises(TypeError, match=r"pass SamplingParams\(temperature=0\)"):
        make_config("a model", {"temperature": 0})


@pytest.mark.parametrize("call", ["generate", "chat", "score"])
def test_the_progress_bar_may_be_the_callers_own(llm, call):
    written, bars = io.StringIO(), []

    def make_bar(**options) -> tqdm:
        bars.append(tqdm(**options, file=written))
        return bars[0]

    prompts = [CHAT] * 3 if call == "chat" else ["hello"] * 3
    params = [] if call == "score" else [GREEDY]
    assert len(getattr(llm, call)(prompts, *params, use_tqdm=make_bar)) == 3
    assert "3/3" in written.getvalue() and "Decode" in written.getvalue()
    assert [(bar.n, bar.total, bar.disable) for bar in bars] == [(3, 3, True)]  # closed


@pytest.mark.parametrize("name", ["awq", "gptq_marlin", "compressed-tensors", "bitsandbytes"])
def test_the_format_of_quantised_weights_is_not_to_be_said(name):
    with pytest.raises(
        ValueError, match=f"quantization='{name}' is to be left out: .* found in the checkpoint"
    ):
        ExtendedConfig("a model", quantization=name)


# --- where they are told ---


@pytest.mark.parametrize("engine", [LLM, AsyncLLM])
def test_help_and_completion_show_every_option_with_its_default(engine):
    first, *shown = inspect.signature(engine).parameters.values()
    known = [(f.name, f.default) for f in fields(Config) if f.name not in (*FILLED_IN, "model")]
    assert (first.name, first.default) == ("model", inspect.Parameter.empty)
    assert [(each.name, each.default) for each in shown] == known
    assert {each.kind for each in shown} == {inspect.Parameter.KEYWORD_ONLY}
    told = pydoc.plain(pydoc.render_doc(engine))
    assert "kvcache_block_size: int = 256" in told and "tokens per KV cache block, a multiple of 16" in told

    class Narrow(engine):
        def __init__(self, model):
            super().__init__(model, device="cpu")

    assert list(inspect.signature(Narrow).parameters) == ["model"]


def test_a_command_line_says_what_every_option_means():
    for name, (_, text) in command_line_options().items():
        meaning, default = text.removesuffix(")").split(" (default: ")
        assert len(meaning) > 10 and default == str(getattr(Config, name)), name
    assert command_line_options()["max_model_len"][1].endswith("limit, which None stands for (default: 4096)")


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
    assert getattr(ExtendedConfig("a model", device="cpu", **{name: value}), name) == meant


def test_a_dtype_of_torch_that_cannot_be_used_is_refused():
    with pytest.raises(ValueError, match="dtype must be one of .* got 'float64'"):
        ExtendedConfig("a model", dtype=torch.float64)


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
        ("owner/model", {"revision": "v2", **hub}),  # the weights, once the index is there
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


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    "overrides", [{"rope_scaling": YARN}, {"rope_theta": 500.0}, {"rope_scaling": YARN, "rope_theta": 500.0}]
)
def test_rotary_settings_may_be_overridden_however_the_file_spells_them(
    tmp_path, folder, spelling, overrides
):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    spell_rope(tmp_path, spelling)
    found = open_checkpoint(tmp_path, hf_overrides=overrides).hf_config()
    assert found.rope_parameters["rope_theta"] == overrides.get("rope_theta", 10000.0)
    assert found.context_limit == (2048 if "rope_scaling" in overrides else 512)


def test_rotary_settings_of_layers_with_a_window_are_not_those_that_are_overridden(tmp_path):
    folder = make_checkpoint(tmp_path, "gemma3", tokenizer=False)
    kinds = {
        f"{kind}_attention": {"rope_type": "default", "rope_theta": 777.0} for kind in ("full", "sliding")
    }
    edit_json(folder / "config.json", rope_parameters=kinds)
    found = open_checkpoint(folder, hf_overrides={"rope_scaling": YARN, "rope_theta": 500.0}).hf_config()
    assert found.rope_parameters["rope_theta"] == 500.0 and found.context_limit == 2048
    assert found.local_rope_parameters["rope_theta"] == 777.0
    with pytest.raises(ValueError, match="hf_overrides: rope_scaling must be an object, got 'yarn'"):
        open_checkpoint(folder, hf_overrides={"rope_scaling": "yarn"})


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
        ExtendedConfig("a model", **option)
