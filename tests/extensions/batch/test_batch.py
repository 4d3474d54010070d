"""nanovllm.batch: what its lines may be, what answers them, and that no end of a run loses or doubles any."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import jsonschema
import pytest
from batch_files import ENGINE, ROOT, read_answers, run_batch, write_lines
from cases import slow

from nanovllm import LLM, SamplingParams, StructuredOutputsParams
from nanovllm.extensions.batch import __main__ as batch
from nanovllm.extensions.batch import files as batch_files
from nanovllm.extensions.batch import lines as batch_lines
from nanovllm.extensions.batch.files import find_lines, open_output, read_lines
from nanovllm.extensions.batch.lines import Answer, parse_line, to_json
from nanovllm.extensions.text.results import Logprob
from tiny_checkpoints import EXACT, make_checkpoint, one_thread  # noqa: F401


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), vocab_size=257, num_hidden_layers=1)


@pytest.fixture(scope="module")
def engine(checkpoint):
    with LLM(str(checkpoint), **EXACT, num_kvcache_blocks=200, max_num_seqs=4) as llm:
        yield llm


def parse(content: dict | str, **defaults):
    text = content if isinstance(content, str) else json.dumps(content)
    return parse_line(7, text.encode("utf-8", "surrogatepass"), defaults)


@pytest.fixture
def answers_of(engine):
    """Answers lines in one engine of four running sequences, and gives them in order."""

    def answer(lines: list, **options) -> list[dict]:
        found = []
        texts = enumerate((json.dumps(x) if isinstance(x, dict) else x for x in lines), 1)
        batch.run(engine, ((i, x.encode()) for i, x in texts), found.append, {"max_tokens": 5}, **options)
        assert engine.is_finished()
        return sorted((json.loads(a.text) for a in found), key=lambda a: a["line"])

    return answer


# --- what a line may be ---


def test_a_plain_line_has_a_prompt_or_messages_beside_sampling_fields():
    request = parse({"prompt": "x", "temperature": 0, "custom_id": 3}, max_tokens=9)
    assert (request.prompt, request.custom_id, request.is_openai) == ("x", 3, False)
    assert request.params == SamplingParams(temperature=0, max_tokens=9)
    messages = [{"role": "user", "content": "x"}]
    assert parse({"messages": messages, "max_tokens": 4}, max_tokens=9).messages == messages


def test_an_openai_line_has_them_in_its_body():
    body = {"model": "m", "messages": [], "n": 2, "stop": None, "stream": False, "top_k": 4}
    body |= {"max_completion_tokens": 6, "logprobs": True, "top_logprobs": 3, "logit_bias": {"5": -1}}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    request = parse(line)
    assert (request.custom_id, request.is_openai, request.model) == ("a", True, "m")
    assert request.params == SamplingParams(n=2, top_k=4, max_tokens=6, logprobs=3, logit_bias={5: -1})


SCHEMA = {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3}


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            StructuredOutputsParams(json=SCHEMA),
        ),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputsParams(regex="a+")),
    ],
)
def test_what_a_completion_must_look_like_is_said_as_openai_or_vllm_does(asked, wanted):
    assert parse({"prompt": "x", **asked}).params.structured_outputs == wanted
    assert parse({"body": {"prompt": "x", **asked}}).params.structured_outputs == wanted


def test_a_line_gets_the_json_it_asks_for_and_a_broken_schema_is_the_error_of_its_line(answers_of):
    def openai(schema: dict) -> dict:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return {"body": {"prompt": "x", "max_tokens": 60, "seed": 3, "response_format": form}}

    good, broken, regex = answers_of(
        [openai(SCHEMA), openai({"type": "foo"}), {"prompt": "x", "structured_outputs": {"regex": "a{3}"}}]
    )
    choice = good["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    assert "line 2: sampling_params for prompt: structured_outputs=" in broken["error"]["message"]
    assert broken["error"]["message"].endswith("cannot be used: Invalid type: foo")
    assert regex["text"] == "aaa"


def test_fields_of_openai_that_change_nothing_are_accepted():
    body = {"messages": [], "model": "m", "user": "u", "metadata": {"a": "b"}, "service_tier": "auto"}
    body |= {"store": True, "safety_identifier": "s", "prompt_cache_key": "k", "parallel_tool_calls": False}
    body |= {"tool_choice": "auto", "stream": False, "echo": False, "modalities": ["text"]}
    request = parse({"custom_id": "a", "body": body})
    assert request.params == SamplingParams(max_tokens=None) and not request.rest


@pytest.mark.parametrize(
    ("asked", "count"),
    [({"logprobs": True}, 0), ({"logprobs": False}, None), ({"logprobs": 4}, 4), ({"logprobs": None}, None)],
)
def test_logprobs_may_be_asked_for_as_a_number_or_as_chats_do(asked, count):
    assert parse({"prompt": "x", **asked}).params.logprobs == count


def test_a_line_without_max_tokens_gets_256_and_one_of_openais_as_many_as_fit():
    lines = {"prompt": "x"}, {"body": {"prompt": "x"}}, {"body": {"prompt": "x", "max_tokens": None}}
    assert [parse(line).params.max_tokens for line in lines] == [256, None, None]
    assert [parse(line, max_tokens=9).params.max_tokens for line in lines] == [9] * 3  # --max-tokens 9
    required = ["--model", "m", "--input", __file__, "--output", "never-made"]
    assert "max_tokens" not in batch.parse_args(required).defaults
    assert batch.parse_args([*required, "--max-tokens", "9"]).defaults["max_tokens"] == 9


def test_lines_that_the_context_ends_are_answered_and_mentioned_once(engine):
    lines = [{"prompt": "x" * 509, "max_tokens": 9, "ignore_eos": True}, {"body": {"prompt": "x" * 509}}]
    lines += [{"prompt": "x" * 510, "max_tokens": 8, "ignore_eos": True}]
    numbered, found = [(i, json.dumps(line).encode()) for i, line in enumerate(lines)], []
    with pytest.warns(UserWarning, match=r"max_tokens=9 .* prompts\[0\], and maybe later ones") as said:
        batch.run(engine, numbered, found.append, {})
    assert len(said) == 1
    assert {answer.line: answer.num_tokens for answer in found} == {0: 3, 1: 3, 2: 2}
    assert not any(answer.is_error for answer in found)


BAD_LINES = [
    ('{"prompt": "x"', "not JSON"),
    ("[]", "must be a JSON object"),
    ("[" * 100_000, "recursion"),
    ('{"prompt": "\\ud800', "not JSON"),
    ({"body": {"prompt": "x", "foo": 1, "bar": 2}}, "unknown fields: bar, foo"),
    ({"prompt": "x", "tools": []}, "unknown fields: tools"),
    ({}, 'either "prompt" or "messages"'),
    ({"prompt": "x", "messages": []}, 'either "prompt" or "messages"'),
    ({"prompt": "x", "temperature": -1}, "temperature must be .* got -1"),
    ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format must have .* got {'type': 'xml'}"),
    ({"prompt": "x", "structured_outputs": {"xml": "a"}}, "unknown fields: xml"),
    (
        {"prompt": "x", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "either response_format or structured_outputs",
    ),
    ({"prompt": "x", "temperature": "hot"}, "temperature must be .* got 'hot'"),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias must be .* got {'a': 1}"),
    ({"prompt": "x", "max_tokens": 1, "max_completion_tokens": 2}, "differ"),
    ({"prompt": "x", "top_logprobs": 2}, "top_logprobs=2 needs logprobs"),
    ({"prompt": "x", "custom_id": []}, r"custom_id must be .* got \[\]"),
    ({"body": 5}, "body must be an object, got 5"),
    ({"body": {"prompt": "x"}, "prompt": "x"}, "unknown fields: prompt"),
    ({"body": {"prompt": "x", "stream": True}}, "unknown fields: stream"),
    ({"body": {"prompt": "x", "tool_choice": "required"}}, "unknown fields: tool_choice"),
    ({"body": {"prompt": "x", "echo": True}}, "unknown fields: echo"),
    ({"body": {"prompt": "x"}, "url": "/v1/embeddings"}, "url must be .* got '/v1/embeddings'"),
    ({"body": {"prompt": "x"}, "url": "/v1/chat/completions"}, "url must be"),
    ({"body": {"prompt": "x"}, "method": "GET"}, "method must be"),
    ({"body": {"prompt": "x", "model": 5}}, "model must be a text, got 5"),
    ('{"body": {"prompt": "x", "model": NaN}}', "not JSON: NaN"),
    ('{"prompt": "x", "temperature": -Infinity}', "not JSON: -Infinity"),
]


@pytest.mark.parametrize(("line", "complaint"), BAD_LINES)
def test_a_bad_line_says_what_is_wrong(line, complaint):
    with pytest.raises((ValueError, RecursionError), match=complaint):
        parse(line)


def test_bytes_that_are_no_text_are_a_bad_line():
    with pytest.raises(ValueError, match="utf-8"):
        parse_line(1, b'{"prompt": "\xff"}', {})


def test_what_says_nothing_of_a_line_is_no_answer_to_it():
    class Prompts:
        error: Exception

        def read(self, *_):
            raise self.error

    class Engine:
        prompts = Prompts()

    Prompts.error = NotImplementedError()
    found = batch_lines.read_request(Engine, 1, b'{"prompt": "x", "custom_id": "a"}', {})
    answer = json.loads(found.text)
    assert answer["error"]["message"] == "line 1: NotImplementedError" and answer["custom_id"] == "a"
    Prompts.error = MemoryError()
    with pytest.raises(MemoryError):
        batch_lines.read_request(Engine, 1, b'{"prompt": "x"}', {})


def test_the_seed_of_a_line_depends_on_nothing_but_the_run_and_its_number():
    seeds = [parse_line(line, b'{"prompt": "x"}', {"seed": 9}).params.seed for line in (1, 2, 1, 2**40)]
    assert seeds[0] == seeds[2] != seeds[1]
    assert parse_line(1, b'{"prompt": "x", "seed": 3}', {"seed": 9}).params.seed == 3


# --- what answers it ---


def test_answers_are_those_of_generate(answers_of, engine):
    prompts = ["".join(map(chr, range(40, 41 + i))) for i in range(30)]
    lines = [{"prompt": p, "temperature": 0, "max_tokens": 1 + i % 7} for i, p in enumerate(prompts)]
    params = [SamplingParams(0, 1 + i % 7) for i in range(30)]
    expected = engine.generate(prompts, params, use_tqdm=False)
    for number, (answer, result) in enumerate(zip(answers_of(lines), expected, strict=True), 1):
        assert answer.pop("line") == number
        assert {**answer, "num_cached_tokens": 0} == {**result, "num_cached_tokens": 0}


def test_a_chat_is_answered_in_openais_shape(answers_of, engine):
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    [answer] = answers_of([{"custom_id": "a", "body": {**body, "model": "m"}}])
    [result] = engine.chat(messages, SamplingParams(0, 3, logprobs=2), use_tqdm=False)
    assert (answer["custom_id"], answer["error"], answer["response"]["status_code"]) == ("a", None, 200)
    response = answer["response"]["body"]
    assert (response["object"], response["model"]) == ("chat.completion", "m")
    [choice] = response["choices"]
    assert choice["message"] == {"role": "assistant", "content": result["text"]}
    assert choice["finish_reason"] == "length"
    found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    drawn = [d[i].logprob for i, d in zip(result["token_ids"], result["logprobs"], strict=True)]
    assert found == pytest.approx(drawn, abs=1e-4)
    assert all(len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])
    usage, num_prompt = response["usage"], result["num_prompt_tokens"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, 3)
    assert usage["total_tokens"] == num_prompt + 3


def test_every_completion_of_a_line_is_a_choice(answers_of):
    openai, plain = answers_of(
        [
            {"body": {"prompt": "x", "n": 9, "seed": 1, "logprobs": 1}},
            {"prompt": "x", "n": 3, "seed": 1, "logprobs": 1},
        ]
    )
    choices = openai["response"]["body"]["choices"]
    assert [choice["index"] for choice in choices] == list(range(9))
    assert openai["response"]["body"]["usage"]["completion_tokens"] == 45
    assert [output["text"] for output in plain["outputs"]] == [choice["text"] for choice in choices[:3]]
    for output, choice in zip(plain["outputs"], choices, strict=False):
        places = zip(output["logprobs"], output["token_ids"], strict=True)
        found = [entries[str(token_id)]["logprob"] for entries, token_id in places]
        assert found == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)


def test_what_else_a_plain_line_has_is_handed_back(answers_of):
    rest = {"id": 7, "label": None, "meta": {"a": [1.5, "ü"]}, "model": "m", "body": "of a letter"}
    line = {"prompt": "ab", "temperature": 0, **rest, "text": "the original", "line": "first"}
    [plain, answer] = answers_of([{"prompt": "ab", "temperature": 0}, line])
    expected = {**plain, "line": 2, **rest, "input_text": "the original", "input_line": "first"}
    expected["num_cached_tokens"] = answer["num_cached_tokens"]
    assert answer == expected


def test_no_field_of_a_line_makes_its_answer_look_failed_or_takes_the_place_of_another(answers_of):
    """Readers look for an "error", and a number that no float can hold is no fault of the model's."""
    own = '"score": 1e400, "deep": [1, {"low": -1e999}], "error": null, "text": 2, "input_text": 3'
    [answer] = answers_of([f'{{"prompt": "ab", {own}}}'])
    assert isinstance(answer["text"], str) and "error" not in answer and answer["input_error"] is None
    assert (answer["score"], answer["deep"]) == ("1e400", [1, {"low": "-1e999"}])
    assert (answer["input_text"], answer["input_input_text"]) == (2, 3)
    [refused] = answers_of(['{"prompt": "ab", "temperature": 1e400}'])
    assert "temperature" in refused["error"]["message"]


