"""What goes wrong goes wrong well (design.md section 7): refused by name, before any change, and survived.

Every test that breaks something asks the same engine afterwards for completions that are known.
"""

import contextlib
import gc
import json
import math
import random
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from block_pool import check_pool

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.int8_cache.layout import Int8Layout
from nanovllm.extensions.models.attention_rule import AttentionRule
from nanovllm.extensions.safety.options import ExtendedConfig
from nanovllm.kernels.kv_store import CacheLayout
from nanovllm.layers import attention
from tiny_checkpoints import (
    EXACT,
    assert_greedy,
    edit_json,
    load_reference,
    make_checkpoint,
    one_thread,  # noqa: F401
)

VOCAB = 320
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [[1, 2, 3], list(range(50)), [7] * 33, list(range(50))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=1, num_hidden_layers=1)
    return SimpleNamespace(folder=str(folder), reference=load_reference(folder))


@pytest.fixture(scope="module")
def shared_engine(model):
    with LLM(model.folder, **EXACT, num_kvcache_blocks=20, max_num_batched_tokens=40) as llm:
        yield llm


@pytest.fixture
def llm(shared_engine, model):
    """An engine that must be empty and right after the test, whatever happened in it."""
    yield shared_engine
    assert_sound(shared_engine, model)


def assert_empty(llm: LLM) -> None:
    assert llm.is_finished()
    assert not llm.scheduler.waiting and not llm.scheduler.running
    check_pool(llm.scheduler.block_manager, [])


def assert_sound(llm: LLM, model) -> None:
    assert_empty(llm)
    results = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert len(result["token_ids"]) == 24
        assert_greedy(model.reference, prompt, result["token_ids"])
    assert_empty(llm)


