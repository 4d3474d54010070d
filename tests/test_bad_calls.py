"""Bad calls of every kind are refused with the value at fault and leave the engine as it was. A thousand made
ones are here (`tests/long/bad_calls.py` makes ten thousand), and one test for each bug that they found.
"""

import re
import warnings

import numpy as np
import pytest
from bad_calls import GOOD, KINDS, USER, Engines, deep, endless, run

from nanovllm import LLM, SamplingParams
from nanovllm.utils.validation import MAX_SHOWN, shown
from tiny_checkpoints import EXACT, edit_json, make_checkpoint, one_thread  # noqa: F401


@pytest.fixture(scope="module")
def shared_engines(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=1, num_hidden_layers=1)
    with Engines(str(folder)) as engines:
        yield engines


@pytest.fixture
def engines(shared_engines):
    """Engines that must be empty and answer as ever after the test."""
    yield shared_engines
    shared_engines.assert_empty()
    assert shared_engines.answers() == shared_engines.expected


@pytest.fixture
def llm(engines):
    return engines.llm


def test_a_thousand_bad_calls_are_refused_and_good_ones_in_between_answered_as_ever(engines):
    made, longest = run(engines, 1000, seed=1)
    assert set(made) == set(KINDS) and longest < 5


# --- how a value is shown ---


@pytest.mark.parametrize(
    "value", [None, -1, "a", "ä\ud800", [1, "a", None], {"a": [1.5]}, {3}, b"x"], ids=ascii
)
def test_a_short_value_is_shown_as_its_repr(value):
    assert shown(value) == repr(value)


@pytest.mark.parametrize(
    "value, text",
    [
        ("x" * 10**6, "'xxx"),
        (10**400, "1000"),
        (-(10**5000), "an integer of 16610 bits"),
        ([1] * 10**6, "[1, 1, 1, "),
        (deep(100_000), "[[[[["),
        (endless(), "[1, 2, [1, 2, "),
        ([[[[[[[1] * 20] * 20] * 20] * 20] * 20] * 20] * 20, "[[[[["),
        (type("Raises", (), {"__repr__": lambda self: 1 / 0})(), "<Raises instance"),
        (type("Surrogate", (), {"__repr__": lambda self: "\ud800"})(), r"\ud800"),
        (type("list", (), {})(), "<list, whose repr raises"),
        (type("Long", (), {"__repr__": lambda self: "x" * 10**6})(), "xxx"),
    ],
    ids=lambda x: x if isinstance(x, str) and len(x) < 50 else "",
)
def test_any_value_is_shown_in_a_line_or_two_that_can_be_printed(value, text):
    assert shown(value).startswith(text)
    assert len(shown(value).encode()) <= MAX_SHOWN


# --- bugs ---