def test_a_line_may_have_a_list_of_prompts(answers_of):
    prompts = ["ab", [1, 2, 3], "abcabc"]
    alone = answers_of([{"prompt": prompt, "temperature": 0, "logprobs": 1} for prompt in prompts])
    many = {"prompt": prompts, "temperature": 0, "logprobs": 1, "n": 2, "id": 5}
    plain, openai = answers_of([many, {"custom_id": "a", "body": {**many, "id": None}}])
    assert plain["id"] == 5 and [result["text"] for result in plain["results"]] == [a["text"] for a in alone]
    body = openai["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [*range(6)]
    assert [choice["text"] for choice in body["choices"]] == [a["text"] for a in alone for _ in range(2)]
    assert body["usage"]["prompt_tokens"] == sum(a["num_prompt_tokens"] for a in alone)
    assert body["usage"]["completion_tokens"] == 2 * sum(len(a["token_ids"]) for a in alone)
    [bad] = answers_of([{"prompt": ["ab", [999]]}])
    assert "prompts[1]: token ids must be integers from 0 to 256, got 999" in bad["error"]["message"]


def test_a_line_fails_with_any_of_its_prompts(answers_of, engine, monkeypatch):
    launch = engine._launch

    def failing(step, *others):
        if any(seq.prompt_token_ids == [7, 7] for seq in step.sequences):
            raise MemoryError("too much")
        launch(step, *others)

    monkeypatch.setattr(engine, "_launch", failing)
    failed, other = answers_of([{"prompt": [[1], [7, 7], [2]]}, {"prompt": "x"}])
    assert failed["error"] == {"code": "server_error", "message": "line 1: MemoryError: too much"}
    assert other["token_ids"]


def test_a_stop_text_ends_an_answer(answers_of, engine):
    [token_id] = engine.encode("A")
    always = {"prompt": "x", "max_tokens": 12, "temperature": 0, "logit_bias": {str(token_id): 100}}
    [answer] = answers_of([{**always, "stop": ["b", "AAA"]}])
    assert (answer["text"], answer["token_ids"]) == ("", [token_id] * 3)
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "AAA")