BAD_PROMPTS = {
    "empty list": ([], "empty"),
    "id at the end of the vocabulary": ([1, VOCAB], str(VOCAB)),
    "huge id": ([1, 10**30], str(10**30)),
    "negative id": ([1, -1], "-1"),
    "bool": ([1, True], "True"),
    "float": ([1, 2.0], "2.0"),
    "NaN": ([1, math.nan], "nan"),
    "string among ids": ([1, "a"], "a"),
    "None among ids": ([None], "None"),
    "None": (None, "None"),
    "number": (5.5, "5.5"),
    "bytes": (b"abc", "abc"),
    "dict": ({"text": "a"}, "text"),
    "nested": ([[1, 2]], "1, 2"),
    "too long": ([1] * 512, "512"),
    "too long for the pool": ([1] * 321, "321"),
    "far too long": ([1] * 5000, "5000"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_by_its_value(llm, name):
    prompt, shown = BAD_PROMPTS[name]
    for prompts in ([prompt], [[1, 2], prompt, [3]]):
        with pytest.raises(ValueError, match=re.escape(shown)):
            llm.generate(prompts, GREEDY, use_tqdm=False)
        assert_empty(llm)
    with pytest.raises(ValueError, match=re.escape(shown)):
        llm.add_request(prompt, GREEDY)
    assert_empty(llm)


def test_the_bad_one_of_many_prompts_is_named(llm):
    with pytest.raises(ValueError, match=r"\b2\b"):
        llm.generate([[1], [2], [], [3]], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=r"\b3\b.*999"):
        llm.generate([[1], [2], [4], [999]], GREEDY, use_tqdm=False)


def test_an_empty_string_is_refused_or_is_what_the_tokenizer_makes_of_it(llm):
    assert llm.tokenizer.encode("") == []
    with pytest.raises(ValueError, match="empty"):
        llm.generate([""], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="empty"):
        llm.generate("", GREEDY, use_tqdm=False)


@pytest.mark.parametrize("prompts", [None, 5, 1.5, {"a": 1}, b"abc", object], ids=repr)
def test_prompts_of_a_wrong_type_are_refused(llm, prompts):
    with pytest.raises(ValueError, match="prompt"):
        llm.generate(prompts, GREEDY, use_tqdm=False)


def test_no_prompts_give_no_results(llm):
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize("max_tokens", [1, 500, None])
@pytest.mark.parametrize("prompt", [321, 511, 512, 700])
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused_with_the_option_to_raise(
    llm, prompt, max_tokens
):
    params = SamplingParams(0, max_tokens, True)
    option = (
        "max_model_len is 512, and the checkpoint's own limit 512" if prompt > 511 else "num_kvcache_blocks"
    )
    for use in (
        lambda: llm.generate([[1] * prompt], params, use_tqdm=False),
        lambda: llm.add_request([1] * prompt, params),
        lambda: llm.generate([[1, 2], [1] * prompt], [GREEDY, params], use_tqdm=False),
    ):
        with pytest.raises(
            ValueError, match=f"prompt has {prompt} tokens and needs room for {prompt + 1}.*{option}"
        ):
            use()
        assert_empty(llm)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_lists_of_unequal_length_are_refused_with_both_lengths(llm, count):
    with pytest.raises(ValueError, match=f"2.*{count}"):
        llm.generate([[1], [2]], [GREEDY] * count, use_tqdm=False)


@pytest.mark.parametrize("params", [0.5, {"temperature": 1.0}, "greedy", SamplingParams], ids=repr)
def test_sampling_params_of_a_wrong_type_are_refused(llm, params):
    for use in (
        lambda: llm.generate([[1], [2]], params, use_tqdm=False),
        lambda: llm.generate([[1], [2]], [GREEDY, params], use_tqdm=False),
        lambda: llm.add_request([1], params),
    ):
        with pytest.raises(ValueError, match="sampling_params"):
            use()
        assert_empty(llm)


@pytest.mark.parametrize(
    "value", [-1, -1e-9, math.nan, math.inf, -math.inf, "1", None, [1.0], True, 1j], ids=repr
)
def test_a_bad_temperature_is_refused_by_its_value(value):
    with pytest.raises(ValueError, match="temperature.*" + re.escape(repr(value))):
        SamplingParams(temperature=value)


@pytest.mark.parametrize("value", [0, -1, -(10**9), 1.0, 1.5, "5", True, math.inf, math.nan], ids=repr)
def test_bad_max_tokens_are_refused_by_their_value(value):
    with pytest.raises(ValueError, match="max_tokens.*" + re.escape(repr(value))):
        SamplingParams(max_tokens=value)


@pytest.mark.parametrize("value", [None, "yes", 2], ids=repr)
def test_a_bad_ignore_eos_is_refused_by_its_value(value):
    with pytest.raises(ValueError, match="ignore_eos.*" + re.escape(repr(value))):
        SamplingParams(ignore_eos=value)


def test_sampling_params_can_not_be_broken_after_they_were_checked(llm):
    params = SamplingParams()
    try:
        params.temperature = -1.0
    except (AttributeError, TypeError):
        return
    with pytest.raises(ValueError, match="temperature"):
        llm.generate([[1]], params, use_tqdm=False)


def test_an_unknown_sampling_parameter_is_a_type_error():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


@pytest.mark.parametrize("messages", ["hi", [], None, [[]], [["hi"]], [{"role": "user"}], [3]], ids=repr)
def test_a_bad_chat_is_refused(llm, messages):
    with pytest.raises(ValueError):
        llm.chat(messages, GREEDY, use_tqdm=False)


STEP_CALLS = ("run",)  # what the engine asks of its ranks to compute a step


class Boom(Exception):
    pass


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("step", [0, 1, 2, 9])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_exception_in_a_step_leaves_the_engine_empty_and_right(model, monkeypatch, error, step, when):
    """
    Nothing of the failed step may be found in the cache afterwards: before it ran, its blocks are closed but
    hold what an earlier request wrote. The same prompts come again, in the same blocks.
    """
    with LLM(model.folder, **EXACT, num_kvcache_blocks=14, max_num_batched_tokens=40) as llm:
        llm.generate(
            [[9] * 60, [8] * 60, [6] * 60], GREEDY, use_tqdm=False
        )  # something for the cache to hold
        call, count = llm.model_runner.call, 0

        def failing_call(name, *args):
            nonlocal count
            count += name in STEP_CALLS
            if name in STEP_CALLS and count > step and when == "before":
                raise error("in the middle")
            result = call(name, *args)
            if name in STEP_CALLS and count > step:
                raise error("in the middle")
            return result

        monkeypatch.setattr(llm.model_runner, "call", failing_call)
        with pytest.raises(error):
            llm.generate(PROMPTS, GREEDY, use_tqdm=True)
        assert count == step + 1
        monkeypatch.undo()
        assert_sound(llm, model)


def test_an_exception_while_one_request_is_added_leaves_none_behind(llm, monkeypatch):
    add, count = llm.scheduler.add, 0

    def failing_add(*args):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return add(*args)

    monkeypatch.setattr(llm.scheduler, "add", failing_add)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    monkeypatch.undo()


def test_an_engine_that_is_shut_down_in_the_middle_of_generate_says_so(model, monkeypatch):
    llm = LLM(model.folder, **EXACT, num_kvcache_blocks=20)
    monkeypatch.setattr("tqdm.auto.tqdm.update", lambda *_: llm.exit())
    with pytest.raises(RuntimeError, match=r"shut down by exit\(\)"):
        llm.generate(PROMPTS, GREEDY)
    assert llm.is_finished()


def test_exceptions_again_and_again_leak_nothing(llm, monkeypatch):
    def failing_call(name, *args):
        if name in STEP_CALLS:
            raise Boom
        return call(name, *args)

    call = llm.model_runner.call
    for _ in range(5):
        monkeypatch.setattr(llm.model_runner, "call", failing_call)
        with pytest.raises(Boom):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        monkeypatch.undo()
        assert_empty(llm)


def interrupt_at_line(number: int, use, spared=("clear", "reset")) -> list[tuple[str, int]]:
    """Run `use` with a KeyboardInterrupt at the number-th line of the engine's code that it executes, those
    of functions with these names aside.

    Returns the lines, by file and line number, that were executed.
    """
    lines = []

    def trace(frame, event, _):
        if event == "line" and frame.f_code.co_name not in spared:
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(lines) == number:
                raise KeyboardInterrupt
        return trace

    def begin(frame, event, arg):
        inside = "/nanovllm/engine/" in frame.f_code.co_filename
        return trace(frame, event, arg) if inside else None

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        use()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.usefixtures("no_forecast")
def test_ctrl_c_at_any_line_leaves_the_engine_empty_and_right(model, overlap):
    """Also between lines of the bookkeeping that belong together: at every line once, overlapped or not."""
    prompts = [[1, 2, 3], [*range(46)], [7] * 14, [*range(46)]]
    params = [SamplingParams(0, count, True) for count in (2, 6, 4, 5)]
    with LLM(model.folder, **EXACT, num_kvcache_blocks=5, max_num_batched_tokens=40) as llm:
        llm._overlap = overlap  # whether a step is scheduled before the last one's tokens are known

        def use():
            llm.generate(prompts, params, use_tqdm=False)

        lines = interrupt_at_line(-1, use)
        assert llm.scheduler.num_preemptions > 0, "the lines of a preemption are wanted too"
        order = list(enumerate(lines, 1))
        random.Random(overlap).shuffle(order)  # whichever time a line is executed
        numbers = {line: number for number, line in order}
        for line, number in list(numbers.items())[: 120 if overlap else 40]:
            with contextlib.suppress(KeyboardInterrupt):
                interrupt_at_line(number, use)
            try:
                assert_empty(llm)
                results = llm.generate(prompts[:2], params[:2], use_tqdm=False)
            except Exception as error:
                raise AssertionError(f"after Ctrl-C at {line}") from error
            for prompt, result in zip(prompts, results, strict=False):
                assert_greedy(model.reference, prompt, result["token_ids"])
        assert_sound(llm, model)


@pytest.mark.parametrize("overlap", [False, True])
def test_ctrl_c_at_any_line_of_step_loses_no_request_and_no_token(model, overlap, no_forecast):
    """Nor does a second one while the first is recovered from. Each request is told once."""
    prompts = [[1, 2, 3], [*range(46)], [7] * 14, [*range(46)], [4, 5]]
    pick = random.Random(overlap)
    with LLM(model.folder, **EXACT, num_kvcache_blocks=5, max_num_batched_tokens=40) as llm:
        llm._overlap = overlap
        [free] = llm.generate(prompts[-1:], GREEDY, use_tqdm=False)
        stop = next(char for char in free["text"][3:] if char.isascii())
        params = [SamplingParams(0, count, True, logprobs=0) for count in (2, 6, 4, 5)]
        params.append(SamplingParams(0, 24, True, stop=stop))
        expected = [result["token_ids"] for result in llm.generate(prompts, params, use_tqdm=False)]
        assert 1 < len(expected[-1]) < 24, "a stop text is wanted too"

        def run(*interrupts: int) -> list[tuple[str, int]]:
            """Returns the lines up to the first interrupt."""
            ids = [llm.add_request(*request) for request in zip(prompts, params, strict=True)]
            sequences, found, lines = list(llm.unfinished.values()), [], []

            def use() -> None:
                while not llm.is_finished():
                    found.extend(llm.step()[0])

            for number in interrupts:
                with contextlib.suppress(KeyboardInterrupt):
                    lines = interrupt_at_line(number, use, spared=())
            use()
            assert sorted(request_id for request_id, _ in found) == ids
            assert [dict(found)[request_id] for request_id in ids] == expected
            assert all(
                len(seq.request.own["logprobs"][seq.seq_id]) == seq.num_completion_tokens
                for seq in sequences[:-1]
            )
            assert_empty(llm)
            return lines

        preemptions = llm.scheduler.num_preemptions
        numbers = {line: number for number, line in enumerate(run(-1), 1)}
        assert llm.scheduler.num_preemptions > preemptions, "the lines of a preemption are wanted too"
        for number in pick.sample(sorted(numbers.values()), 60 if overlap else 30):
            run(number, pick.randrange(1, 200))
        assert_sound(llm, model)


@pytest.mark.parametrize(
    "option, nearest",
    [
        ("max_num_seq", "max_num_seqs"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("block_size", "kvcache_block_size"),
        ("Dtype", "dtype"),
    ],
)
def test_an_unknown_option_is_a_type_error_that_names_it_and_the_nearest(model, option, nearest):
    with pytest.raises(TypeError, match=f"{option}.*{nearest}"):
        LLM(model.folder, **{option: 1})


@pytest.mark.parametrize("option, value", [("eos", 2), ("hf_config", None)])
def test_what_the_engine_fills_in_cannot_be_given(model, option, value):
    with pytest.raises(TypeError, match=f"{option} is no option: the engine fills it in"):
        LLM(model.folder, **{option: value})


BAD_OPTIONS = [
    *[("tensor_parallel_size", value) for value in (0, 9, -1, 1.0, "2", True, None)],
    *[("kvcache_block_size", value) for value in (100, 0, -16, 8, 17, 16.0, "256", None)],
    *[("gpu_memory_utilization", value) for value in (0, 1.5, -0.1, math.nan, math.inf, "0.9", None)],
    *[("max_num_batched_tokens", value) for value in (0, -1, 1.5, "16", None)],
    *[("max_num_seqs", value) for value in (0, -1, 1.5, 2**16, None)],
    *[("max_model_len", value) for value in (0, -5, 2.5, "all")],
    *[("num_kvcache_blocks", value) for value in (0, -2, 1.5, "8")],
    *[("dtype", value) for value in ("int8", "float64", "fp32", 16, None)],
    *[("kv_cache_dtype", value) for value in ("int3", 16, "uint8")],
    *[("device", value) for value in ("tpu", "gpu", 3.5, "cuda:x", "meta")],
    *[("load_format", value) for value in ("pickle", "pt", 1)],
    *[("model_impl", value) for value in ("vllm", None)],
    *[("attention_backend", value) for value in ("magic", 1)],
    *[("enforce_eager", value) for value in ("yes", None, 2)],
    *[("enable_prefix_caching", value) for value in ("no", None)],
    *[("seed", value) for value in (-1, 0.5, "1", 2**64)],
]


@pytest.mark.parametrize("name, value", BAD_OPTIONS, ids=lambda x: repr(x))
def test_a_bad_option_is_refused_by_its_name_and_value(model, name, value):
    shown = re.escape(repr(value).strip("'"))
    with pytest.raises(ValueError, match=f"(?s)(?=.*{name})(?=.*{shown})"):
        LLM(model.folder, **{"device": "cpu", name: value})


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_who_asks_for_an_fp8_cache_is_told_of_int8(dtype):
    with pytest.raises(
        ValueError, match=f"kv_cache_dtype='{dtype}' .* 'int8' .* closer .* nothing to calibrate"
    ):
        ExtendedConfig("a model", kv_cache_dtype=dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_a_device_that_is_not_there_is_refused(model, device):
    with pytest.raises(ValueError, match=device):
        LLM(model.folder, device=device)


@pytest.mark.parametrize("backend", ["flash", "triton"])
def test_a_backend_that_cannot_work_here_is_refused_with_the_reason(model, backend):
    with pytest.raises(ValueError, match=f"{backend}.*(CUDA|installed|float32)"):
        LLM(model.folder, **EXACT, attention_backend=backend)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, "it computes bfloat16 and float16 only"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float16"}, "kv_cache_dtype is 'float16'"),
        ({"dtype": "float16", "kv_cache_dtype": "float32"}, "kv_cache_dtype is 'float32'"),
        ({"dtype": "float16", "kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8'"),
        ({"dtype": "float16", "kvcache_block_size": 16}, "a multiple of 256"),
        ({"dtype": "float16", "kv_cache_dtype": "float16"}, None),
        ({"dtype": "bfloat16"}, None),
        ({"dtype": "bfloat16", "head_dim": 512}, "heads of up to 256"),
        ({"dtype": "bfloat16", "sinks": torch.zeros(4)}, "no attention sinks"),
        ({"dtype": "bfloat16", "window": 8, "in_chunks": True}, "no attention in chunks"),
        ({"dtype": "bfloat16", "window": 0, "in_chunks": True}, None),
        ({"dtype": "bfloat16", "window": 8, "softcap": 50.0, "slopes": torch.ones(4)}, None),
    ],
)
def test_flash_attention_is_refused_what_it_cannot_compute_or_read(monkeypatch, options, reason):
    monkeypatch.setattr(attention, "HAVE_FLASH", True)
    fields = "window", "softcap", "sinks", "slopes", "in_chunks"
    rule = {name: options.pop(name) for name in fields if name in options}
    layer = attention.Attention(4, options.pop("head_dim", 64), 0.125, 4)
    layer.variant = AttentionRule(1.0, **rule)
    config = ExtendedConfig("a model", device="cpu", attention_backend="flash", **options)
    refused = pytest.raises(ValueError, match=f"attention_backend='flash'.*{reason}")
    with refused if reason else contextlib.nullcontext():
        is_int8 = config.kv_cache_dtype == "int8"
        layout = Int8Layout() if is_int8 else CacheLayout(config.kv_cache_torch_dtype)
        found = attention.get_backend(config, torch.device("cuda"), [layer], layout)
        assert isinstance(found, attention.FlashBackend)


def test_a_pool_smaller_than_the_model_length_serves_what_fits(model):
    with LLM(model.folder, **EXACT, num_kvcache_blocks=2) as llm:
        (result,) = llm.generate([[1] * 20], SamplingParams(0, 12, True), use_tqdm=False)
        assert_greedy(model.reference, [1] * 20, result["token_ids"])
        with pytest.warns(UserWarning, match="beyond the context of 33 tokens"):
            (result,) = llm.generate([[1] * 30], SamplingParams(0, 12, True), use_tqdm=False)
        assert len(result["token_ids"]) == 3  # the last is never written to the cache
        with pytest.raises(
            ValueError, match="2 KV cache blocks of 16 tokens are enough for 33; raise num_kv"
        ):
            llm.generate([[1] * 33], SamplingParams(0, 12, True), use_tqdm=False)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "not-a-model", ""])
def test_a_missing_folder_is_named(name):
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        LLM(name, **EXACT)


def test_a_folder_without_a_config_is_named(tmp_path):
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        LLM(str(tmp_path), **EXACT)


@pytest.mark.parametrize("changes", [
    dict(architectures=["MambaForCausalLM"]),
    dict(architectures=["MambaForCausalLM"], model_type="mamba"),
    dict(architectures=["NobodyKnows"], model_type="nobody_knows"),
    dict(architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4"),
    dict(architectures=[], model_type="nobody_knows"),
    dict(architectures=None, model_type=None),
], ids=str)  # fmt: skip
def test_an_unknown_architecture_lists_the_known_ones(tmp_path, changes):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    edit_json(folder / "config.json", **{"layer_types": None, **changes})
    with pytest.raises(ValueError) as raised:
        LLM(str(folder), **EXACT)
    for known in ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"):
        assert known in str(raised.value)
    if changes.get("architectures"):
        assert changes["architectures"][0] in str(raised.value) or changes["model_type"] in str(raised.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"text"', '{"hidden_size": 64}'])
def test_a_broken_config_is_named(tmp_path, content):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match="config.json"):
        LLM(str(folder), **EXACT)


@pytest.mark.parametrize("changes", [
    dict(hidden_act="gelu"),
    dict(quantization_config={"quant_method": "gptq", "bits": 4}),
    dict(hidden_size=0),
    dict(num_hidden_layers=-1),
    dict(num_key_value_heads=3),
    dict(eos_token_id="end"),
], ids=str)  # fmt: skip
def test_a_config_that_the_model_cannot_follow_is_refused(tmp_path, changes):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError):
        LLM(str(folder), **EXACT)


def test_an_engine_that_could_not_be_built_makes_no_noise_when_it_is_collected(model, monkeypatch):
    noise = []
    monkeypatch.setattr(sys, "unraisablehook", noise.append)
    for make in (
        lambda: LLM(),
        lambda: LLM(model.folder, no_such_option=1),
        lambda: LLM(model.folder, dtype="int8"),
        lambda: LLM("/nowhere", **EXACT),
    ):
        with pytest.raises((TypeError, ValueError)):
            make()
        gc.collect()
    assert noise == []


def test_an_engine_that_could_not_be_built_does_not_keep_memory_or_change_defaults(tmp_path):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    edit_json(folder / "config.json", num_hidden_layers=3, layer_types=None)  # one layer has no tensors
    before = torch.get_default_dtype()
    with pytest.raises(ValueError, match="model.layers.2"):
        LLM(str(folder), **{**EXACT, "dtype": "bfloat16"})
    assert torch.get_default_dtype() == before
    edit_json(folder / "config.json", num_hidden_layers=2)
    with LLM(str(folder), **EXACT, num_kvcache_blocks=4) as llm:
        assert len(llm.generate([[1]], SamplingParams(0, 2, True), use_tqdm=False)[0]["token_ids"]) == 2


def test_a_checkpoint_runs_no_code(tmp_path):
    """`auto_map` and a tokenizer class of its own name code in the folder."""
    folder = make_checkpoint(tmp_path)
    (folder / "evil.py").write_text("raise SystemExit('executed')\n")
    names = {
        "AutoConfig": "evil.Config",
        "AutoModelForCausalLM": "evil.Model",
        "AutoTokenizer": ["evil.T", None],
    }
    edit_json(folder / "config.json", auto_map=names)
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]})
    try:
        with LLM(str(folder), **EXACT, num_kvcache_blocks=4) as llm:
            assert len(llm.generate([[1]], SamplingParams(0, 2, True), use_tqdm=False)[0]["token_ids"]) == 2
    except ValueError:
        pass  # refusing it is as good
    assert json.loads((folder / "config.json").read_text())["auto_map"] == names
    assert "evil" not in sys.modules


