"""Scripts of the shape of vLLM's examples run here with nothing changed but the name in their imports, and
docs/coming-from-vllm.md says what is the case."""

import argparse
import asyncio
import functools
import io
import json
import pkgutil
import re
import runpy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from open_checkpoints import open_checkpoint
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from nanovllm import LLM, AsyncLLM, EngineArgs, SamplingParams, StructuredOutputsParams
from nanovllm.config import Config
from nanovllm.extensions.api.foreign_options import make_config
from nanovllm.extensions.batch import __main__ as batch
from nanovllm.extensions.safety.options import ExtendedConfig
from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(__file__).parent / "porting"
PAGE = (ROOT / "docs" / "coming-from-vllm.md").read_text()
OUTPUT = re.compile(r"^Prompt: '.*'\nOutput: ['\"].+['\"]$", re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint")
    return str(make_checkpoint(folder, "qwen3", seed=1, vocab_size=257, max_position_embeddings=1024))


@pytest.fixture
def run(folder, monkeypatch, capsys) -> Callable[..., str]:
    def run(name: str, *arguments: str) -> str:
        monkeypatch.setenv("MODEL", folder)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_basic(run, monkeypatch):
    monkeypatch.setattr("nanovllm.LLM", functools.partial(LLM, seed=1))  # else one may draw no text
    assert len(OUTPUT.findall(run("basic"))) == 4


@pytest.mark.parametrize("spelling", ["--max-tokens", "--max_tokens"])
def test_generate(run, folder, spelling):
    options = ("--dtype=float", "--no-enable-prefix-caching", "--seed=1")  # else one may draw no text
    printed = run("generate", "--model", folder, spelling, "3", *options)
    assert len(OUTPUT.findall(printed)) == 2
    with pytest.raises(ValueError, match="no-such-model"):
        run("generate")


def test_chat(run, folder):
    printed = run("chat", f"--model={folder}", "--max_model_len=900", "--seed=1", "--dtype=float32")
    outputs = OUTPUT.findall(printed)
    assert len(outputs) == 12
    assert all("[user]Good morning!" in output and "[assistant]'" in output for output in outputs[:11])
    assert r"user> Good morning!\n" in outputs[11]


def test_prefix_caching(run):
    printed = run("prefix_caching")
    assert len(OUTPUT.findall(printed)) == 3
    assert int(re.search(r"^Same texts: True, from the cache: (\d+) tokens$", printed, re.MULTILINE)[1]) > 100


def test_structured_outputs(run):
    pytest.importorskip("llguidance")
    lines = [
        r"Choice: (Sunny|Rainy)",
        r"Regex: [a-z]{3}-[0-9]{2}",
        r"JSON: (sail|motor)",
        r"Grammar: turn (left|right)",
    ]
    assert re.fullmatch("\n".join(lines) + "\n", run("structured_outputs"))


@pytest.mark.parametrize(
    "library, text, count", [("langchain", ".*", 2), ("llama_index", ".*", 1), ("outlines", "[a-c]{3}", 3)]
)
def test_adapters_run_with_this_engine_in_the_place_of_vllm(run, monkeypatch, library, text, count):
    if library == "outlines":
        pytest.importorskip("llguidance")
    for name in ("vllm", "vllm.sampling_params"):
        monkeypatch.setitem(sys.modules, name, None)  # puts back later what the page's lines change
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {})
    lines = run("adapters", library).splitlines()
    texts = rf"(['\"]{text}['\"]\n){{{count}}}('[d-f]{{3}}'\n)?"  # a random text may have a quote in it
    assert re.fullmatch(texts, "\n".join(lines) + "\n")


# --- docs/coming-from-vllm.md ---

OPTIONS = dict(**EXACT, num_kvcache_blocks=80)
GREEDY = SamplingParams(0, 4, True)
CHECKS: dict[str, Callable] = {}  # by the first cell of a row


def row(cell: str) -> Callable:
    def register(check: Callable) -> Callable:
        CHECKS[cell] = check
        return check

    return register


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **OPTIONS) as llm:
        yield llm