def test_bad_lines_are_answered_with_their_number_and_stop_nothing(answers_of):
    good = {"prompt": "x", "custom_id": "twice"}
    unfit = [
        {"prompt": "x" * 600, "custom_id": "long"},
        {"prompt": ""},
        {"prompt": 5},
        {"body": {"prompt": ["a", []]}},
        {"prompt": "\ud800"},
        {"prompt": [257]},
        {"messages": "x"},
        {"messages": [[{"role": "user", "content": "x"}]]},
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 5},
    ]
    lines = [x for bad in [*(line for line, _ in BAD_LINES), *unfit] for x in (bad, good)]
    answers = answers_of(lines)
    assert [answer["line"] for answer in answers] == list(range(1, len(lines) + 1))
    for bad, fine in zip(answers[::2], answers[1::2], strict=True):
        assert bad["error"]["message"].startswith(f"line {bad['line']}: ") and bad["response"] is None
        assert fine["custom_id"] == "twice" and 1 <= len(fine["token_ids"]) <= 5
    long = answers[2 * len(BAD_LINES)]
    assert long["custom_id"] == "long" and "max_model_len" in long["error"]["message"]


def test_any_text_that_json_can_hold_is_written(tmp_path):
    text = to_json({"text": "\ud800 \u2028 ü 漢"})
    assert json.loads(text) == {"text": "\ud800 \u2028 ü 漢"} and "ü 漢".encode() in text
    assert text.count(b"\n") == 1