def test_numbers_of_numpy_do_not_overflow(llm):
    """They made a request that never ended: 100 tokens and uint8(200) more were 44."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = SamplingParams(0, np.uint8(200), ignore_eos=True, min_tokens=np.uint8(199))
        [result] = llm.generate([[1] * 100], params, use_tqdm=False)
        assert len(result["token_ids"]) == 200
        seeded = SamplingParams(1.0, 4, seed=np.int64(2**63 - 1), n=np.uint8(2))
        assert len(llm.generate([[1]], seeded, use_tqdm=False)[0]["outputs"]) == 2
        with pytest.warns(UserWarning, match="max_tokens=65500 reaches beyond"):  # and 300 more are 264
            [result] = llm.generate([[1] * 300], SamplingParams(0, np.uint16(65500), True), use_tqdm=False)
        assert 300 + len(result["token_ids"]) == llm.prompts.max_num_tokens


@pytest.mark.parametrize("token_id", [320, 2**40, 10**400])
def test_stop_tokens_beyond_the_vocabulary_are_refused(llm, token_id):
    """With min_tokens they were written to logits that are not there."""
    for min_tokens in (0, 2):
        params = SamplingParams(0, 4, stop_token_ids=[1, token_id], min_tokens=min_tokens)
        with pytest.raises(ValueError, match=r"stop_token_ids must be integers from 0 to 319, got \d+"):
            llm.generate([[1]], params, use_tqdm=False)


def test_an_end_token_beyond_the_vocabulary_is_never_drawn(tmp_path):
    folder = make_checkpoint(tmp_path, tokenizer=False)
    edit_json(folder / "generation_config.json", eos_token_id=[5, 400])
    with LLM(str(folder), **EXACT, num_kvcache_blocks=20) as llm:
        assert llm.generate([[1]], SamplingParams(0, 4, min_tokens=2), use_tqdm=False)
        assert llm.config.eos == (5,)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_texts_with_a_lone_surrogate_are_no_texts(name):
    for value in (["\ud800"], ["a", "b\udfffc"]):
        with pytest.raises(ValueError, match=rf"{name} .*lone surrogate .*got .*\\ud"):
            SamplingParams(**{name: value})


def test_a_lone_surrogate_is_named_and_shown_escaped(llm):
    for use in (
        lambda: llm.generate("a" * 500 + "\ud800" + "b" * 500, GOOD, use_tqdm=False),
        lambda: llm.chat([{"role": "user", "content": "a\ud800"}], GOOD, use_tqdm=False),
        lambda: llm.chat([USER], GOOD, use_tqdm=False, chat_template="a\ud800"),
        lambda: llm.encode("\ud800"),
    ):
        with pytest.raises(
            ValueError, match=r"(prompts\[0\]|conversation 0|text) .*'\\ud800' at \d"
        ) as error:
            use()
        str(error.value).encode()


def test_white_space_can_be_a_bad_word(llm):
    """A space was an error in a step, and a line feed forbade the space instead."""
    space, line_feed = llm.encode(" "), llm.encode("\n")
    bad_words = llm.parts.logits_processor("bias").bad_words
    assert bad_words(SamplingParams(bad_words=[" "])) == [space]
    assert bad_words(SamplingParams(bad_words=["\n"])) == [line_feed, space + line_feed]
    assert llm.generate([[1]], SamplingParams(0, 4, bad_words=[" ", "\n"]), use_tqdm=False)


def test_a_bad_word_without_a_token_is_refused(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text, **_: [])
    with pytest.raises(ValueError, match="bad_words has 'unknown'"):
        llm.generate([[1]], SamplingParams(0, 4, bad_words=["unknown"]), use_tqdm=False)


@pytest.mark.parametrize("request_id", [True, 1.0, None, "1", [], np.float64(1)], ids=repr)
def test_what_only_equals_a_request_id_aborts_nothing(llm, request_id):
    made = llm.add_request([1], GOOD)
    try:
        with pytest.raises(ValueError, match=re.escape(f"request_id must be an integer, got {request_id!r}")):
            llm.abort(request_id)
        with pytest.raises(ValueError, match="request_id"):
            llm.abort(float(made))
        assert list(llm.unfinished) == [made]
    finally:
        llm.abort(made)
        llm.step()


@pytest.mark.parametrize(
    "token_ids", [5, "abc", None, [-1], [10**400], [320], [[65]], [True], [1.0]], ids=ascii
)
def test_what_is_no_list_of_token_ids_has_no_text(llm, token_ids):
    shown_at_least = re.escape(repr(token_ids).strip("[]")[:20])
    with pytest.raises(ValueError, match=f"token_ids.*{shown_at_least}"):
        llm.decode(token_ids)
    assert llm.decode([]) == "" and llm.decode((np.int64(65),)) == llm.decode([65])


def test_a_prompt_nested_beyond_what_python_can_write_is_refused(llm):
    with pytest.raises(ValueError, match="token ids must be integers from 0 to .*, got "):
        llm.generate(deep(100_000), GOOD, use_tqdm=False)
    with pytest.raises(ValueError, match="stop must be "):
        SamplingParams(stop=deep(100_000))


def test_the_bad_one_of_many_values_is_shown():
    with pytest.raises(ValueError, match=r"stop_token_ids .*at fault: -7\), got \[1, 1, .*\.\.\."):
        SamplingParams(stop_token_ids=[1] * 1000 + [-7])


@pytest.mark.parametrize(
    "name", "dtype kv_cache_dtype load_format model_impl attention_backend device".split()
)
@pytest.mark.parametrize("value", [np.array(["auto"]), np.array(["auto", "cpu"]), b"cpu", 10**30], ids=repr)
def test_what_only_looks_like_a_name_is_refused(shared_engines, name, value):
    with pytest.raises(ValueError, match=re.escape(f"got {value!r}")):
        LLM(shared_engines.folder, **{**EXACT, name: value})


@pytest.mark.parametrize(
    "name", ["max_num_seqs", "max_model_len", "num_kvcache_blocks", "kvcache_block_size"]
)
@pytest.mark.parametrize("value", [2**31, 2**63, 10**400], ids=["2**31", "2**63", "10**400"])
def test_a_size_beyond_all_memory_is_refused_by_its_name(shared_engines, name, value):
    most = 65535 if name == "max_num_seqs" else 2147483647
    with pytest.raises(
        ValueError, match=f"{name} must be .*an integer from .* to {most}, got {str(value)[:20]}"
    ):
        LLM(shared_engines.folder, **{**EXACT, name: value})


@pytest.mark.parametrize("model", [None, 5, b"model", ["model"], np.array(1)], ids=repr)
def test_a_model_is_a_name_or_a_path(model):
    with pytest.raises(ValueError, match=re.escape(f"model must be a name or a path, got {model!r}")):
        LLM(model)


@pytest.mark.parametrize(
    "options",
    [
        dict(chat_template=5),
        dict(add_generation_prompt="no"),
        dict(continue_final_message=0),
        dict(tools={"name": "f"}),
        dict(tools=[5]),
        dict(chat_template_kwargs=["a"]),
        dict(chat_template_kwargs={5: 1}),
        dict(use_tqdm="no"),
    ],
    ids=repr,
)
def test_options_of_a_chat_have_types(llm, options):
    [(name, value)] = options.items()
    with pytest.raises(ValueError, match=f"{name} must be .*, got {re.escape(repr(value))}"):
        llm.chat([USER], GOOD, **{"use_tqdm": False, **options})


@pytest.mark.parametrize("name", ["messages", "tools", "tokenize", "self", "conversation", "chat_template"])
def test_what_chat_sets_cannot_be_set_for_the_template(llm, name):
    with pytest.raises(ValueError, match=f"chat_template_kwargs cannot have '{name}'"):
        llm.chat([USER], GOOD, chat_template_kwargs={name: 1})


@pytest.mark.parametrize("message", [{"role": 5, "content": "a"}, {"role": "user", "content": 5.5}], ids=repr)
def test_a_message_is_made_of_texts(llm, message):
    with pytest.raises(ValueError, match=r"conversation 0: (role must be .*got 5|content must be .*got 5.5)"):
        llm.chat([USER, message], GOOD, use_tqdm=False)
    parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    assert llm.chat([parts, {"role": "assistant", "content": None}], GOOD, use_tqdm=False)
