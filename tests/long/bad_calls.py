"""Ten thousand bad calls of every public way to call, each of which must be refused with the value at fault.

    python tests/long/bad_calls.py --count 10000 --seed 0

What is made here is bad by definition: of a type that the argument never has, out of its documented range,
or at odds with another argument. Each kind of bad call is a function below that gives a call and what its
message must show. `run` makes the calls on small engines, and good ones in between, whose answers must stay.
"""

import argparse
import asyncio
import math
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import paths  # noqa: F401
import torch
from block_pool import check_pool
from engines import observer_of

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.config import Config
from nanovllm.extensions.safety.sampling_checks import MAX_N
from nanovllm.extensions.text.stop_texts import StopTexts
from tiny_checkpoints import EXACT, make_checkpoint

VOCAB, LENGTH, NUM_BLOCKS = 320, 512, 20
OPTIONS = dict(**EXACT, num_kvcache_blocks=NUM_BLOCKS, max_num_batched_tokens=40, max_num_seqs=8)
GOOD = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
USER = {"role": "user", "content": "hello"}
LONGEST_MESSAGE = 1500


class Engines:
    """The engines that all calls are made on, and what they answered before the first bad one."""

    def __init__(self, folder: str):
        self.folder = folder
        self.llm = LLM(folder, **OPTIONS)
        self.front = AsyncLLM(folder, **OPTIONS)
        self.loop = asyncio.new_event_loop()
        self.expected = self.answers()

    def answers(self) -> list[Any]:
        results = self.llm.generate(["hello", [1, 2, 3]], GOOD, use_tqdm=False)
        results.append(self.loop.run_until_complete(self.front.generate("hello", GOOD)))
        return [[result["token_ids"], result["text"]] for result in results]

    def assert_empty(self) -> None:
        for llm in (self.llm, self.front.llm):
            assert llm.is_finished() and not llm.scheduler.waiting and not llm.scheduler.running
            assert not llm.unfinished and not observer_of(llm, StopTexts).texts
            check_pool(llm.scheduler.block_manager, [])

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *_: Any) -> None:
        self.llm.exit()
        self.front.exit()
        self.loop.close()


class Raises:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Long:
    def __repr__(self) -> str:
        return "Long" * 10**5


class Unprintable:
    def __repr__(self) -> str:
        return "Unprintable \ud800"


def endless() -> list:
    values: list = [1, 2]
    values.append(values)
    return values


def deep(levels: int) -> list:
    values: list = [1]
    for _ in range(levels):
        values = [values]
    return values