def test_log_probabilities_that_are_no_numbers_make_an_error_and_no_broken_line():
    entry = Logprob(float("nan"), 1, "a")
    result = {"text": "a", "token_ids": [5], "finish_reason": "length", "stop_reason": None}
    result |= {"logprobs": [{5: entry}], "num_prompt_tokens": 1, "num_cached_tokens": 0}
    body = {"prompt": "x", "logprobs": 1}
    for line in ({"custom_id": "a", "body": body}, {"custom_id": "a", **body}):
        found = batch_lines.answer(parse(line), [result], "m")
        answer = json.loads(found.text, parse_constant=pytest.fail)
        assert found.is_error and (answer["line"], answer["custom_id"]) == (7, "a")
        assert "logits overflow" in answer["error"]["message"]


# --- files ---


def test_the_order_can_be_restored_by_line_and_blank_lines_are_counted(tmp_path, checkpoint, capsys):
    lines = [{"prompt": "x" * (1 + i), "max_tokens": 9 - i, "temperature": 0} for i in range(8)]
    source = write_lines(tmp_path / "in.jsonl", ["", *lines[:4], " \r", *lines[4:]])
    run_batch(checkpoint, source, tmp_path / "out.jsonl")
    answers = read_answers(tmp_path / "out.jsonl")
    assert [answer["line"] for answer in answers] == [2, 3, 4, 5, 7, 8, 9, 10]
    assert [len(answer["token_ids"]) for answer in answers] == [9 - i for i in range(8)]
    assert "8 lines, 0 of them errors, 44 tokens" in capsys.readouterr().err


def test_each_line_of_a_text_file_is_a_prompt(tmp_path, engine):
    path = tmp_path / "in.txt"
    path.write_bytes('\ufefffirst\r\n\n  \n {"zweite"} \u2028 Zeile \t\nbad '.encode() + b"\xff\n\nlast")
    output = open_output(tmp_path / "out.jsonl", False, find_lines(path))
    with contextlib.closing(output):
        lines = list(read_lines(path, output.done))
    prompts = {line: parse_line(line, text, {}).prompt for line, text in lines}
    assert prompts == {1: "first", 4: ' {"zweite"} \u2028 Zeile \t', 5: "bad \udcff", 7: "last"}
    for line, text in lines:
        found = batch_lines.read_request(engine, line, text, {})
        assert b"surrogate" in found.text if line == 5 else not isinstance(found, Answer)


