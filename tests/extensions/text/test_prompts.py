"""What may be given as prompts, conversations and parameters."""

import json
import sys

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from tiny_checkpoints import EXACT, edit_json, make_checkpoint, one_thread  # noqa: F401

GREEDY = SamplingParams(0, 4, True)
IDS = [[1, 2, 3], [4, 5, 6]]
TEXTS = ["hello", "you"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=1, vocab_size=257)
    edit_json(folder / "generation_config.json", do_sample=False, max_new_tokens=7, temperature=0.6)
    return str(folder)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **EXACT, num_kvcache_blocks=200) as llm:
        yield llm


def answers(llm: LLM, prompts, params=GREEDY) -> list[list[int]]:
    return [result["token_ids"] for result in llm.generate(prompts, params, use_tqdm=False)]


class Column:
    """As the columns of the datasets library are: nothing but a sequence."""

    def __init__(self, values: list):
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int):
        return self.values[index]

    def __iter__(self):
        return iter(self.values)


class Series(Column):
    """As pandas has them: a sequence with the methods of a mapping, and one that makes a list of it."""

    def keys(self) -> range:
        return range(len(self.values))

    def tolist(self) -> list:
        return self.values


class Table:
    """As the tables of pandas are: no dict, and what it gives one by one are the names of its columns."""

    def keys(self) -> list[str]:
        return ["prompt"]

    def __iter__(self):
        return iter(self.keys())


@pytest.mark.parametrize(
    "collect", [tuple, iter, Column, Series, lambda x: (each for each in x), lambda x: np.array(x)]
)
@pytest.mark.parametrize("prompts", [TEXTS, IDS], ids=["texts", "token ids"])
def test_prompts_may_be_any_ordered_collection(llm, collect, prompts):
    assert answers(llm, collect(prompts)) == answers(llm, prompts)


@pytest.mark.parametrize("convert", [torch.tensor, np.array, lambda ids: np.array(ids, np.uint8), tuple])
def test_token_ids_may_be_an_array(llm, convert):
    expected = answers(llm, IDS)
    assert answers(llm, [convert(ids) for ids in IDS]) == expected
    assert answers(llm, convert(IDS[0])) == expected[:1]  # one prompt
    assert answers(llm, {"prompt_token_ids": convert(IDS[0])}) == expected[:1]
    assert len(llm.score([convert(IDS[0])], use_tqdm=False)[0]["token_logprobs"]) == 3


def test_rows_of_a_tensor_are_prompts(llm):
    assert answers(llm, torch.tensor(IDS)) == answers(llm, IDS)


@pytest.mark.parametrize(
    "prompts",
    [{"a", "b"}, b"ab", Table(), {"a": TEXTS}, np.array("hello"), np.array(5)],
    ids=["set", "bytes", "table", "dict", "text in an array", "number in an array"],
)
def test_what_has_no_order_or_no_prompts_is_refused(llm, prompts):
    with pytest.raises(ValueError, match="prompts"):
        answers(llm, prompts)


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("use", ["generate", "stream", "score", "add_request"])
@pytest.mark.parametrize("prompt", [CHAT, [CHAT], CHAT[0]], ids=["one", "several", "a message"])
def test_a_conversation_is_told_to_be_for_chat(llm, use, prompt):
    with pytest.raises(ValueError, match=r"^prompt(s\[0\])? .*conversation, which `chat` takes: .*role"):
        getattr(llm, use)(prompt)
    assert llm.is_finished()


@pytest.mark.parametrize("use", ["stream", "add_request"])
def test_several_prompts_in_the_place_of_one_are_told_to_be_such(llm, use):
    told = r"^prompt must be one prompt; `generate` takes a list of texts: \['hello', 'you'\]$"
    with pytest.raises(ValueError, match=told):
        getattr(llm, use)(TEXTS)
    with pytest.raises(ValueError, match=r"^prompts\[0\] must be one prompt"):
        llm.generate([TEXTS])


def test_fractions_are_no_token_ids(llm):
    with pytest.raises(ValueError, match="token ids must be integers from 0 to .*, got 0.5"):
        answers(llm, [torch.tensor([0.5, 1.0])])


# --- parameters ---