def refused(error: type[Exception], text: str, **options) -> None:
    with pytest.raises(error, match=text):
        make_config("a model", options, ExtendedConfig)


def missed(llm: LLM, *names: str) -> None:
    """These raise AttributeError with the page's answer."""
    for name in names:
        [answer] = re.findall(rf"^\| .*`llm\.{name}\b.*\| not there \| (.*) \|$", PAGE, re.MULTILINE)
        with pytest.raises(AttributeError) as error:
            getattr(llm, name)
        told = f"'LLM' object has no attribute '{name}': " + answer.replace("`", "")
        assert str(error.value) == told and not hasattr(llm, name)


def test_the_page_has_a_row_for_every_check_and_no_other():
    page = PAGE
    rows = re.findall(r"^\| (.*?) \| (same|differs|not there) \|", page, re.MULTILINE)
    assert [cell for cell, _ in rows] == list(CHECKS)
    assert page.count("\n|") == len(rows) + 2


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" in metafunc.fixturenames:
        metafunc.parametrize("cell", list(CHECKS))


def test_a_row_tells_what_is_the_case(llm, folder, cell):
    CHECKS[cell](llm, folder)


@row("`from vllm import LLM, SamplingParams`")
def _(llm, folder):
    from nanovllm import CompletionOutput, RequestOutput, TextPrompt, TokensPrompt
    from nanovllm.distributed import cleanup_dist_env_and_memory
    from nanovllm.utils import FlexibleArgumentParser

    cleanup_dist_env_and_memory()
    for name, module in (
        ("utils.argparse_utils.FlexibleArgumentParser", FlexibleArgumentParser),
        ("inputs.TextPrompt", TextPrompt),
        ("inputs.TokensPrompt", TokensPrompt),
        ("outputs.RequestOutput", RequestOutput),
        ("outputs.CompletionOutput", CompletionOutput),
    ):
        assert pkgutil.resolve_name(f"nanovllm.{name}") is module
    prompts = [TextPrompt(prompt="ab"), TokensPrompt(prompt_token_ids=llm.encode("ab"))]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].text == outputs[1].outputs[0].text
    assert isinstance(outputs[0], RequestOutput) and isinstance(outputs[0].outputs[0], CompletionOutput)
    parser = FlexibleArgumentParser()
    parser.add_argument("--top-p", type=float)
    assert parser.parse_args(["--top_p=0.5"]).top_p == 0.5


@row("`LLM(model=..., dtype=..., seed=...)`")
def _(llm, folder):
    options = dict(device="cpu", num_kvcache_blocks=4, gpu_memory_utilization=0.5, enforce_eager=True)
    with LLM(model=folder, dtype="float32", seed=0, max_num_seqs=2, max_model_len=64, **options) as other:
        assert other.config.seed == 0


@row("`LLM(**asdict(EngineArgs(...)))`")
def _(llm, folder):
    args = EngineArgs(model=folder, device="cpu", num_kvcache_blocks=4, max_model_len=64)
    with LLM(**asdict(args)) as other:
        assert other.generate("a", GREEDY, use_tqdm=False)
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    given = parser.parse_args(
        ["--model", "m", "--seed", "3", "--hf-overrides", '{"a": 1}', "--enforce-eager"]
    )
    assert EngineArgs.from_cli_args(given) == EngineArgs(
        "m", seed=3, hf_overrides={"a": 1}, enforce_eager=True
    )
    assert vars(given) == {"model": "m", "seed": 3, "hf_overrides": {"a": 1}, "enforce_eager": True}


@row("`llm.generate(prompts, sampling_params)`")
def _(llm, folder):
    assert len(llm.generate((text for text in "abc"), GREEDY, use_tqdm=False)) == 3


@row('`{"prompt": ...}`, `{"prompt_token_ids": ...}`')
def _(llm, folder):
    both = {"prompt": "a text", "prompt_token_ids": [1, 2]}
    [result] = llm.generate(both, GREEDY, use_tqdm=False)
    assert (result.prompt, result.prompt_token_ids) == ("a text", [1, 2])