def test_with_a_seed_a_resumed_run_draws_what_a_whole_one_draws(tmp_path, checkpoint):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x", "n": 2}] * 9)
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    run_batch(checkpoint, source, whole, "--seed", 5)
    texts = [[output["text"] for output in answer["outputs"]] for answer in read_answers(whole)]
    assert len({text for pair in texts for text in pair}) == 18
    held = sorted(whole.read_bytes().splitlines(keepends=True), key=len)[3:7]
    parts.write_bytes(b"".join(held))
    run_batch(checkpoint, source, parts, "--seed", 5, "--resume")
    assert [[o["text"] for o in answer["outputs"]] for answer in read_answers(parts)] == texts


def test_an_output_is_never_overwritten(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setattr(batch, "LLM", lambda *_, **__: pytest.fail("the model was loaded"))
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    with pytest.raises(ValueError, match="is the --input"):
        run_batch(checkpoint, source, source, "--resume")
    output = write_lines(tmp_path / "out.jsonl", [{"text": "of something else"}])
    with pytest.raises(ValueError, match="exists already"):
        run_batch(checkpoint, source, output)
    with pytest.raises(ValueError, match="its line 1 is no answer"):
        run_batch(checkpoint, source, output, "--resume")
    assert json.loads(output.read_text()) == {"text": "of something else"}
    with contextlib.closing(open_output(tmp_path / "other.jsonl", False, find_lines(source))):
        with pytest.raises(ValueError, match="another run"):
            run_batch(checkpoint, source, tmp_path / "other.jsonl", "--resume")


@pytest.mark.parametrize("options", [["--temperature", "-1"], ["--seed", "-1"], ["--max-tokens", "0"]])
def test_bad_options_are_named_before_a_model_is_loaded(tmp_path, checkpoint, monkeypatch, options):
    monkeypatch.setattr(batch, "LLM", lambda *_, **__: pytest.fail("the model was loaded"))
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    with pytest.raises(ValueError, match=options[0].strip("-").replace("-", ".")):
        run_batch(checkpoint, source, tmp_path / "out.jsonl", *options)
    assert os.listdir(tmp_path) == ["in.jsonl"]


@pytest.mark.parametrize("kind", ["missing", "a folder", "a pipe"])
def test_an_input_that_cannot_be_read_twice_is_refused_before_there_is_an_output(tmp_path, checkpoint, kind):
    source = tmp_path / "in.jsonl"
    if kind != "missing":
        (source.mkdir if kind == "a folder" else lambda: os.mkfifo(source))()
    with pytest.raises(ValueError, match=r"--input .*in\.jsonl is no regular file"):
        run_batch(checkpoint, source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_run_with_nothing_left_to_answer_loads_no_model(tmp_path, checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(batch, "LLM", lambda *_, **__: pytest.fail("the model was loaded"))
    source = write_lines(tmp_path / "in.jsonl", ["", {"prompt": "x"}])
    output = write_lines(tmp_path / "out.jsonl", [{"line": 2}])
    for options in ([], ["--data-parallel", 2]):
        run_batch(checkpoint, source, output, "--resume", *options)
        assert "0 lines, 0 of them errors" in capsys.readouterr().err
    assert json.loads(output.read_text()) == {"line": 2}


DAMAGED = ["[" * 100_000, "5", "{}", '{"line": "1"}', '{"line": 1.0}', '{"line": true}', '{"line": null}']
DAMAGED += [f'{{"line": {line}}}' for line in (0, -1, 4, 10**11, "9" * 30, "9" * 5000)]


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: line[:20])
def test_a_damaged_output_is_not_resumed(tmp_path, line):
    output = write_lines(tmp_path / "out.jsonl", [{"line": 3}, line])
    before = output.read_bytes()
    with pytest.raises(ValueError, match="its line 2 is no answer to one of the 3 lines"):
        open_output(output, True, bytearray(b"\1\0\0\0"))
    assert output.read_bytes() == before


def test_a_line_that_is_too_long_is_never_held_whole_and_moves_no_number(tmp_path, monkeypatch, answers_of):
    for module in (batch_files, batch_lines):
        monkeypatch.setattr(module, "MAX_LINE", 100)
    fits = '{"prompt": "x"}'.ljust(99)
    path = write_lines(tmp_path / "in.jsonl", ["x" * 5000, fits, fits + " ", "", "x" * 2**21])
    path.write_bytes(path.read_bytes() + b"{" * 101)  # without a line feed
    assert find_lines(path) == b"\1\0\0\0\1\0\0"
    lines = list(read_lines(path, find_lines(path)))
    assert [line for line, _ in lines] == [1, 2, 3, 5, 6] and max(len(text) for _, text in lines) == 101
    answers = answers_of([text.decode() for _, text in lines])
    found = [a["error"]["message"] if a.get("error") else "fine" for a in answers]
    assert found == [f"line {i}: longer than 100 bytes" if i != 2 else "fine" for i in range(1, 6)]


def test_a_refused_line_that_waits_keeps_nothing_of_its_text(engine, monkeypatch):
    waiting = []

    def read_all_ahead(items):
        waiting.extend(items)
        return waiting

    monkeypatch.setattr(batch, "read_ahead", read_all_ahead)
    texts = [b"no JSON" * 9000, b'{"prompt": "%s"}' % (b"x" * 9000)]
    found = []
    batch.run(engine, enumerate(texts, 1), found.append, {})
    assert found == waiting and all(isinstance(x, Answer) and len(x.text) < 2000 for x in waiting)


@pytest.mark.parametrize("stderr", [slow("closed"), "a full disk"])
def test_a_run_goes_on_where_its_progress_cannot_be_shown(tmp_path, checkpoint, stderr):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x", "max_tokens": 2}] * 50)
    files = ["--model", checkpoint, "--input", source, "--output", tmp_path / "out.jsonl"]
    command = [sys.executable, "-m", "nanovllm.batch", *map(str, files), *ENGINE]
    if stderr == "closed":
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, cwd=ROOT, stderr=full, timeout=100)
    assert done.returncode == 0
    assert [answer["line"] for answer in read_answers(tmp_path / "out.jsonl")] == list(range(1, 51))


@pytest.mark.parametrize("error", [RuntimeError("rank 1 has died"), MemoryError()])
def test_a_run_that_its_machine_ends_says_that_it_can_be_resumed(monkeypatch, error):
    def fail(argv):
        raise error

    monkeypatch.setattr(batch, "main", fail)
    with pytest.raises(SystemExit, match="^nanovllm.batch: (rank 1 has died|MemoryError); --resume goes on"):
        batch.run_command()


@pytest.mark.parametrize("lines, code", [(["{", "x"], 1), (["{", {"prompt": "x"}], None), ([], None)])
def test_a_run_has_failed_if_every_line_has(tmp_path, checkpoint, lines, code):
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    files = ["--model", str(checkpoint), "--input", str(source), "--output", str(output)]
    failed = pytest.raises(SystemExit, match="every line was answered with an error")
    with failed if code else contextlib.nullcontext():
        batch.run_command([*files, *ENGINE])
    assert len(read_answers(output)) == len(lines)


def test_a_run_that_is_interrupted_ends_as_shells_expect(monkeypatch, capsys):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "main", interrupted)
    with pytest.raises(SystemExit) as end:
        batch.run_command()
    assert end.value.code == 130
    assert capsys.readouterr().err == "nanovllm.batch: interrupted; --resume goes on from here\n"