def test_none_is_what_the_checkpoint_recommends(llm):
    expected = SamplingParams(temperature=0, max_tokens=7)
    assert llm.get_default_sampling_params() == llm.default_sampling_params() == expected
    given = answers(llm, TEXTS, expected)
    assert answers(llm, TEXTS, None) == given
    assert [result["token_ids"] for result in llm.generate(TEXTS, use_tqdm=False)] == given
    assert "".join(llm.stream(TEXTS[0])) == llm.generate(TEXTS[0], expected, use_tqdm=False)[0]["text"]
    llm.add_request(TEXTS[0])
    while not llm.is_finished():
        finished, _ = llm.step()
    assert finished[0][1] == given[0]


@pytest.mark.parametrize(
    "use",
    [lambda llm, pair: llm.generate([pair[0]], [pair[1]]), lambda llm, pair: list(llm.generate_from([pair]))],
)
def test_parameters_of_single_prompts_are_not_left_open(llm, use):
    with pytest.raises(
        ValueError, match=r"sampling_params for prompts\[0\] must be SamplingParams, got None"
    ):
        use(llm, ("hello", None))


def test_a_recommendation_may_be_changed(llm):
    params = llm.get_default_sampling_params()
    params.max_tokens, params.stop = 3, ["\n"]
    assert len(answers(llm, "hello", params)[0]) <= 3
    assert llm.get_default_sampling_params().max_tokens == 7


def test_what_is_assigned_is_checked_when_it_is_used(llm):
    params = SamplingParams()
    params.top_p = 7
    with pytest.raises(ValueError, match="top_p must be above 0 and at most 1, got 7"):
        answers(llm, "hello", params)
    with pytest.raises(AttributeError, match="temprature"):
        params.temprature = 1


@pytest.mark.parametrize(
    "read",
    [
        lambda llm, params: llm.prompts.read(TEXTS[0], params),
        lambda llm, params: llm.prompts.read_all(TEXTS, [params] * 2)[1],
    ],
    ids=["one", "all"],
)
@pytest.mark.parametrize(
    "name, before, after", [("presence_penalty", -1.0, -2.0), ("seed", 5, 5 + 2**61 - 1)]
)
def test_each_call_sees_what_is_assigned_and_keeps_nothing_of_the_caller(llm, read, name, before, after):
    """-1.0 and -2.0 have the same hash in Python, and so have 5 and 5 + 2**61 - 1."""
    params = SamplingParams(0, 5, True)
    num_references = sys.getrefcount(params)
    for value in (before, after):
        setattr(params, name, value)
        assert getattr(read(llm, params).params, name) == value
    assert sys.getrefcount(params) == num_references


@pytest.mark.parametrize("name, good, bad", [("n", 1, True), ("stop_token_ids", (1,), (True,))])
def test_a_flag_does_not_pass_for_the_number_that_an_earlier_call_had(llm, name, good, bad):
    assert answers(llm, "hello", SamplingParams(0, 5, True, **{name: good}))
    params = SamplingParams(0, 5, True)
    setattr(params, name, bad)
    with pytest.raises(ValueError, match=f"{name} must be .*got .*True"):
        answers(llm, "hello", params)


def test_a_request_keeps_the_parameters_that_it_was_made_with(llm):
    params = SamplingParams(0, 5, True)
    results = llm.generate_iter(TEXTS, params)
    params.max_tokens = 2
    assert [len(result["token_ids"]) for _, result in results] == [5, 5]


# --- conversations ---

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
STRINGS = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
ADDED = "{% for m in messages %}{{ '<' + m['content'] + '>' }}{% endfor %}"
LISTS = "{% for m in messages %}{% for p in m['content'] %}({{ p['text'] }}){% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m['content'] is string %}" + STRINGS[len("{% for m in messages %}") : -12]
)
EITHER += "{% else %}{% for p in m['content'] %}({{ p['text'] }}){% endfor %}{% endif %}{% endfor %}"
DUMPED = "{% for m in messages %}{{ m['content'] | tojson }};{% endfor %}"


@pytest.mark.parametrize(
    "template, text",
    [
        (STRINGS, "one\ntwo;"),
        (ADDED, "<one\ntwo>"),
        (LISTS, "(one)(two)"),
        (EITHER, "(one)(two)"),
        (DUMPED, '"one\\ntwo";'),
    ],
    ids=["strings", "strings added", "parts", "either", "dumped"],
)
def test_a_template_gets_parts_as_it_wants_them(llm, template, text):
    [result] = llm.chat([{"role": "user", "content": PARTS}], GREEDY, use_tqdm=False, chat_template=template)
    assert result.prompt == text


