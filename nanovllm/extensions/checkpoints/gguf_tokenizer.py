"""The tokenizer that a GGUF file's metadata describe.

It is built with the `tokenizers` library and wrapped for transformers, so callers see one kind.
"""

import warnings
from typing import Any

# Regexes and their parts, by what they match.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BEFORE = r"[^\r\n\p{L}\p{N}]?"  # a word: a space or a sign
WORD = rf"{BEFORE}\p{{L}}+"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SIGNS = r" ?[^\s\p{L}\p{N}]+"
OTHERS, OTHERS_OR_PATH = rf"{SIGNS}[\r\n]*|{SPACES}", rf"{SIGNS}[\r\n/]*|{SPACES}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SMALL_WORD, CAPITAL_WORD = f"{BEFORE}{UPPER}*{LOWER}+", f"{BEFORE}{UPPER}+{LOWER}*"
SIGN_AND_LATIN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
CHINESE_OR_KANA, CHINESE_OR_HANGUL = "[一-龥぀-ゟ゠-ヿ]+", "[一-龥ࠀ-一가-\ud7ff]+"
PUNCTUATION = r"\s?[!-/:-~！-／：-～‘-‟　-。]+"
# Letters of scripts that have capitals, as DeepSeek LLM's tokenizer.json lists them.
CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "Ὗ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎ"
    "ꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
# How text is cut before merging, by regexes one after the other, and what `tokenizer.ggml.pre` calls it.
# Source: the tokenizer.json of models whose files have these names; "default" says nothing of them.
CUTS = [
    ("gpt-2 default phi-2 mpt olmo jais trillion exaone4 gigachat a.x-4.0 mellum modern-bert", [GPT2]),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", [r"\p{N}", GPT2]),
    ("falcon", [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"]),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe glm4 chatglm-bpe",
        [rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{OTHERS}"],
    ),
    (
        "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open kormo grok-2",
        [rf"{CONTRACTION}|{WORD}|\p{{N}}|{OTHERS}"],
    ),
    ("tekken", [rf"{SMALL_WORD}|{CAPITAL_WORD}|\p{{N}}|{OTHERS_OR_PATH}"]),
    (
        "gpt-4o llama4 kanana2 talkie minimax-m2",
        [rf"{SMALL_WORD}{CONTRACTION}?|{CAPITAL_WORD}{CONTRACTION}?|\p{{N}}{{1,3}}|{OTHERS_OR_PATH}"],
    ),
    ("deepseek-coder", [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE_OR_HANGUL, r"\p{N}"]),
    ("deepseek-llm", [r"[\r\n]", rf"\s?[{CASED}]+", PUNCTUATION, r"\s+$", CHINESE_OR_HANGUL, r"\p{N}+"]),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        [
            r"\p{N}{1,3}",
            CHINESE_OR_KANA,
            rf"{SIGN_AND_LATIN}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
        ],
    ),
    ("seed-coder", [rf"{CONTRACTION}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"]),
]
SPLITS = {name: regexes for names, regexes in CUTS for name in names.split()}
SPLITS_BY_ARCHITECTURE = {"qwen2": "qwen2", "qwen3": "qwen2"}
# Their vocabularies have words that merges do not lead to. Where metadata do not say, they begin with BOS.
WHOLE_WORDS = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken".split()
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
    added = (
        AddedToken(token, special=type_ == CONTROL, normalized=False)
        for token, type_ in zip(tokens, given.get("token_type", []), strict=False)
        if type_ in (CONTROL, USER_DEFINED)
    )
    tokenizer.add_tokens([*added])
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    ids = {name: given.get(f"{key}_token_id") for key, name in names.items()}
    named = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    begins = kind == "llama" or given.get("pre") in WHOLE_WORDS
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
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORDS))
    steps = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in SPLITS[pre]]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_tokenizer(given: dict[str, Any], vocabulary: dict[str, int]) -> Any:
    """SentencePiece's BPE: neighbours merge into the token of highest score; unknown characters are bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens = given["tokens"]
    if sum(map(len, tokens)) > MAX_CHARACTERS:
        raise ValueError(f"its tokens have more than {MAX_CHARACTERS} characters")
    types = given.get("token_type", [NORMAL] * len(tokens))
    scored = zip(given["scores"], tokens, types, strict=True)
    merges = [
        (token[:cut], token[cut:])
        for _, token, type_ in sorted(scored, key=lambda each: -each[0])
        if type_ == NORMAL and len(token) <= LONGEST_MERGED
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    unknown = tokens[given.get("unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    encode = [normalizers.Replace(" ", "▁")]
    decode = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if given.get("add_space_prefix", True):
        encode.insert(0, normalizers.Prepend("▁"))
        decode.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = normalizers.Sequence(encode), decoders.Sequence(decode)
    return tokenizer