@row("`llm.generate(prompts)`")
def _(llm, folder):
    [result] = llm.generate("a", use_tqdm=False)
    assert len(result["token_ids"]) <= llm.get_default_sampling_params().max_tokens


@row("`llm.get_default_sampling_params()`")
def _(llm, folder):
    params = llm.get_default_sampling_params()
    params.max_tokens, params.top_p = 2, 7
    with pytest.raises(ValueError, match="top_p"):
        llm.generate("a", params)
    params.top_p = 0.5
    assert len(llm.generate("a", params, use_tqdm=False)[0].outputs[0].token_ids) <= 2


@row("`llm.chat(messages, sampling_params, ...)`")
def _(llm, folder):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    options = dict(
        chat_template=None, chat_template_content_format="auto", tools=None, chat_template_kwargs={}
    )
    options |= dict(add_generation_prompt=False, continue_final_message=True)
    [result] = llm.chat(messages, sampling_params=GREEDY, use_tqdm=False, **options)
    assert result.prompt == "[user]a\nb"


@row("`llm.get_tokenizer()`")
def _(llm, folder):
    tokenizer = llm.get_tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer.encode("ab") == llm.encode("ab")


@row("`output.prompt`, `output.prompt_token_ids`, `output.finished`")
def _(llm, folder):
    [output] = llm.generate("ab", GREEDY, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("ab", llm.encode("ab"), True)
    assert output["text"] == output.outputs[0].text


@row("`output.outputs[0].text`")
def _(llm, folder):
    for n in (1, 2):
        [output] = llm.generate("ab", SamplingParams(1.0, 4, True, n=n, logprobs=0), use_tqdm=False)
        assert [each.index for each in output.outputs] == [*range(n)]
        for each in output.outputs:
            assert (len(each.token_ids), each.finish_reason, each.stop_reason) == (4, "length", None)
            assert len(each.logprobs) == 4 and each.cumulative_logprob < 0 and isinstance(each.text, str)


@row("`SamplingParams(logprobs=..., prompt_logprobs=...)`")
def _(llm, folder):
    [output] = llm.generate("ab", SamplingParams(0, 1, logprobs=20, prompt_logprobs=1), use_tqdm=False)
    for places in (output.outputs[0].logprobs, output.prompt_logprobs[1:]):
        for entry in places[0].values():
            assert entry.logprob < 0 < entry.rank and isinstance(entry.decoded_token, str)
    with pytest.raises(ValueError, match="logprobs must be None or an integer from 0 to 20"):
        SamplingParams(logprobs=21)


@row('`logprobs_mode="raw_logprobs"`, `"processed_logprobs"`')
def _(llm, folder):
    for mode in ("raw", "processed"):
        for name in (mode, f"{mode}_logprobs"):
            assert make_config("a model", {"logprobs_mode": name}, ExtendedConfig).logprobs_mode == mode
    refused(ValueError, "logprobs_mode must be one of", logprobs_mode="raw_logits")


@row("`SamplingParams(structured_outputs=StructuredOutputsParams(...))`")
def _(llm, folder):
    pytest.importorskip("llguidance")
    params = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    assert llm.generate("a", params, use_tqdm=False)[0].outputs[0].text in ("yes", "no")


@row("`generate(..., use_tqdm=...)`")
def _(llm, folder):
    written = io.StringIO()
    llm.generate("a", GREEDY, use_tqdm=functools.partial(tqdm, file=written))
    assert "1/1" in written.getvalue()


@row('`dtype=torch.bfloat16`, `"half"`, `"float"`')
def _(llm, folder):
    for dtype, name in ((torch.bfloat16, "bfloat16"), ("half", "float16"), ("float", "float32")):
        assert ExtendedConfig(folder, dtype=dtype).dtype == name


@row("`tokenizer`, `revision`, `download_dir`, `hf_overrides`")
def _(llm, folder):
    where = dict(tokenizer=folder, revision="main", download_dir="/cache")
    with LLM(folder, **OPTIONS, **where, hf_overrides={"max_position_embeddings": 99}) as other:
        assert other.config.max_model_len == 99


@row("`SamplingParams()`")
def _(llm, folder):
    assert SamplingParams().max_tokens == 64
    [result] = llm.generate([[1] * 1000], SamplingParams(0, None, True), use_tqdm=False)
    assert len(result["token_ids"]) == 24


@row("`max_model_len`")
def _(llm, folder):
    assert Config(folder).max_model_len == 4096
    with pytest.warns(UserWarning, match="max_model_len=5000 is cut to 1024"):
        assert make_config(folder, {}).with_checkpoint(open_checkpoint(folder)).max_model_len == 1024
        ExtendedConfig(folder, max_model_len=5000).with_checkpoint(open_checkpoint(folder), ["max_model_len"])


@row("`trust_remote_code=True`, `swap_space`, `disable_log_stats` and the like")
def _(llm, folder):
    with pytest.warns(
        UserWarning, match="^options without effect: trust_remote_code, swap_space, disable_log_stats$"
    ):
        make_config(
            "a model",
            dict(trust_remote_code=True, swap_space=4, disable_log_stats=True),
            ExtendedConfig,
        )


@row(
    "`priority`, `spaces_between_special_tokens`, `output_kind` and the like, for `SamplingParams` or a call"
)
def _(llm, folder):
    with pytest.warns(
        UserWarning, match="^options without effect: spaces_between_special_tokens, output_kind$"
    ):
        assert SamplingParams(spaces_between_special_tokens=True, output_kind=2) == SamplingParams()
    with pytest.warns(UserWarning, match="^options without effect: priority$"):
        llm.chat([{"role": "user", "content": "a"}], GREEDY, use_tqdm=False, priority=[1])


@row("`best_of`, `guided_decoding`, `truncate_prompt_tokens` and the like, for `SamplingParams` or a call")
def _(llm, folder):
    assert SamplingParams(best_of=1, guided_decoding=None, logits_processors=[]) == SamplingParams()
    for option in (dict(best_of=2), dict(guided_decoding={}), dict(truncate_prompt_tokens=9)):
        with pytest.raises(ValueError, match="is not offered: ..."):
            SamplingParams(**option)


@row("`hf_token`, `block_size`, `num_gpu_blocks_override`")
def _(llm, folder):
    refused(ValueError, "it is called token here", hf_token="secret")
    refused(TypeError, "'block_size'.*'kvcache_block_size'", block_size=16)
    refused(ValueError, "it is called num_kvcache_blocks here", num_gpu_blocks_override=16)


@row("`VLLM_BATCH_INVARIANT=1` in the environment")
def _(llm, folder):
    assert make_config("a model", {"exact": True}, ExtendedConfig).exact


@row('`quantization="awq"`')
def _(llm, folder):
    refused(ValueError, "quantization='awq' is to be left out", quantization="awq")


@row('`kv_cache_dtype="fp8"`')
def _(llm, folder):
    refused(ValueError, "'int8'", kv_cache_dtype="fp8")


@row("`pipeline_parallel_size`, `data_parallel_size`")
def _(llm, folder):
    refused(ValueError, "tensor_parallel_size", pipeline_parallel_size=2)
    refused(ValueError, "nanovllm.batch --data-parallel", data_parallel_size=2)
    refused(ValueError, "from 1 to 8", tensor_parallel_size=9)


@row("`output.request_id`")
def _(llm, folder):
    [result] = llm.generate("a", GREEDY, use_tqdm=False)
    assert isinstance(result.request_id, int)


@row("`engine.add_request(request_id, prompt, params)`")
def _(llm, folder):
    assert llm.add_request("a", GREEDY, request_id="mine") == "mine"
    while not llm.is_finished():
        finished, _ = llm.step()
    [(request_id, token_ids)] = finished
    assert request_id == "mine" and len(token_ids) == 4


@row("`async for output in engine.generate(prompt, params, request_id)`")
def _(llm, folder):
    async def use(engine: AsyncLLM) -> tuple:
        result = await engine.generate("a", GREEDY, "mine")
        return result, [piece async for piece in engine.stream("a", GREEDY, objects=True)]

    with AsyncLLM(folder, **OPTIONS) as engine:
        result, pieces = asyncio.run(use(engine))
    assert result.request_id == "mine"
    assert sum((piece.token_ids for piece in pieces), []) == result.outputs[0].token_ids


@row("`llm.encode(...)`")
def _(llm, folder):
    assert llm.encode("ab") == llm.get_tokenizer().encode("ab")


@row("`python -m vllm.entrypoints.openai.run_batch -i in.jsonl -o out.jsonl`")
def _(llm, folder):
    with tempfile.TemporaryDirectory() as place:
        source, output = Path(place) / "in.jsonl", Path(place) / "out.jsonl"
        source.write_text(
            '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n'
        )
        files = ["--model", folder, "--input", str(source), "--output", str(output)]
        batch.main([*files, "--max_tokens", "3", "--device", "cpu"])
        answer = json.loads(output.read_text())
    assert answer["custom_id"] == "a" and answer["response"]["body"]["usage"]["completion_tokens"] <= 3


@row("`vllm serve`")
def _(llm, folder):
    assert not (ROOT / "nanovllm" / "entrypoints").exists()


@row("`enable_lora`, `lora_request`")
def _(llm, folder):
    refused(ValueError, "lora=.* merges one adapter into the weights", enable_lora=True)
    with pytest.raises(ValueError, match="lora_request='a' .* merges one adapter into the weights"):
        llm.generate("a", GREEDY, lora_request="a")
    assert llm.generate("a", GREEDY, use_tqdm=False, lora_request=None)


@row("`multi_modal_data`, parts of type `image_url`")
def _(llm, folder):
    with pytest.raises(ValueError, match="no other key"):
        llm.generate({"prompt": "a", "multi_modal_data": {}}, GREEDY)
    with pytest.raises(ValueError, match="text alone"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}], GREEDY)
    refused(ValueError, "text alone", limit_mm_per_prompt={"image": 1})