@pytest.mark.parametrize("rest", [b"", b"{", b'{"line": 2, "te', b'{"line": 2}'])
def test_resuming_cuts_off_a_last_line_that_is_not_whole(tmp_path, checkpoint, rest):
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}, {"prompt": "y"}, "{"])
    output = tmp_path / "out.jsonl"
    output.write_bytes(b'{"line": 1}\n' + rest)
    run_batch(checkpoint, source, output, "--resume")
    answers = read_answers(output)
    assert [answer["line"] for answer in answers] == [1, 2, 3]
    assert answers[0] == {"line": 1} and "token_ids" in answers[1] and "error" in answers[2]
    before = output.read_bytes()
    run_batch(checkpoint, source, output, "--resume")
    assert output.read_bytes() == before


def test_a_line_is_written_whole_however_little_a_call_writes(tmp_path, monkeypatch):
    write, text = os.write, to_json({"line": 1, "text": "x" * 50})
    monkeypatch.setattr(os, "write", lambda file, rest: write(file, bytes(rest)[:7]))
    with contextlib.closing(open_output(tmp_path / "out.jsonl", False, bytearray(2))) as output:
        output.write(Answer(1, text, 0, False))
    assert (tmp_path / "out.jsonl").read_bytes() == text


def test_a_process_killed_at_any_moment_leaves_whole_lines(tmp_path):
    path, draw, num_held = tmp_path / "out.jsonl", random.Random(0), 0
    path.touch()
    for _ in range(12):
        size = path.stat().st_size
        if (child := os.fork()) == 0:
            output = open_output(path, True, bytearray(10**6))
            for line in range(num_held + 1, 10**6):
                output.write(Answer(line, to_json({"line": line, "text": "x" * (line % 5000)}), 0, False))
        while path.stat().st_size < size + 10**5:  # a busy machine may take long
            time.sleep(0.001)
        time.sleep(draw.uniform(0.01, 0.04))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        answers = read_answers(path)
        assert [answer["line"] for answer in answers] == list(range(1, len(answers) + 1))
        assert all(len(answer["text"]) == answer["line"] % 5000 for answer in answers[num_held:])
        num_held = len(answers)
    assert num_held > 1000


def test_a_killed_run_is_resumed_without_a_duplicate_or_a_gap(tmp_path, checkpoint):
    num_lines, output = 600, tmp_path / "out.jsonl"
    lines = [{"prompt": f"question {i}", "temperature": 0} for i in range(num_lines)]
    source = write_lines(tmp_path / "in.jsonl", [*lines[:-1], "no JSON"])
    files = ["--model", checkpoint, "--input", source, "--output", output, "--resume"]
    command = [sys.executable, "-m", "nanovllm.batch", *map(str, files), *ENGINE, "--max-tokens", "4"]
    command += ["--max-num-seqs", "8"]  # or else hundreds would end at one moment
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not output.exists() or not output.stat().st_size:  # until it has loaded the model
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(random.Random(0).random() * 0.1)
        process.send_signal(signal.SIGKILL)
    assert len(read_answers(output)) < num_lines
    run_batch(checkpoint, source, output, "--resume")
    answers = read_answers(output)
    assert [answer["line"] for answer in answers] == list(range(1, num_lines + 1))
    assert [answer["line"] for answer in answers if answer.get("error")] == [num_lines]


