"""Scripts of the shape of vLLM's examples run here with nothing changed but the name in their imports, and
docs/coming-from-vllm.md says what is the case."""

import argparse
import asyncio
import json
import re
import runpy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from nanovllm import LLM, AsyncLLM, EngineArgs, SamplingParams, StructuredOutputsParams
from nanovllm.batch import __main__ as batch
from nanovllm.checkpoints import open_checkpoint
from nanovllm.config import Config
from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "porting"
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


def test_basic(run):
    assert len(OUTPUT.findall(run("basic"))) == 4


@pytest.mark.parametrize("spelling", ["--max-tokens", "--max_tokens"])
def test_generate(run, folder, spelling):
    printed = run("generate", "--model", folder, spelling, "3", "--dtype=float", "--no-enable-prefix-caching")
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
        Config.from_options("a model", options)


def test_the_page_has_a_row_for_every_check_and_no_other():
    page = (ROOT / "docs" / "coming-from-vllm.md").read_text()
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
    from nanovllm.distributed import cleanup_dist_env_and_memory
    from nanovllm.utils.argparse_utils import FlexibleArgumentParser

    cleanup_dist_env_and_memory()
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


@row("`SamplingParams(structured_outputs=StructuredOutputsParams(...))`")
def _(llm, folder):
    pytest.importorskip("llguidance")
    params = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    assert llm.generate("a", params, use_tqdm=False)[0].outputs[0].text in ("yes", "no")


@row('`dtype=torch.bfloat16`, `"half"`, `"float"`')
def _(llm, folder):
    for dtype, name in ((torch.bfloat16, "bfloat16"), ("half", "float16"), ("float", "float32")):
        assert Config(folder, dtype=dtype).dtype == name


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
        assert Config.from_options(folder, {}).with_checkpoint(open_checkpoint(folder)).max_model_len == 1024
        Config(folder, max_model_len=5000).with_checkpoint(open_checkpoint(folder), ["max_model_len"])


@row("`trust_remote_code=True`, `swap_space`, `disable_log_stats` and the like")
def _(llm, folder):
    with pytest.warns(
        UserWarning, match="^options without effect: trust_remote_code, swap_space, disable_log_stats$"
    ):
        Config.from_options("a model", dict(trust_remote_code=True, swap_space=4, disable_log_stats=True))


@row("`hf_token`, `block_size`, `num_gpu_blocks_override`")
def _(llm, folder):
    refused(ValueError, "it is called token here", hf_token="secret")
    refused(TypeError, "'block_size'.*'kvcache_block_size'", block_size=16)
    refused(ValueError, "it is called num_kvcache_blocks here", num_gpu_blocks_override=16)


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
    with pytest.raises(TypeError, match="lora_request"):
        llm.generate("a", GREEDY, lora_request=None)


@row("`multi_modal_data`, parts of type `image_url`")
def _(llm, folder):
    with pytest.raises(ValueError, match="no other key"):
        llm.generate({"prompt": "a", "multi_modal_data": {}}, GREEDY)
    with pytest.raises(ValueError, match="must be texts"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}], GREEDY)
    refused(ValueError, "text alone", limit_mm_per_prompt={"image": 1})


@row('`llm.embed(...)`, `llm.classify(...)`, `task="embed"`')
def _(llm, folder):
    assert not hasattr(llm, "embed") and not hasattr(llm, "classify")
    refused(ValueError, "only text and scores are made", task="embed")
    assert llm.score("ab", use_tqdm=False)[0]["logprob"] < 0


@row("`logits_processors`")
def _(llm, folder):
    refused(ValueError, "logit_bias, allowed_token_ids or bad_words", logits_processors=["a"])


@row("`llm.beam_search(...)`")
def _(llm, folder):
    assert not hasattr(llm, "beam_search")


@row("`llm.sleep()`, `llm.wake_up()`")
def _(llm, folder):
    assert not hasattr(llm, "sleep") and not hasattr(llm, "wake_up")
    with LLM(folder, **OPTIONS) as other:
        other.exit()
        with pytest.raises(RuntimeError, match="shut down"):
            other.generate("a", GREEDY)