@pytest.mark.parametrize(
    "form, text", [("string", "one\ntwo;"), ("openai", "(one)(two)"), ("auto", "(one)(two)")]
)
def test_the_form_of_contents_may_be_said(llm, form, text):
    options = dict(chat_template=EITHER, chat_template_content_format=form)
    [result] = llm.chat([{"role": "user", "content": PARTS}], GREEDY, use_tqdm=False, **options)
    assert result.prompt == text
    [result] = llm.chat([{"role": "user", "content": "one"}], GREEDY, use_tqdm=False, **options)
    assert result.prompt == ("(one)" if form == "openai" else "one;")


def test_a_message_that_calls_tools_needs_no_content(llm):
    """As the openai package writes an answer without its empty fields."""
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
    chat = [{"role": "user", "content": PARTS}, called, {"role": "tool", "content": "42"}]
    shown = "{{ m.content if m.content is string else m.tool_calls[0].function.name }};"
    template = "{% for m in messages %}" + shown + "{% endfor %}"
    for form in "string", "auto":
        options = dict(chat_template=template, chat_template_content_format=form, use_tqdm=False)
        [result] = llm.chat(chat, GREEDY, **options)
        assert result.prompt == "one\ntwo;f;42;"
    with pytest.raises(ValueError, match="role and content, or tool_calls, got {'role': 'assistant'}"):
        llm.chat([{"role": "assistant"}], GREEDY, **options)


@pytest.mark.parametrize(
    "shown, text",
    [
        ("{{ arguments | tojson }}", '{"a": [1, "b"]}'),  # as of Llama 3.1 and Qwen2.5
        ("{% for name in arguments.keys() %}{{ name }}{% endfor %}", "a"),  # GLM-4.5
        ("{{ 'json ' + arguments }}", 'json {"a":[1,"b"]}'),  # DeepSeek-V3
    ],
)
def test_arguments_of_tools_may_be_json_whatever_the_template_wants(llm, shown, text):
    """OpenAI's messages have them as a text."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":[1,"b"]}'}}
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    arguments = "{% set arguments = messages[1].tool_calls[0].function.arguments %}"
    [result] = llm.chat(chat, GREEDY, use_tqdm=False, chat_template=arguments + shown)
    assert result.prompt == text and call["function"]["arguments"] == '{"a":[1,"b"]}'


@pytest.mark.parametrize(
    "calls", [7, [7], [{"function": 7}], [{"function": {"arguments": "{"}}], [{}]], ids=str
)
def test_calls_of_tools_that_cannot_be_read_are_the_templates_business(llm, calls):
    template = "{{ messages[0].tool_calls | tojson }}"
    [result] = llm.chat(
        [{"role": "assistant", "tool_calls": calls}], GREEDY, use_tqdm=False, chat_template=template
    )
    assert json.loads(result.prompt) == calls


def test_a_part_may_be_a_bare_text_and_must_be_one(llm):
    options = dict(chat_template=STRINGS, use_tqdm=False)
    [result] = llm.chat([{"role": "user", "content": ["one", *PARTS]}], GREEDY, **options)
    assert result.prompt == "one\none\ntwo;"
    image = {"type": "image_url", "image_url": {"url": "x"}}
    for part, problem in (
        (image, "models here read text alone"),
        ({}, "all parts of a content must be texts"),
    ):
        with pytest.raises(ValueError, match=f"conversation 0: .*{problem}, got"):
            llm.chat([{"role": "user", "content": [*PARTS, part]}], GREEDY, **options)
    with pytest.raises(
        ValueError, match="chat_template_content_format must be one of auto, string, openai, got 'x'"
    ):
        llm.chat([{"role": "user", "content": "one"}], GREEDY, chat_template_content_format="x", **options)


def test_conversations_may_be_a_column(llm):
    chat = [{"role": "user", "content": "hi"}]
    results = llm.chat(Column([chat, chat]), GREEDY, use_tqdm=False)
    assert [result.prompt for result in results] == ["[user]hi\n[assistant]"] * 2
