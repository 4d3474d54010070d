"""Text while it is made: whole characters, nothing taken back, and in the end the tokenizer's own text.

With three kinds of tokenizer: SmolLM2's, a byte-level BPE trained here, and one like SentencePiece's, which
writes a space as part of the word after it and rare characters byte by byte.
"""

import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from smollm2 import smollm2_gguf  # noqa: F401
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from nanovllm.engine.completions import GrowingText
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checkpoint import open_checkpoint
from nanovllm.utils.detokenizer import INCOMPLETE, Detokenizer

CORPUS = ["the quick brown fox", "naïve café", "日本語のテキスト", "a  b\n\n  c", "👍🏽 emoji 👩\u200d👩"] * 3


def byte_level_bpe() -> transformers.PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def like_sentencepiece() -> transformers.PreTrainedTokenizerFast:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghijklmnopqrst",
    ]
    merges = [("▁", "a"), ("t", "h"), ("th", "e"), ("▁", "the"), ("a", "b"), ("▁", "▁"), ("▁▁", "▁▁")]
    vocabulary = {token: i for i, token in enumerate([*tokens, *map("".join, merges)])}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture(scope="module", params=["SmolLM2", "byte-level BPE", "like SentencePiece"])
def tokenizer(request):
    if request.param == "SmolLM2":
        return open_checkpoint(str(request.getfixturevalue("smollm2_gguf"))).tokenizer()
    return byte_level_bpe() if request.param == "byte-level BPE" else like_sentencepiece()


def grow(tokenizer, token_ids: list[int], sizes: list[int] = [1], **params) -> tuple[list[str], Sequence]:  # noqa: B006
    """The pieces that are seen while tokens come, so many at a time, and the sequence in the end."""
    seq = Sequence([0], SamplingParams(max_tokens=10_000, **params))
    text, pieces, sizes = GrowingText(tokenizer, seq), [], [*sizes, 1]
    while token_ids and not seq.is_finished:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        for token_id in token_ids[:size]:
            seq.append_token(token_id)
        token_ids = token_ids[size:]
        if seq.sampling_params.stop and (stop := text.find_stop()) is not None:
            seq.stop_reason, seq.status = stop, SequenceStatus.FINISHED
        elif not token_ids:
            seq.status = SequenceStatus.FINISHED
        pieces.append(text.look())
    return pieces, seq


some_characters = st.sampled_from("abe the\n .é日👍👩\u200d🏽ß")
texts = st.text(st.one_of(some_characters, st.characters(codec="utf-8")), max_size=25)


@settings(max_examples=150, deadline=None)
@given(text=texts, sizes=st.lists(st.integers(1, 4), max_size=20))
@example(text=" leading", sizes=[])
@example(text="  two", sizes=[])
@example(text="\n\n x", sizes=[])
@example(text="a👍🏽b👩‍👩‍👧c日本語", sizes=[])
def test_pieces_are_whole_characters_and_join_to_the_text(tokenizer, text, sizes):
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(token_ids)
    pieces, _ = grow(tokenizer, token_ids, sizes)
    assert "".join(pieces) == whole
    if INCOMPLETE not in whole:
        assert not any(INCOMPLETE in piece for piece in pieces)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_of_any_tokens_join_to_the_text(tokenizer, data, skip):
    """Also of bytes that are no text, and of special tokens between words."""
    some = st.one_of(st.integers(0, len(tokenizer) - 1), st.integers(0, 270))
    token_ids = data.draw(st.lists(some, max_size=25))
    pieces, _ = grow(tokenizer, token_ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(text=texts.filter(bool), data=st.data())
def test_a_stop_text_is_found_at_the_token_that_completes_it_wherever_borders_are(tokenizer, text, data):
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    text = tokenizer.decode(token_ids)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : data.draw(st.integers(start + 1, start + 5))]
    if not stop or INCOMPLETE in text:
        return
    pieces, seq = grow(tokenizer, token_ids, stop=["never seen", stop])
    assert seq.stop_reason == stop
    assert "".join(pieces) == seq.text == text[: text.index(stop)]
    ends = [i for i in range(len(token_ids) + 1) if stop in tokenizer.decode(token_ids[:i])]
    assert seq.completion_token_ids == token_ids[: ends[0]]


def test_a_character_is_shown_when_no_later_byte_can_spoil_it():
    tokenizer = like_sentencepiece()
    euro = tokenizer.encode("a€", add_special_tokens=False)
    spoilt, after = [*euro, tokenizer.convert_tokens_to_ids("<0xFF>")], tokenizer.convert_tokens_to_ids("b")
    assert grow(tokenizer, [*euro, after])[0] == ["a", "", "", "", "€b"]
    pieces, _ = grow(tokenizer, [*spoilt, after])
    assert "".join(pieces) == tokenizer.decode([*spoilt, after]) == "a" + 4 * INCOMPLETE + "b"


def test_tokens_without_a_text_are_not_looked_at_again(tokenizer, monkeypatch):
    text = Detokenizer(tokenizer)
    text.add(tokenizer.encode("ab", add_special_tokens=False))
    monkeypatch.setattr(text, "_decode", None)
    before, shown = text.num_tokens, text.text
    text.add([tokenizer.eos_token_id] * 5)
    assert text.num_tokens == before + 5 and text.text == shown