def test_a_user_error_is_one_line(tmp_path):
    files = ["--model", "m", "--input", str(tmp_path / "missing"), "--output", str(tmp_path / "out")]
    command = [sys.executable, "-m", "nanovllm.batch", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("nanovllm.batch: ") and "missing" in done.stderr
    assert "Traceback" not in done.stderr


# --- bounded memory ---


@pytest.mark.parametrize("limit", [None, 1, 3])
def test_requests_are_taken_only_as_room_appears(engine, limit):
    taken = finished = most = 0

    def requests():
        nonlocal taken
        for i in range(60):
            taken += 1
            yield [i + 1] * 3, SamplingParams(0, 1 + i % 5, n=1 + i % 2)

    for _ in engine.generate_from(requests(), limit):
        finished += 1
        most = max(most, taken - finished)
    assert taken == finished == 60
    assert most <= (limit or 8)  # twice max_num_seqs; the last may have more than one completion


def test_a_long_file_is_read_no_further_than_the_engine_has_room(engine):
    taken = finished = most = 0

    def lines():
        nonlocal taken
        for i in range(1, 1501):
            taken += 1
            yield i, b'{"prompt": "x", "max_tokens": 1}'

    def report(_: Answer) -> None:
        nonlocal finished, most
        finished += 1
        most = max(most, taken - finished)

    batch.run(engine, lines(), report, {})
    assert taken == finished == 1500
    assert most <= 8 + 9 * 32


def test_a_line_that_the_engine_fails_with_is_answered_with_its_error(answers_of, engine, monkeypatch):
    launch = engine._launch

    def failing(step, *others):
        if any(seq.prompt_token_ids == [7, 7] for seq in step.sequences):
            raise MemoryError("too much")
        launch(step, *others)

    lines = [{"prompt": prompt, "temperature": 0} for prompt in ([1, 2, 3], [7, 7], [], [4, 5])]
    lines[1]["custom_id"] = "a"
    engine.scheduler.clear()  # neither time is anything in the cache
    expected = answers_of(lines)
    engine.scheduler.clear()
    monkeypatch.setattr(engine, "_launch", failing)
    answers = answers_of(lines)
    error = {"code": "server_error", "message": "line 2: MemoryError: too much"}
    assert answers.pop(1) == {"id": "line-2", "line": 2, "custom_id": "a", "response": None, "error": error}
    expected.pop(1)
    assert answers == expected and answers[1]["error"]["code"] == "invalid_request"


def test_an_error_while_requests_are_taken_leaves_the_engine_empty(engine):
    def requests():
        yield "x", SamplingParams()
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(engine.generate_from(requests()))
    with pytest.raises(ValueError, match=r"prompts\[1\] is empty"):
        list(engine.generate_from([("x", SamplingParams()), ("", SamplingParams())]))
    assert engine.is_finished() and not engine.unfinished
    assert list(engine.generate_from([])) == []


def test_what_reading_ahead_raises_reaches_the_reader():
    def items():
        yield 1
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        list(batch.read_ahead(items()))
    assert list(batch.read_ahead(iter(range(1000)))) == list(range(1000))


# --- spans and Parquet ---


def test_the_lines_are_those_that_the_output_does_not_hold(tmp_path):
    lines = ["", "x", " ", "second \u2028 one", "", *map(str, range(20)), "the last has no line feed"]
    path = tmp_path / "in.jsonl"
    path.write_bytes("\n".join(lines).encode())
    with contextlib.closing(open_output(tmp_path / "out.jsonl", False, find_lines(path))) as output:
        for line in (2, 9, 10, 11, 12):
            output.done[line] = 1
        found = list(read_lines(path, output.done))
    assert [line for line, _ in found] == [4, 6, 7, 8, *range(13, 27)]
    assert all(text.decode().removesuffix("\n") == lines[line - 1] for line, text in found)


def write_parquet(path: Path, rows: list[dict]) -> Path:
    pytest.importorskip("pyarrow", reason="Parquet files need pyarrow, part of the `ray` extra")
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist(rows), path, row_group_size=7)
    return path


def read_parts(folder: Path) -> dict[int, dict]:
    from pyarrow import parquet

    parts = sorted(folder.glob("part-*.parquet"))  # beside them a kill may leave one that is not finished
    rows = [row for part in parts for row in parquet.read_table(part).to_pylist()]
    answers = {row["line"]: json.loads(row["answer"]) for row in rows}
    assert len(answers) == len(rows)
    return answers


