"""The tokenizer that a GGUF file's metadata describe.

It is built with the `tokenizers` library and wrapped for transformers, so callers see one kind.
"""

import warnings
from typing import Any

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# `tokenizer.ggml.pre` -> how text is cut before merging; None is GPT-2's way, built into `tokenizers`.
SPLITS = {
    "gpt-2": None,
    "default": None,
    "smollm": None,
    "qwen2": rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{OTHERS}",
    "llama-bpe": rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{OTHERS}",
}
SPLITS_BY_ARCHITECTURE = {"qwen2": "qwen2", "qwen3": "qwen2"}
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # of `tokenizer.ggml.token_type`
LONGEST_MERGED = 256  # characters; a longer token is not the product of merges
MAX_CHARACTERS = 2**22  # of all tokens together; several times what the largest vocabularies have


def tokenizer_from_gguf(metadata: dict[str, Any]) -> Any:
    """The tokenizer that a GGUF file describes, or None. Raises ValueError for an unknown kind."""
    from tokenizers import AddedToken, processors
    from transformers import PreTrainedTokenizerFast

    builders = {"gpt2": _byte_pair_tokenizer, "llama": _sentencepiece_tokenizer}
    given = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind = given.get("model")
    if kind is None:
        return None
    if kind not in builders:
        raise ValueError(f"tokenizer.ggml.model {kind!r} is not known; known ones: {', '.join(builders)}")
    tokens = given["tokens"]
    tokenizer = builders[kind](given, {token: i for i, token in enumerate(tokens)})
    types = given.get("token_type", [])
    for wanted, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        chosen = [tokens[i] for i, type_ in enumerate(types) if type_ == wanted]
        add([AddedToken(token, special=wanted == CONTROL, normalized=False) for token in chosen])
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {name: given.get(f"{key}_token_id") for key, name in names.items()}
    named = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    # If the metadata does not say, these kinds begin with BOS.
    begins = kind == "llama" or given.get("pre") == "llama-bpe"
    if given.get("add_bos_token", begins) and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, ids["bos_token"])]
        )
    named |= {"chat_template": given.get("tokenizer.chat_template"), "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def _byte_pair_tokenizer(given: dict[str, Any], vocabulary: dict[str, int]) -> Any:
    """GPT-2's: text is cut in the way that `pre` names, and merges work on the bytes of its pieces."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = given.get("pre", "default")
    if pre == "default":  # as in files of converters that knew no others
        pre = SPLITS_BY_ARCHITECTURE.get(given.get("general.architecture"), pre)
    if pre == "default":
        warnings.warn(
            f"tokenizer.ggml.pre is {given.get('pre')!r}, which does not say how to cut text: it is cut as "
            "by GPT-2, which may give other tokens than in training; tokenizer='...' names another tokenizer",
            stacklevel=2,
        )
    if pre not in SPLITS:
        raise ValueError(f"tokenizer.ggml.pre {pre!r} is not known; known ones: {', '.join(SPLITS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in given["merges"]]
    # Llama 3's vocabulary has words that its merges do not lead to.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    steps = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    if SPLITS[pre] is not None:
        steps.append(pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=SPLITS[pre] is None))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_tokenizer(given: dict[str, Any], vocabulary: dict[str, int]) -> Any:
    """SentencePiece's BPE: neighbours merge into the token of highest score; unknown characters are bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, scores = given["tokens"], given["scores"]
    types = given.get("token_type", [NORMAL] * len(tokens))
    if sum(map(len, tokens)) > MAX_CHARACTERS:
        raise ValueError(f"its tokens have more than {MAX_CHARACTERS} characters")
    merged = [i for i in range(len(tokens)) if types[i] == NORMAL and len(tokens[i]) <= LONGEST_MERGED]
    merges = [
        (token[:cut], token[cut:])
        for token in (tokens[i] for i in sorted(merged, key=lambda i: -scores[i]))
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    unknown = tokens[given.get("unknown_token_id", 0)]
    model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    encode = [normalizers.Replace(" ", "▁")]
    decode = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if given.get("add_space_prefix", True):
        encode.insert(0, normalizers.Prepend("▁"))
        decode.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(encode), decoders.Sequence(decode)
    return tokenizer
