"""Text while it is made: whole characters, nothing taken back, and in the end the tokenizer's own text.

With three kinds of tokenizer: SmolLM2's, a byte-level BPE trained here, and one like SentencePiece's, which
writes a space as part of the word after it and rare characters byte by byte.
"""

import functools
import gc
import weakref

import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from open_checkpoints import open_checkpoint
from smollm2 import smollm2_gguf  # noqa: F401
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from nanovllm.engine.sequence import Request, Sequence, SequenceStatus
from nanovllm.extensions.checkpoints.made_up import toy_tokenizer
from nanovllm.extensions.text.detokenizer import INCOMPLETE, Detokenizer, vocabulary_of
from nanovllm.extensions.text.results import GrowingText, completion_text
from nanovllm.sampling_params import SamplingParams

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
    seq = Sequence(Request([0], SamplingParams(max_tokens=10_000, **params)))
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
        pieces.append(text.take_delta())
    return pieces, seq


some_characters = st.sampled_from("abe the\n .é日👍👩\u200d🏽ß")
texts = st.text(st.one_of(some_characters, st.characters(codec="utf-8")), max_size=25)


@settings(max_examples=75, deadline=None)
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


@settings(max_examples=75, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_of_any_tokens_join_to_the_text(tokenizer, data, skip):
    """Also of bytes that are no text, and of special tokens between words."""
    some = st.one_of(st.integers(0, len(tokenizer) - 1), st.integers(0, 270))
    token_ids = data.draw(st.lists(some, max_size=25))
    pieces, _ = grow(tokenizer, token_ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@settings(max_examples=75, deadline=None)
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
    assert "".join(pieces) == completion_text(tokenizer, seq) == text[: text.index(stop)]
    ends = [i for i in range(len(token_ids) + 1) if stop in tokenizer.decode(token_ids[:i])]
    assert seq.completion_token_ids == token_ids[: ends[0]]


def test_a_character_is_shown_when_no_later_byte_can_spoil_it():
    tokenizer = like_sentencepiece()
    euro = tokenizer.encode("a€", add_special_tokens=False)
    spoilt, after = [*euro, tokenizer.convert_tokens_to_ids("<0xFF>")], tokenizer.convert_tokens_to_ids("b")
    assert grow(tokenizer, [*euro, after])[0] == ["a", "", "", "", "€b"]
    pieces, _ = grow(tokenizer, [*spoilt, after])
    assert "".join(pieces) == tokenizer.decode([*spoilt, after]) == "a" + 4 * INCOMPLETE + "b"


class WholeWindow:
    """What a Detokenizer is to say, found by decoding all that is not settled anew for every token."""

    def __init__(self, tokenizer, skip_special_tokens: bool):
        self.decode = functools.partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self.hidden = set(tokenizer.all_special_ids) if skip_special_tokens else set()
        self.invalid = (
            [tokenizer.convert_tokens_to_ids("<0xFF>")] if "<0xFF>" in tokenizer.get_vocab() else []
        )
        self.text, self.num_settled, self.context, self.window = "", 0, [], []

    def add(self, token_id: int) -> None:
        if token_id in self.hidden:
            return
        self.window.append(token_id)
        settled, text = self.decode(self.context), self.decode(self.context + self.window)
        new = text[len(settled) :]
        self.text = self.text[: self.num_settled] + new.rstrip(INCOMPLETE)
        whole = new and not new.endswith(INCOMPLETE)
        if whole and self.decode(self.context + self.window + self.invalid).startswith(text):
            self.context, self.window, self.num_settled = self.window, [], len(self.text)


ALPHABET = toy_tokenizer().convert_ids_to_tokens(list(range(256)))
ids_of = functools.cache(lambda tokenizer: tokenizer.get_vocab())


def byte_tokens(tokenizer, data: bytes) -> list[int]:
    """Tokens of one byte each, of which every kind of tokenizer has nearly all."""
    ids = ids_of(tokenizer)
    names = [f"<0x{byte:02X}>" for byte in data] if "<0xFF>" in ids else [ALPHABET[byte] for byte in data]
    return [ids[name] for name in names if name in ids]


PARTS = [
    "€".encode()[:2],
    b"\x80",
    b"\x80\xff",
    "€".encode()[2:] + "€".encode()[:2],
    INCOMPLETE.encode(),
    " ab二".encode(),
]
parts = st.one_of(texts.map(str.encode), st.binary(max_size=4), st.sampled_from(PARTS))
runs = st.builds(lambda data, count: (data * count)[:60], parts, st.integers(1, 40))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_what_is_said_of_a_long_run_is_what_decoding_all_of_it_says(tokenizer, data, skip):
    """After every token: of bytes that are text, half a character or none; of ids without a text; mixed."""
    token_ids = []
    for _ in range(data.draw(st.integers(1, 6))):
        if data.draw(st.booleans()):
            token_ids += byte_tokens(tokenizer, data.draw(runs))
        elif data.draw(st.booleans()):
            token_ids += tokenizer.encode(data.draw(texts), add_special_tokens=False)
        else:
            some = [len(tokenizer) + 5, tokenizer.eos_token_id, *tokenizer.encode(INCOMPLETE)]
            token_ids += [data.draw(st.sampled_from(some))] * data.draw(st.integers(1, 30))
    assert_says_what_all_of_it_says(tokenizer, token_ids, skip)


def assert_says_what_all_of_it_says(tokenizer, token_ids: list[int], skip: bool = True) -> None:
    text, whole = Detokenizer(tokenizer, skip), WholeWindow(tokenizer, skip)
    for token_id in token_ids:
        text.add([token_id])
        whole.add(token_id)
        assert (text.text, text.num_settled) == (whole.text, whole.num_settled)


@pytest.mark.parametrize("data", PARTS, ids=str)
def test_what_is_said_of_a_run_that_begins_the_text_is_what_decoding_all_of_it_says(tokenizer, data):
    assert_says_what_all_of_it_says(tokenizer, byte_tokens(tokenizer, data * 20) + tokenizer.encode("a b"))


def test_a_run_of_bytes_is_not_taken_for_text_where_the_tokenizer_has_its_own_way_to_show_it():
    tokenizer = like_sentencepiece()
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("€", "EUR")]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    assert_says_what_all_of_it_says(tokenizer, byte_tokens(tokenizer, "€".encode() * 20))


@pytest.mark.parametrize("data", [*PARTS, "二十".encode() + b"\xff", None], ids=str)
def test_a_token_costs_the_same_however_many_came_before_it(tokenizer, monkeypatch, data):
    """In a run of bytes that are no text, or not yet; of ids that are no token."""
    count = 2000
    token_ids = [len(tokenizer) + 5] if data is None else byte_tokens(tokenizer, data)
    token_ids = (token_ids * count)[:count] + tokenizer.encode("ab", add_special_tokens=False)
    assert num_decoded(tokenizer, token_ids, monkeypatch) < 50 * count


def test_tokens_that_all_end_within_a_character_cost_the_same_too(monkeypatch):
    """The end of one and the beginning of the next: nothing is settled, and yet all but the last is known."""
    alphabet, merges = dict(zip(ALPHABET, range(256), strict=True)), [("â", "Ĥ"), ("¬", "âĤ")]
    bpe = Tokenizer(models.BPE({**alphabet, "âĤ": 256, "¬âĤ": 257}, merges))
    bpe.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe)
    assert num_decoded(tokenizer, [256, *[257] * 2000], monkeypatch) < 50 * 2000