def nested(rng: Random, depth: int = 3) -> Any:
    """Lists in lists in dicts."""
    if depth == 0:
        return rng.choice([1, 2.5, "a", None])
    values = [nested(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return values if rng.random() < 0.7 else {"values": values}


# One maker for each kind of value; which kinds an argument may have is said where it is used.
VALUES: dict[str, Callable[[Random], Any]] = {
    "none": lambda rng: None,
    "bool": lambda rng: rng.choice([True, False]),
    "integer": lambda rng: rng.choice([-1, 1]) * rng.randint(1000, 9999),
    "huge": lambda rng: rng.choice([1, -1]) * 10 ** rng.choice([30, 400, 5000]),
    "float": lambda rng: rng.uniform(-100, 100),
    "not finite": lambda rng: rng.choice([math.nan, math.inf, -math.inf]),
    "complex": lambda rng: complex(rng.randint(1, 9), 1),
    "text": lambda rng: "no such " + "".join(rng.choices("abcxyz, äß二👍", k=rng.randint(1, 30))),
    "surrogate": lambda rng: "ab"[: rng.randint(0, 2)] + chr(rng.randint(0xD800, 0xDFFF)),
    "bytes": lambda rng: rng.randbytes(rng.randint(0, 300)),
    "list": lambda rng: [nested(rng) for _ in range(rng.randint(1, 4))],
    "deep list": lambda rng: deep(rng.choice([5, 50, 10_000])),
    "endless list": lambda rng: endless(),
    "tuple": lambda rng: (nested(rng),),
    "dict": lambda rng: {"values": nested(rng)},
    "set": lambda rng: {rng.choice(["a", 2.5, None])},
    "array": lambda rng: np.arange(rng.choice([0, 1, 2, 5000])),
    "array of one": lambda rng: np.array(rng.choice(["auto", 1, True, 0.5])),
    "numpy integer": lambda rng: rng.choice([np.int64, np.uint8, np.int16])(rng.randint(10, 99)),
    "numpy float": lambda rng: rng.choice([np.float16, np.float32, np.float64])(rng.uniform(0.1, 0.9)),
    "numpy bool": lambda rng: np.bool_(rng.random() < 0.5),
    "object": lambda rng: object(),
    "class": lambda rng: rng.choice([int, SamplingParams, Raises]),
    "function": lambda rng: len,
    "generator": lambda rng: (i for i in range(3)),
    "repr raises": lambda rng: Raises(),
    "long repr": lambda rng: Long(),
    "unprintable": lambda rng: Unprintable(),
}
NUMBERS = {"integer", "huge", "float", "not finite", "numpy integer", "numpy float"}
INTEGERS = {"integer", "huge", "numpy integer"}
LISTS = {"list", "deep list", "endless list", "tuple"}
ITERABLES = LISTS | {"array", "generator"}
TEXTS = {"text", "surrogate"}


def wrong(rng: Random, legal: set[str]) -> Any:
    """A value of a kind that is not legal."""
    assert legal <= set(VALUES)
    return VALUES[rng.choice([name for name in VALUES if name not in legal])](rng)


def beginning(value: Any) -> str:
    """What a message with this value shows at least."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[["  # may be too deep for Python to write
    try:
        return repr(value).encode("utf-8", "backslashreplace").decode()[:20]
    except ValueError:
        return "integer of"  # too many digits for Python to write
    except RuntimeError:
        return type(value).__name__


def fields_are(names: str, legal: set[str], *bad: Callable[[Random], Any]) -> dict[str, tuple]:
    return dict.fromkeys(names.split(), (legal, bad))


def one_of(*values: Any) -> Callable[[Random], Any]:
    return lambda rng: rng.choice(values)


def among(good: list, legal: set[str], *bad: Callable[[Random], Any]) -> Callable[[Random], Any]:
    """A list of good values with a bad one among them."""

    def make(rng: Random) -> Any:
        value = rng.choice([lambda rng: wrong(rng, legal), *bad])(rng)
        values = rng.choices(good, k=rng.randint(0, 12))
        values.insert(rng.randint(0, len(values)), value)
        return Shown(values, value)

    return make


class Shown:
    """A value of which another must be in the message: the one at fault in a collection."""

    def __init__(self, value: Any, fault: Any):
        self.value = value
        self.fault = fault


not_finite, huge = one_of(math.nan, math.inf, -math.inf), one_of(10**400, -(10**400), 10**5000)
negative = one_of(-1, -2, -(2**31), -(2**63), -(10**400), np.int64(-5))
too_large = one_of(2**31, 2**63, 2**64, 10**400, 10**5000)
below_zero = one_of(-1e-9, -0.5, -3, np.float32(-1), np.int8(-1))
beyond = one_of(VOCAB, VOCAB + 1, 2**31, 2**64, 10**400, 10**5000)
id_among = among([1, 2, 3], INTEGERS, negative)
text_among = among(["a", "bc"], {"text"}, one_of("", "\ud800", "x\udfffy"))

# The kinds of value that each field may have, and what is out of range though it is of such a kind.
PARAMS: dict[str, tuple] = {
    **fields_are("temperature", NUMBERS, not_finite, huge, below_zero),
    **fields_are("max_tokens", INTEGERS | {"none"}, negative, too_large, one_of(0)),
    **fields_are("n", INTEGERS, negative, too_large, one_of(0)),
    **fields_are("ignore_eos include_stop_str_in_output skip_special_tokens detokenize", {"bool"}),
    **fields_are("top_p", NUMBERS, not_finite, huge, below_zero, one_of(0, 0.0, 1.001, 2, np.float64(7))),
    **fields_are("min_p", NUMBERS, not_finite, huge, below_zero, one_of(1.001, 2, np.float64(7))),
    **fields_are("top_k", INTEGERS, one_of(-2, -(10**400), np.int8(-7)), too_large),
    **fields_are("seed", INTEGERS | {"none"}, negative, one_of(2**63, 10**400, 10**5000, np.uint64(2**63))),
    **fields_are("min_tokens", INTEGERS, negative, too_large, one_of(65, 1000)),
    **fields_are(
        "logprobs prompt_logprobs", INTEGERS | {"none"}, negative, too_large, one_of(21, np.uint8(200))
    ),
    **fields_are("presence_penalty frequency_penalty", NUMBERS, not_finite, huge, one_of(-2.001, 3, 1e308)),
    **fields_are("repetition_penalty", NUMBERS, not_finite, huge, below_zero, one_of(0, 0.0)),
    **fields_are("stop", LISTS | TEXTS | {"none", "set"}, one_of("", "\ud800", "a\udc00"), text_among),
    **fields_are("bad_words", LISTS | {"none", "set"}, text_among),
    **fields_are("stop_token_ids", LISTS | {"none", "set"}, id_among),
    **fields_are("allowed_token_ids", LISTS | {"none", "set"}, id_among, one_of([], (), set())),
    **fields_are(
        "logit_bias",
        LISTS | {"none", "set", "dict"},
        among([(1, 2.0)], {"tuple"}, one_of((1,), (1, 2, 3), (-1, 0), (1, math.nan), (1, 101), (1, 10**400))),
        one_of({-1: 1.0}, {1: 100.5}, {1: math.nan}, {"a": 1}, {1.5: 1}, {1: None}, {None: 1}, {1: [1]}),
    ),
}
CONFIG: dict[str, tuple] = {
    **fields_are("model", {"text"}, one_of("no-such-model", "", "\ud800", "nul\0nul")),
    **fields_are("max_num_batched_tokens max_num_seqs", INTEGERS, negative, too_large, one_of(0)),
    **fields_are("max_model_len", INTEGERS | {"none"}, negative, too_large, one_of(0)),
    **fields_are("num_kvcache_blocks", INTEGERS, one_of(0, -2, -(10**400)), too_large),
    **fields_are("kvcache_block_size", INTEGERS, negative, too_large, one_of(0, 8, 17, 100, 33)),
    **fields_are("tensor_parallel_size", INTEGERS, negative, too_large, one_of(0, 9, 16)),
    **fields_are("gpu_memory_utilization", NUMBERS, not_finite, huge, below_zero, one_of(0, 1.001, 2)),
    **fields_are("seed", INTEGERS | {"none"}, negative, one_of(2**63, 10**400)),
    **fields_are("enforce_eager enable_prefix_caching", {"bool"}),
    **fields_are(
        "dtype kv_cache_dtype load_format attention_backend", set(), one_of("int3", "Auto", "auto ")
    ),
    **fields_are("device", set(), one_of("tpu", "cpu:x", "cpu:99999999999999999999", "meta", "CPU")),
}


def bad_field(rng: Random, fields: dict[str, tuple]) -> tuple[str, Any, str]:
    """(name, value, what the message shows)."""
    name = rng.choice(list(fields))
    legal, bad = fields[name]
    makers = [lambda rng: wrong(rng, legal)] * (len(VALUES) > len(legal)) + list(bad)
    value = rng.choice(makers)(rng)
    fault = value.fault if isinstance(value, Shown) else value
    return name, value.value if isinstance(value, Shown) else value, beginning(fault)


Call = Callable[[Engines], Any]
KINDS: dict[str, Callable[[Random], tuple[Call, str]]] = {}


def kind(name: str) -> Callable:
    def register(make: Callable[[Random], tuple[Call, str]]) -> Callable:
        KINDS[name] = make
        return make

    return register


async def last_of(pieces: Any) -> None:
    async for _ in pieces:
        pass


# What takes one prompt and parameters.
ONE: dict[str, Callable[[Engines, Any, Any], Any]] = {
    "generate": lambda on, prompt, params: on.llm.generate([[1, 2], prompt], params, use_tqdm=False),
    "generate_iter": lambda on, prompt, params: on.llm.generate_iter([prompt, [1, 2]], params),
    "generate_from": lambda on, prompt, params: list(
        on.llm.generate_from([([1, 2], GOOD), (prompt, params)])
    ),
    "stream": lambda on, prompt, params: on.llm.stream(prompt, params),
    "add_request": lambda on, prompt, params: on.llm.add_request(prompt, params),
    "AsyncLLM.generate": lambda on, prompt, params: on.loop.run_until_complete(
        on.front.generate(prompt, params)
    ),
    "AsyncLLM.stream": lambda on, prompt, params: on.loop.run_until_complete(
        last_of(on.front.stream(prompt, params))
    ),
}


def score(on: Engines, prompt: Any, _: Any) -> Any:
    return on.llm.score([[1, 2], prompt], use_tqdm=False)


def prompt_of_a_wrong_type(rng: Random) -> tuple[Any, str]:
    prompt = wrong(rng, {"text", "surrogate", "dict", *ITERABLES})
    return prompt, beginning(prompt)


def prompt_with_a_lone_surrogate(rng: Random) -> tuple[Any, str]:
    surrogate = chr(rng.randint(0xD800, 0xDFFF))
    text = "x" * rng.choice([0, 3, 1000]) + surrogate + "y" * rng.choice([0, 3, 1000])
    return rng.choice([text, {"prompt": text}]), ascii(surrogate).strip("'")


def prompt_with_a_bad_id(rng: Random) -> tuple[Any, str]:
    found = among([1, 2, 3], INTEGERS, negative, beyond)(rng)
    ids, fault = found.value, found.fault
    fault = int(fault) if isinstance(fault, np.integer) else fault
    return rng.choice([ids, tuple(ids), {"prompt_token_ids": ids}]), beginning(fault)


def prompt_that_is_too_long(rng: Random) -> tuple[Any, str]:
    length = rng.randint(LENGTH + 1, 5000)
    return rng.choice(["x" * length, [1] * length]), f"{length} tokens"


def prompt_that_is_empty(rng: Random) -> tuple[Any, str]:
    prompt = rng.choice(["", [], ()])
    return prompt, repr(prompt)


def prompt_that_is_a_bad_dict(rng: Random) -> tuple[Any, str]:
    prompt = rng.choice(
        [{}, {"text": "a"}, {"prompt_token_ids": [1], "seed": 1}, {1: 2}, {"prompt": "a", "seed": 1}]
    )
    if rng.random() < 0.5:
        return prompt, beginning(prompt)
    key, legal = rng.choice([("prompt", {"text", "surrogate"}), ("prompt_token_ids", ITERABLES)])
    value = wrong(rng, legal)
    return {key: value}, beginning(value)


for maker in (
    prompt_of_a_wrong_type,
    prompt_with_a_lone_surrogate,
    prompt_with_a_bad_id,
    prompt_that_is_too_long,
    prompt_that_is_empty,
    prompt_that_is_a_bad_dict,
):
    for way, use in {**ONE, "score": score}.items():

        def make(rng: Random, maker: Callable = maker, use: Callable = use) -> tuple[Call, str]:
            prompt, text = maker(rng)
            return lambda on: use(on, prompt, GOOD), text

        KINDS[f"{way}: {maker.__name__.replace('_', ' ')}"] = make

for way, use in ONE.items():

    @kind(f"{way}: sampling_params of a wrong type")
    def _(rng: Random, use: Callable = use) -> tuple[Call, str]:
        params = wrong(rng, LISTS | ({"none"} if use is not ONE["generate_from"] else set()))
        return lambda on: use(on, [1], params), beginning(params)

    @kind(f"{way}: prompt that leaves no room for a token")
    def _(rng: Random, use: Callable = use) -> tuple[Call, str]:
        max_tokens = rng.choice([1, 5000, 2**31 - 1, np.int32(2**31 - 1), np.uint16(60000), None])
        params = SamplingParams(0, max_tokens)
        text = f"{LENGTH} tokens and needs room for {LENGTH + 1}"
        return lambda on: use(on, [1] * LENGTH, params), text

    @kind(f"{way}: parameters beyond the vocabulary")
    def _(rng: Random, use: Callable = use) -> tuple[Call, str]:
        token_id = beyond(rng)
        field = rng.choice(["allowed_token_ids", "stop_token_ids", "logit_bias"])
        listed = {1: 1.0, token_id: 1.0} if field == "logit_bias" else [1, token_id, 2]
        params = SamplingParams(max_tokens=4, **{field: listed})
        return lambda on: use(on, [1], params), beginning(token_id)


@kind("generate: prompts of a wrong type")
def _(rng: Random) -> tuple[Call, str]:
    prompts = wrong(rng, {"text", *ITERABLES, "dict", "surrogate"})
    use = rng.choice([LLM.generate, LLM.generate_iter, lambda llm, prompts, _: llm.score(prompts)])
    return lambda on: use(on.llm, prompts, GOOD), beginning(prompts)


@kind("generate: lists of unequal length")
def _(rng: Random) -> tuple[Call, str]:
    few, many = sorted(rng.sample(range(1, 9), 2))
    use = rng.choice([LLM.generate, LLM.generate_iter])
    if rng.random() < 0.5:
        few, many = many, few
    return lambda on: use(on.llm, [[1]] * few, [GOOD] * many), f"{few} prompts but {many} sampling_params"


@kind("generate: a list of sampling_params with a bad one")
def _(rng: Random) -> tuple[Call, str]:
    params = wrong(rng, set())
    use = rng.choice([LLM.generate, LLM.generate_iter])
    return lambda on: use(on.llm, [[1], [2]], [GOOD, params]), beginning(params)


@kind("use_tqdm")
def _(rng: Random) -> tuple[Call, str]:
    value = wrong(rng, {"bool"})
    calls = [
        lambda on: on.llm.generate([[1]], GOOD, use_tqdm=value),
        lambda on: on.llm.generate_iter([[1]], GOOD, use_tqdm=value),
        lambda on: on.llm.score([[1, 2]], use_tqdm=value),
        lambda on: on.llm.chat([USER], GOOD, use_tqdm=value),
    ]
    return rng.choice(calls), beginning(value)


@kind("an unknown keyword argument")
def _(rng: Random) -> tuple[Call, str]:
    name = rng.choice(["temprature", "top_n", "prompt_ids", "x" * 100, "Model", "größe"])
    unknown = {name: VALUES[rng.choice(list(VALUES))](rng)}
    calls = [
        lambda on: SamplingParams(**unknown),
        lambda on: LLM(on.folder, **unknown),
        lambda on: AsyncLLM(on.folder, **unknown),
        lambda on: Config(on.folder, **unknown),
        lambda on: on.llm.generate([[1]], GOOD, **unknown),
        lambda on: on.llm.generate_iter([[1]], GOOD, **unknown),
        lambda on: on.llm.stream([1], GOOD, **unknown),
        lambda on: on.llm.chat([USER], GOOD, **unknown),
        lambda on: on.llm.score([[1]], **unknown),
        lambda on: on.llm.encode("a", **unknown),
        lambda on: on.llm.decode([1], **unknown),
        lambda on: on.llm.add_request([1], GOOD, **unknown),
        lambda on: on.llm.abort(1, **unknown),
        lambda on: on.front.generate([1], GOOD, **unknown),
        lambda on: on.front.stream([1], GOOD, **unknown),
    ]
    return rng.choice(calls), name


@kind("add_request and stream: more than one completion")
def _(rng: Random) -> tuple[Call, str]:
    n = rng.randint(2, MAX_N)
    use = rng.choice([ONE["add_request"], ONE["stream"], ONE["AsyncLLM.stream"]])
    params = SamplingParams(0, 4, n=n)
    return lambda on: use(on, [1], params), f"n={n}"


@kind("stream: without a text")
def _(rng: Random) -> tuple[Call, str]:
    use = rng.choice([ONE["stream"], ONE["AsyncLLM.stream"]])
    params = SamplingParams(0, 4, detokenize=False)
    return lambda on: use(on, [1], params), "detokenize=False"


for field in PARAMS:

    @kind(f"SamplingParams: {field}")
    def _(rng: Random, field: str = field) -> tuple[Call, str]:
        name, value, text = bad_field(rng, {field: PARAMS[field]})
        return lambda on: SamplingParams(**{name: value}), text


@kind("SamplingParams: options at odds")
def _(rng: Random) -> tuple[Call, str]:
    max_tokens, more = rng.randint(1, 1000), rng.randint(1, 1000)
    options, text = rng.choice(
        [
            (dict(min_tokens=max_tokens + more, max_tokens=max_tokens), f"max_tokens={max_tokens}, got"),
            (dict(stop="end", detokenize=False), "stop='end'"),
            (dict(stop=["a", "b"], detokenize=False), "stop=['a', 'b']"),
        ]
    )
    return lambda on: SamplingParams(**options), text


for field in CONFIG:

    @kind(f"LLM: {field}")
    def _(rng: Random, field: str = field) -> tuple[Call, str]:
        name, value, text = bad_field(rng, {field: CONFIG[field]})
        make = rng.choice([LLM, AsyncLLM])
        if name == "model":
            return lambda on: make(value, **OPTIONS), text
        return lambda on: make(on.folder, **{**OPTIONS, name: value}), text


@kind("LLM: options at odds with the checkpoint")
def _(rng: Random) -> tuple[Call, str]:
    size = rng.choice([3, 5, 6, 7, 8])  # there are 4 attention heads
    return lambda on: LLM(on.folder, **{**OPTIONS, "tensor_parallel_size": size}), f"={size} "


@kind("encode")
def _(rng: Random) -> tuple[Call, str]:
    if rng.random() < 0.3:
        text, shown = "x" * rng.choice([0, 5, 10**5]) + "\udabc", "\\udabc"
    else:
        text = wrong(rng, TEXTS)
        shown = beginning(text)
    return lambda on: on.llm.encode(text), shown


@kind("decode")
def _(rng: Random) -> tuple[Call, str]:
    if rng.random() < 0.2:
        flag = wrong(rng, {"bool"})
        return lambda on: on.llm.decode([1], skip_special_tokens=flag), beginning(flag)
    if rng.random() < 0.5:
        ids, shown = prompt_with_a_bad_id(rng)
        ids = ids["prompt_token_ids"] if isinstance(ids, dict) else ids
    else:
        ids = wrong(rng, LISTS)
        shown = beginning(ids)
    return lambda on: on.llm.decode(ids), shown


@kind("abort")
def _(rng: Random) -> tuple[Call, str]:
    request_id = wrong(rng, INTEGERS)
    return lambda on: on.llm.abort(request_id), beginning(request_id)


def chat(messages: Any = None, **options: Any) -> Call:
    """Of one conversation, or of two of which the second is this."""
    messages = [USER] if messages is None else messages
    return lambda on: on.llm.chat(messages, options.pop("params", GOOD), use_tqdm=False, **options)


@kind("chat: messages of a wrong type")
def _(rng: Random) -> tuple[Call, str]:
    messages = wrong(rng, LISTS)
    where = rng.choice([lambda x: x, lambda x: [[USER], x], lambda x: [USER, x], lambda x: [[USER, x]]])
    return (lambda on: on.llm.chat(where(messages), GOOD, use_tqdm=False)), beginning(messages)


@kind("chat: a message without role or content, or with bad ones")
def _(rng: Random) -> tuple[Call, str]:
    role = wrong(rng, TEXTS)
    content = wrong(rng, TEXTS | LISTS | {"none", "dict"})
    message, fault = rng.choice(
        [
            ({"role": role, "content": "a"}, role),
            ({"role": "user", "content": content}, content),
            ({"role": "user"}, {"role": "user"}),
            ({"content": "a"}, {"content": "a"}),
            ({}, {}),
        ]
    )
    return chat(rng.choice([[message], [USER, message], [[USER], [message]]])), beginning(fault)


@kind("chat: a lone surrogate")
def _(rng: Random) -> tuple[Call, str]:
    surrogate = chr(rng.randint(0xD800, 0xDFFF))
    text = "x" * rng.choice([0, 3, 300]) + surrogate
    calls = [
        chat([{"role": "user", "content": text}]),
        chat([{"role": text, "content": "a"}]),
        chat([[USER], [USER, {"role": "user", "content": text}]]),
        chat(chat_template=text),
        chat(chat_template="{{ x }}", chat_template_kwargs={"x": text}),
    ]
    return rng.choice(calls), ascii(surrogate).strip("'")


@kind("chat: options of a wrong type")
def _(rng: Random) -> tuple[Call, str]:
    name, legal = rng.choice(
        [
            ("chat_template", {"none", *TEXTS}),
            ("add_generation_prompt", {"bool"}),
            ("continue_final_message", {"bool"}),
            ("tools", {"none"} | LISTS),
            ("chat_template_kwargs", {"none", "dict"}),
            ("params", LISTS | {"none"}),
        ]
    )
    value = wrong(rng, legal)
    return chat(**{name: value}), beginning(value)


@kind("chat: tools of which one is bad")
def _(rng: Random) -> tuple[Call, str]:
    tool = wrong(rng, {"dict", "function", "class"})
    return chat(tools=[tool]), beginning([tool])[:2]


@kind("chat: options at odds")
def _(rng: Random) -> tuple[Call, str]:
    taken = (
        "add_generation_prompt continue_final_message tools chat_template messages tokenize conversation self"
    )
    name = rng.choice(taken.split())
    template_kwargs = dict(enable_thinking=True) | {name: VALUES[rng.choice(list(VALUES))](rng)}
    options, text = rng.choice(
        [
            (dict(continue_final_message=True), "continue_final_message=True needs"),
            (
                dict(continue_final_message=True, add_generation_prompt=True),
                "continue_final_message=True needs",
            ),
            (dict(chat_template_kwargs=template_kwargs), repr(name)),
            (dict(chat_template_kwargs={5: 1}), "{5: 1}"),
        ]
    )
    return chat(**options), text


def check(engines: Engines, call: Call, text: str) -> None:
    """The call is refused, in words that anybody can print and that show the value, and leaves no trace."""
    try:
        result = call(engines)
    except (TypeError, ValueError) as error:
        message = str(error)
        assert not isinstance(error, UnicodeError), message
        message.encode()
        assert len(message) <= LONGEST_MESSAGE, f"{len(message)} characters: {message[:LONGEST_MESSAGE]}"
        assert text in message, f"{text!r} is not in {message!r}"
    else:
        raise AssertionError(f"it was not refused, but gave {ascii(result)[:200]}")
    engines.assert_empty()


def run(engines: Engines, count: int, seed: int, good_every: int = 100) -> tuple[Counter, float]:
    """
    Make so many bad calls, each kind in its turn. After the first of each kind and every now and then good
    ones must be answered as ever. Returns how many calls of each kind there were, and the longest in seconds.
    """
    rng, made, longest = Random(seed), Counter(), 0.0
    names = list(KINDS)
    for i in range(count):
        name = names[i % len(names)]
        state = rng.getrandbits(64)  # makes this call again
        call, text = KINDS[name](Random(state))
        start = time.perf_counter()
        try:
            check(engines, call, text)
            longest = max(longest, time.perf_counter() - start)
            if not made[name] or i % good_every == 0:
                assert engines.answers() == engines.expected, "a good call is answered differently now"
        except BaseException as error:
            raise AssertionError(f"call {i}, {name!r} with Random({state}): {error!r}") from error
        made[name] += 1
    return made, longest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second
    with tempfile.TemporaryDirectory() as folder, Engines(str(make_checkpoint(folder, seed=1))) as engines:
        made, longest = run(engines, arguments.count, arguments.seed)
    for name, count in made.items():
        print(f"{count:6d}  {name}")
    print(f"{made.total():6d}  bad calls of {len(made)} kinds, all refused; the longest took {longest:.3f} s")


if __name__ == "__main__":
    main()
