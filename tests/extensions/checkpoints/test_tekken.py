"""Mistral's own file of a tokenizer, tekken.json, where a checkpoint has no other."""

import base64
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from open_checkpoints import open_checkpoint
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams
from tiny_checkpoints import (
    EXACT,
    make_checkpoint,
    make_tokenizer,
    one_thread,  # noqa: F401
)

SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
UNUSED = 3  # ids between the special tokens that have names and the first byte
HELLO = [*range(256, 260)]  # the four merges
CHAT = "<s>{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"
OPTIONS = EXACT | dict(num_kvcache_blocks=20)


def write_tekken(folder: Path, has_special_tokens: bool = True, **changes) -> None:
    """A vocabulary of the bytes, four merges, and one token more than `default_vocab_size` counts."""
    words = [bytes([i]) for i in range(256)] + [b"he", b"ll", b"hell", b"hello", b"unused"]
    tokens = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate(words)
    ]
    num_special = len(SPECIAL) + UNUSED
    config = {"pattern": r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+", "num_vocab_tokens": len(words)}
    config |= {"default_vocab_size": num_special + 260, "default_num_special_tokens": num_special}
    content = {"config": config | {"version": "v11"}, "vocab": tokens}
    if has_special_tokens:
        named = enumerate(SPECIAL)
        content["special_tokens"] = [{"rank": i, "token_str": s, "is_control": True} for i, s in named]
    (folder / "tekken.json").write_text(json.dumps(content | changes))


@pytest.fixture
def folder(tmp_path):
    folder = make_checkpoint(tmp_path, "mistral", tokenizer=False)
    write_tekken(folder)
    (folder / "chat_template.jinja").write_text(CHAT)
    from transformers.integrations.mistral import convert_tekken_tokenizer

    try:
        convert_tekken_tokenizer(str(folder / "tekken.json"))
    except ImportError:
        pytest.skip("this version of transformers needs mistral-common for every file")
    return folder


def test_text_becomes_tokens_behind_the_first_one_and_back(folder):
    tokenizer, first = open_checkpoint(folder).tokenizer(), len(SPECIAL) + UNUSED
    assert tokenizer.encode("hello") == [1, first + HELLO[3]]
    assert tokenizer.encode("hell 1") == [1, first + HELLO[2], first + ord(" "), first + ord("1")]
    text = "Ünï 漢字 hello\n\tx"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert tokenizer.encode("unused") == [1, *(first + byte for byte in b"unused")]
    assert len(tokenizer) == first + 260 and tokenizer.eos_token_id == 2


def test_the_engine_reads_it(folder):
    with LLM(str(folder), **OPTIONS) as llm:
        greedy = SamplingParams(0, 4, True)
        (by_text,) = llm.generate(["hello"], greedy, use_tqdm=False)
        (by_tokens,) = llm.generate([[1, len(SPECIAL) + UNUSED + HELLO[3]]], greedy, use_tqdm=False)
        (chat,) = llm.chat([[{"role": "user", "content": "hello"}]], greedy, use_tqdm=False)
        (asked,) = llm.generate([[1, 3, len(SPECIAL) + UNUSED + HELLO[3], 4]], greedy, use_tqdm=False)
    assert by_text["token_ids"] == by_tokens["token_ids"] and chat["token_ids"] == asked["token_ids"]


def test_a_tokenizer_for_another_model_may_be_one(tmp_path, folder):
    other = tmp_path / "tokenizer"
    other.mkdir()
    (folder / "tekken.json").rename(other / "tekken.json")
    with LLM(str(folder), **OPTIONS, tokenizer=str(other)) as llm:
        assert llm.encode("hello") == [1, len(SPECIAL) + UNUSED + HELLO[3]]


@pytest.mark.skipif(find_spec("mistral_common") is not None, reason="mistral-common is installed")
def test_a_file_that_needs_mistral_common_says_what_to_do(tmp_path):
    folder = make_checkpoint(tmp_path / "model", "mistral", tokenizer=False)
    write_tekken(folder, has_special_tokens=False)
    with pytest.raises(
        ValueError,
        match=r"model: .*install mistral-common, or name another tokenizer with tokenizer='\.\.\.'",
    ):
        LLM(str(folder), **OPTIONS)


def test_another_tokenizer_in_the_folder_comes_first(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3")
    before = open_checkpoint(folder).tokenizer().encode("hello")
    write_tekken(folder)
    assert open_checkpoint(folder).tokenizer().encode("hello") == before


class MistralCommonBackend:
    """What transformers takes for such a folder if mistral-common is installed."""

    chat_template = None


def test_another_tokenizer_comes_first_with_mistral_common_too(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path, "mistral")
    write_tekken(folder)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: MistralCommonBackend())
    tokenizer = open_checkpoint(folder).tokenizer()
    assert tokenizer.encode("hello") == make_tokenizer().encode("hello")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "[user]a\n"


@pytest.mark.parametrize("changes", [{"vocab": "bytes"}, {"config": {}}, {"special_tokens": [{}]}], ids=str)
def test_a_damaged_file_is_named(folder, changes):
    write_tekken(folder, **changes)
    with pytest.raises(ValueError, match=f"{folder}: transformers cannot read the tokenizer"):
        open_checkpoint(folder).tokenizer()


def test_it_may_be_as_large_as_published_ones_are(folder):
    content = (folder / "tekken.json").read_text()
    (folder / "tekken.json").write_text(content + " " * 2**24)
    assert open_checkpoint(folder).tokenizer().encode("hello")