def num_decoded(tokenizer, token_ids: list[int], monkeypatch) -> int:
    """How many tokens are decoded while these come one by one."""
    text, lengths = Detokenizer(tokenizer), []
    decode = text._decode
    monkeypatch.setattr(text, "_decode", lambda window: (lengths.append(len(window)), decode(window))[1])
    for token_id in token_ids:
        text.add([token_id])
    assert text.text == tokenizer.decode(token_ids, skip_special_tokens=True).rstrip(INCOMPLETE)
    return sum(lengths)


def test_the_texts_of_tokens_are_kept_as_long_as_their_tokenizer():
    tokenizer = byte_level_bpe()
    assert vocabulary_of(tokenizer) is vocabulary_of(tokenizer)
    assert {i: vocabulary_of(tokenizer)[i] for i in range(300)} == {
        i: tokenizer.decode([i]) for i in range(300)
    }
    alive = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert alive() is None


def test_tokens_without_a_text_are_not_looked_at_again(tokenizer, monkeypatch):
    text = Detokenizer(tokenizer)
    text.add(tokenizer.encode("ab", add_special_tokens=False))
    monkeypatch.setattr(text, "_decode", None)
    before, shown = text.num_tokens, text.text
    text.add([tokenizer.eos_token_id] * 5)
    assert text.num_tokens == before + 5 and text.text == shown