@row('`llm.embed(...)`, `llm.classify(...)`, `llm.reward(...)`, `task="embed"`')
def _(llm, folder):
    missed(llm, "embed", "classify", "reward")
    refused(ValueError, "only text and scores are made", task="embed")
    assert llm.score("ab", use_tqdm=False)[0]["logprob"] < 0


@row("`logits_processors`")
def _(llm, folder):
    refused(ValueError, "logit_bias, allowed_token_ids or bad_words", logits_processors=["a"])


@row("`llm.beam_search(...)`, `best_of`")
def _(llm, folder):
    missed(llm, "beam_search")
    with pytest.raises(ValueError, match=re.escape("best_of=2 is not offered: SamplingParams(n=...)")):
        SamplingParams(best_of=2)


@row("`llm.sleep()`, `llm.wake_up()`, `enable_sleep_mode`")
def _(llm, folder):
    missed(llm, "sleep", "wake_up")
    refused(ValueError, "llm.exit", enable_sleep_mode=True)
    with LLM(folder, **OPTIONS) as other:
        other.exit()
        with pytest.raises(RuntimeError, match="shut down"):
            other.generate("a", GREEDY)


@row("`llm.collective_rpc(...)`, `llm.apply_model(...)`, `worker_cls`, `worker_extension_cls`")
def _(llm, folder):
    missed(llm, "collective_rpc", "apply_model")
    refused(ValueError, "own code alone", worker_cls="a.B")
    refused(ValueError, "own code alone", worker_extension_cls="a.B")


@row("`cpu_offload_gb`")
def _(llm, folder):
    refused(ValueError, "quantization='int4' and more ranks", cpu_offload_gb=4)


@row("`llm.llm_engine`")
def _(llm, folder):
    missed(llm, "llm_engine")


@row("`llm.set_tokenizer(...)`")
def _(llm, folder):
    missed(llm, "set_tokenizer")


@row("`llm.reset_prefix_cache()`")
def _(llm, folder):
    missed(llm, "reset_prefix_cache")


@row("`llm.get_metrics()`")
def _(llm, folder):
    missed(llm, "get_metrics")
    assert llm.stats()


@row("`llm.start_profile()`, `llm.stop_profile()`")
def _(llm, folder):
    missed(llm, "start_profile", "stop_profile")