def test_parquet_is_read_and_written_and_resumed(tmp_path, checkpoint, monkeypatch):
    rows = [{"prompt": f"question {i}", "temperature": 0.0, "max_tokens": 1 + i % 5} for i in range(20)]
    rows += [{"messages": [{"role": "user", "content": "x"}]}, {"custom_id": "c", "prompt": "x", "seed": 1}]
    rows[0] |= {"score": 0.5, "scores": [1.5, float("nan")]}
    rows[1] |= {"score": float("nan")}  # as tables write that there is none
    columns = dict.fromkeys(name for row in rows for name in row)
    source = write_parquet(tmp_path / "in.parquet", [{**columns, **row} for row in rows])
    whole, parts = tmp_path / "whole.parquet", tmp_path / "parts.parquet"
    run_batch(checkpoint, source, whole)
    answers = read_parts(whole)
    assert sorted(answers) == list(range(1, 23)) and answers[22]["custom_id"] == "c"
    assert (answers[1]["score"], answers[1]["scores"]) == (0.5, [1.5, None]) and "score" not in answers[2]
    assert [len(answers[line]["token_ids"]) for line in range(1, 21)] == [1 + i % 5 for i in range(20)]

    monkeypatch.setattr(batch_files, "ANSWERS_PER_PART", 5)
    write = batch_files.ParquetOutput._write_part

    def write_thrice(self):
        if len(self._parts()) == 3:
            raise OSError("the disk is full")
        write(self)

    monkeypatch.setattr(batch_files.ParquetOutput, "_write_part", write_thrice)
    with pytest.raises(OSError, match="the disk is full"):
        run_batch(checkpoint, source, parts)
    monkeypatch.setattr(batch_files.ParquetOutput, "_write_part", write)
    assert len(read_parts(parts)) == 15
    with pytest.raises(ValueError, match="exists already"):
        run_batch(checkpoint, source, parts)
    run_batch(checkpoint, source, parts, "--resume")
    resumed = read_parts(parts)
    assert sorted(resumed) == list(range(1, 23))
    assert all(resumed[line]["token_ids"] == answers[line]["token_ids"] for line in range(1, 21))


def test_rows_of_a_parquet_file_are_its_lines_whatever_its_groups(tmp_path):
    path = write_parquet(tmp_path / "in.parquet", [{"prompt": str(i), "n": None} for i in range(20)])
    with contextlib.closing(open_output(tmp_path / "out.jsonl", False, find_lines(path))) as output:
        output.done[5] = 1
        found = list(read_lines(path, output.done))
    assert found == [(i + 1, b'{"prompt": "%d"}' % i) for i in range(20) if i != 4]


def write_answers(output: batch_files.Output, lines: Iterable[int]) -> None:
    for line in lines:
        output.write(Answer(line, to_json({"line": line}), 0, False))
    output.close()


def test_a_part_of_a_parquet_output_is_never_overwritten(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow", reason="Parquet files need pyarrow, part of the `ray` extra")
    monkeypatch.setattr(batch_files, "ANSWERS_PER_PART", 2)
    folder = tmp_path / "out.parquet"
    write_answers(open_output(folder, False, bytearray(7)), range(1, 7))
    (folder / "part-000000.parquet").unlink()
    output = open_output(folder, True, bytearray(7))
    assert output.done == b"\0\0\0\1\1\1\1"
    write_answers(output, range(1, 3))
    assert sorted(read_parts(folder)) == list(range(1, 7))


def test_a_damaged_parquet_output_is_not_resumed(tmp_path):
    folder = tmp_path / "out.parquet"
    folder.mkdir()
    for rows in ([{"line": 1}, {"line": 4}], [{"line": -1}], [{"line": True}], [{"line": None}], [{"x": 1}]):
        write_parquet(folder / "part-000000.parquet", rows)
        complaint = rf"line {len(rows)} of its part-000000\.parquet is no answer"
        with pytest.raises(ValueError, match=complaint):
            open_output(folder, True, bytearray(4))
    (folder / "part-000000.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match="its part-000000"):
        open_output(folder, True, bytearray(4))


def test_a_parquet_run_that_is_killed_is_resumed_without_a_duplicate_or_a_gap(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow", reason="Parquet files need pyarrow, part of the `ray` extra")
    monkeypatch.setattr(batch_files, "ANSWERS_PER_PART", 8)
    folder, draw, num_lines = tmp_path / "out.parquet", random.Random(0), 20_000
    kills = 0
    for _ in range(6):
        if (child := os.fork()) == 0:
            output = open_output(folder, True, bytearray(num_lines + 1))
            write_answers(output, [i for i in range(1, num_lines + 1) if not output.done[i]])
            os._exit(0)
        time.sleep(draw.uniform(0.05, 0.2))
        os.kill(child, signal.SIGKILL)
        kills += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        answers = read_parts(folder)
        assert sorted(answers) == list(range(1, len(answers) + 1)) and len(answers) % 8 == 0
    assert kills == 6 and answers


def test_without_ray_the_message_says_what_to_install(tmp_path, checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "nanovllm.extensions.batch.ray", raising=False)
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    with pytest.raises(ValueError, match="--data-parallel needs Ray: pip install"):
        run_batch(checkpoint, source, tmp_path / "out.jsonl", "--data-parallel", 2)