def steps_to_end(llm: LLM) -> dict[int, list[int]]:
    """What the requests finish with, by id."""
    found: dict[int, list[int]] = {}
    while not llm.is_finished():
        for request_id, token_ids in llm.step()[0]:
            assert request_id not in found, "told twice"
            found[request_id] = token_ids
    return found


@pytest.mark.parametrize("then", ["abort", "go on"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_what_a_failed_step_was_to_compute_is_found_by_nobody(llm, model, monkeypatch, error, then):
    """The blocks of a prompt are closed before they are computed."""
    prompt = [*range(100, 140)]

    def broken(*_):
        raise error("injected")

    with monkeypatch.context() as patch:
        first = llm.add_request(prompt, GREEDY)
        patch.setattr(llm.model_runner, "run", broken)
        with pytest.raises(error, match="injected"):
            llm.step()
    if then == "abort":
        llm.abort(first)
    second = llm.add_request(prompt, GREEDY)
    third = llm.add_request([*prompt[:32], 1, 2], GREEDY)
    found = steps_to_end(llm)
    assert [len(found[i]) for i in (first, second, third)] == [0 if then == "abort" else 24, 24, 24]
    for request_id in (first, second):
        assert_greedy(model.reference, prompt, found[request_id])
    assert_greedy(model.reference, [*prompt[:32], 1, 2], found[third])
