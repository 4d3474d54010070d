"""What a line of a batch file asks for, and the line that answers it. Knows nothing of files, engines or Ray.

A file may mix two kinds of lines: those of OpenAI's batch files (`custom_id`, `body`), whose answers have
OpenAI's shape, and plain ones (`prompt` or `messages` beside the sampling fields), whose answers have the
fields of a result, and hand back what else the line has. Every answer has the number of its input line,
counted from 1, to restore the order by.
"""

import json
import math
import time
from dataclasses import fields
from typing import Any, NamedTuple

from nanovllm import StructuredOutputsParams
from nanovllm.sampling_params import MAX_SEED, SamplingParams
from nanovllm.utils.validation import check, shown

SAMPLING_FIELDS = {f.name for f in fields(SamplingParams)}
SAMPLING_FIELDS |= {"max_completion_tokens", "top_logprobs", "response_format"}
CHAT_FIELDS = {"tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"}
# OpenAI's that change nothing, whatever they are; the model is the one on the command line.
IGNORED_FIELDS = set(
    "model user metadata service_tier store safety_identifier prompt_cache_key parallel_tool_calls".split()
)
# And those that change nothing as long as they are this.
IGNORED_VALUES = {"stream": False, "tool_choice": "auto", "echo": False, "modalities": ["text"]}
MAX_LINE = 64 * 2**20  # bytes, with the line feed
MAX_MESSAGE = 1000  # characters of an error message
DEFAULT_MAX_TOKENS = 256  # of plain lines; OpenAI's lines get as many tokens as fit
CustomId = str | int | None
PATHS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}


class Request(NamedTuple):
    """What one line asks for. Either `prompt` or `messages` is None."""

    line: int
    custom_id: CustomId
    is_openai: bool
    prompt: str | list[int] | list[str | list[int]] | None
    messages: list[dict[str, Any]] | None
    params: SamplingParams
    chat_options: dict[str, Any]
    model: str | None  # the line's name for the model, which the answer repeats
    rest: dict[str, Any]  # what else a plain line has, which the answer hands back

    @property
    def has_many_prompts(self) -> bool:
        return isinstance(self.prompt, list) and any(isinstance(each, str | list) for each in self.prompt)


class Answer(NamedTuple):
    """A line of the output, as JSON, and what the progress bar needs to know about it."""

    line: int
    text: bytes
    num_tokens: int
    is_error: bool


def describe(error: BaseException) -> str:
    return str(error) or type(error).__name__


def read_request(
    llm: Any, line: int, text: bytes, defaults: dict[str, Any]
) -> tuple[Request, list[list[int]]] | Answer:
    """
    The request of a line (see `parse_line`) and the token ids of each of its prompts, checked by the engine
    that is to serve them; or, if the line cannot be served, the answer that says why.
    """
    try:
        request = parse_line(line, text, defaults)
        token_ids = []
        for i, prompt in enumerate(_prompts(llm, request)):
            name = f"prompts[{i}]" if request.has_many_prompts else "prompt"
            token_ids.append(llm.prompts.read(prompt, request.params, name).token_ids)
        return request, token_ids
    except MemoryError:
        raise  # not the line's fault: the run ends, and --resume answers the line
    except Exception as error:  # a line can hold anything; no line may stop the others
        return answer_error(line, find_custom_id(text), describe(error))


def _prompts(llm: Any, request: Request) -> list[Any]:
    messages = request.messages
    if messages is None:
        return request.prompt if request.has_many_prompts else [request.prompt]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"messages must be a list of objects, got {shown(messages)}")
    return llm.prompts.render_chats(messages, **request.chat_options)


def parse_line(line: int, text: bytes, defaults: dict[str, Any]) -> Request:
    """
    The request of a line. `defaults` are sampling fields for lines that do not have them. Of a seed among
    them and the line's number a seed for the line is made, so that it draws the same tokens wherever and in
    whatever order lines are computed. Raises ValueError, and RecursionError for JSON nested too deeply.
    """
    content = _decode(text)
    is_plain = "prompt" in content or "messages" in content
    is_openai = isinstance(content.get("body"), dict) or ("body" in content and not is_plain)
    given = _openai_body(content) if is_openai else content
    body = {name: value for name, value in given.items() if value is not None}
    known = {"prompt", "messages"} | SAMPLING_FIELDS | (CHAT_FIELDS if "messages" in body else set())
    rest = {}
    if is_openai:
        ignored = {name for name in IGNORED_VALUES if body.get(name) == IGNORED_VALUES[name]}
        _check_fields(body, known | IGNORED_FIELDS | ignored)
    else:
        _check_fields(body, body.keys() - CHAT_FIELDS | known)
        own = _decode(text, _OWN_DECODER) if given.keys() - known else given
        rest = {name: value for name, value in own.items() if name not in known | {"custom_id"}}
    if ("prompt" in body) == ("messages" in body):
        raise ValueError('there must be either "prompt" or "messages"')
    defaults = {"max_tokens": None if is_openai else DEFAULT_MAX_TOKENS} | defaults
    if "seed" in defaults:  # so far apart that the n completions of a line do not use the next line's seed
        defaults["seed"] = (defaults["seed"] + (line << 32)) & MAX_SEED
    params = read_params({name: body[name] for name in SAMPLING_FIELDS & body.keys()}, defaults)
    model = body.get("model") if is_openai else None
    check(isinstance(model, str | None), "model must be a text", model)
    chat_options = {name: body[name] for name in CHAT_FIELDS & body.keys()}
    asked = body.get("prompt"), body.get("messages"), params, chat_options
    return Request(line, _read_custom_id(content), is_openai, *asked, model, rest)


def find_custom_id(text: bytes) -> CustomId:
    """The custom_id of a line that may have anything wrong with it."""
    try:
        return _read_custom_id(_decode(text))
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"not JSON: {name}")


def _number_or_text(text: str) -> float | str:
    """What is handed back of a number: 1e400, which no float can hold, as a text."""
    return number if math.isfinite(number := float(text)) else text


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)  # json.loads accepts NaN and Infinity
_OWN_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_number_or_text)


def _decode(text: bytes, decoder: json.JSONDecoder = _DECODER) -> dict[str, Any]:
    """The JSON object of a line."""
    if len(text) > MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE} bytes")
    try:
        content = decoder.decode(text.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(content, dict):
        raise ValueError("a line must be a JSON object")
    return content


def _read_custom_id(content: dict[str, Any]) -> CustomId:
    custom_id = content.get("custom_id")
    if isinstance(custom_id, bool) or not isinstance(custom_id, (str, int, type(None))):
        raise ValueError(f"custom_id must be a text or an integer, got {shown(custom_id)}")
    return custom_id


def _openai_body(content: dict[str, Any]) -> dict[str, Any]:
    _check_fields(content, {"custom_id", "method", "url", "body"})
    body, url = content["body"], content.get("url")
    check(isinstance(body, dict), "body must be an object", body)
    check(content.get("method", "POST") == "POST", 'method must be "POST"', content.get("method"))
    if url is not None and (not isinstance(url, str) or PATHS.get(url) not in body):
        raise ValueError(f"url must be one of {', '.join(PATHS)} and fit the body, got {shown(url)}")
    return body


def _check_fields(content: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(content.keys() - known):
        raise ValueError(f"unknown fields: {', '.join(unknown)}")


def read_params(sampling: dict[str, Any], defaults: dict[str, Any]) -> SamplingParams:
    """SamplingParams from OpenAI's fields and our own. Raises ValueError that names the bad field."""
    limit = sampling.pop("max_completion_tokens", None)
    if limit is not None and sampling.setdefault("max_tokens", limit) != limit:
        raise ValueError(f"max_completion_tokens={limit} and max_tokens={sampling['max_tokens']} differ")
    top_logprobs = sampling.pop("top_logprobs", None)
    if isinstance(wanted := sampling.get("logprobs"), bool):  # as chats ask; completions give a number
        sampling["logprobs"] = (0 if top_logprobs is None else top_logprobs) if wanted else None
    if top_logprobs is not None and wanted is not True:
        raise ValueError(f"top_logprobs={shown(top_logprobs)} needs logprobs=true, got {shown(wanted)}")
    if isinstance(bias := sampling.get("logit_bias"), dict):  # the keys of a JSON object are texts
        sampling["logit_bias"] = {int(key) if key.isdecimal() else key: value for key, value in bias.items()}
    if isinstance(wanted := sampling.get("structured_outputs"), dict):
        _check_fields(wanted, {f.name for f in fields(StructuredOutputsParams)})
        sampling["structured_outputs"] = StructuredOutputsParams(**wanted)
    wanted = _read_response_format(sampling.pop("response_format", {"type": "text"}))
    if wanted is not None and sampling.setdefault("structured_outputs", wanted) != wanted:
        raise ValueError("there must be either response_format or structured_outputs")
    return SamplingParams(**(defaults | sampling))


def _read_response_format(value: Any) -> StructuredOutputsParams | None:
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return StructuredOutputsParams(json_object=True)
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return StructuredOutputsParams(json=schema)
    rule = "response_format must have the type text, json_object, or json_schema with json_schema.schema"
    raise ValueError(f"{rule}, got {shown(value)}")


def answer(request: Request, results: list[Any], model: str) -> Answer:
    """The answer to a line, from the engine's result for each of its prompts, or the error that it had."""
    if errors := [result for result in results if isinstance(result, Exception)]:
        message = f"{type(errors[0]).__name__}: {errors[0]}"
        return answer_error(request.line, request.custom_id, message, "server_error")
    outputs = [output for result in results for output in result.get("outputs", [result])]
    num_tokens = sum(len(output["token_ids"]) for output in outputs)
    if request.is_openai:
        body = _openai_response(request, results, outputs, num_tokens, model)
        response = {"status_code": 200, "request_id": body["id"], "body": body}
        content = _openai_content(request.line, request.custom_id, response, None)
    else:
        custom_id = {} if request.custom_id is None else {"custom_id": request.custom_id}
        found = {"results": results} if request.has_many_prompts else results[0]
        content = {"line": request.line, **custom_id, **_plain(found)}
        for name, value in request.rest.items():
            while name in content or name == "error":  # only what has failed has an error
                name = f"input_{name}"
            content[name] = value
    try:
        return Answer(request.line, to_json(content), num_tokens, is_error=False)
    except ValueError:  # NaN or an infinity, which JSON does not have
        message = "the answer has log-probabilities that are no finite numbers: the model's logits overflow"
        return answer_error(request.line, request.custom_id, message)


def answer_error(line: int, custom_id: CustomId, message: str, code: str = "invalid_request") -> Answer:
    """The answer to a line, plain or OpenAI's, that cannot be served."""
    message = f"line {line}: {message}"
    if len(message) > MAX_MESSAGE:  # many messages quote what is wrong
        message = message[:MAX_MESSAGE] + "..."
    content = _openai_content(line, custom_id, None, {"code": code, "message": message})
    return Answer(line, to_json(content), 0, is_error=True)


def _openai_content(line: int, custom_id: CustomId, response: Any, error: Any) -> dict[str, Any]:
    name = f"line-{line}"
    custom_id = name if custom_id is None else custom_id
    return {"id": name, "line": line, "custom_id": custom_id, "response": response, "error": error}


def _plain(value: Any) -> Any:
    """A result, or a part of one, for JSON: log-probabilities are written as objects."""
    if hasattr(value, "_asdict"):  # a Logprob
        return value._asdict()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return [_plain(item) for item in value]
    return value


def _openai_response(
    request: Request,
    results: list[dict[str, Any]],
    outputs: list[dict[str, Any]],
    num_tokens: int,
    model: str,
) -> dict[str, Any]:
    num_asked, num_cached = (sum(r[f"num_{kind}_tokens"] for r in results) for kind in ("prompt", "cached"))
    body = {
        "id": f"line-{request.line}",
        "object": "text_completion" if request.messages is None else "chat.completion",
        "created": int(time.time()),
        "model": request.model or model,
        "choices": [_choice(i, output, request) for i, output in enumerate(outputs)],
        "usage": {
            "prompt_tokens": num_asked,
            "completion_tokens": num_tokens,
            "total_tokens": num_asked + num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        },
    }
    if "prompt_logprobs" in results[0]:
        scores = [_plain(result["prompt_logprobs"]) for result in results]
        body["prompt_logprobs"] = scores if request.has_many_prompts else scores[0]
    return body


def _choice(index: int, output: dict[str, Any], request: Request) -> dict[str, Any]:
    text, is_chat = output["text"], request.messages is not None
    content = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
    logprobs = _openai_logprobs(output, is_chat, request.params.logprobs) if "logprobs" in output else None
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": output["finish_reason"]}


def _openai_logprobs(output: dict[str, Any], is_chat: bool, count: int) -> dict[str, Any]:
    """The log-probabilities of each drawn token and of the `count` likeliest ones."""

    def shape(entry: Any) -> dict[str, Any]:
        return {"token": entry.decoded_token, "logprob": entry.logprob}

    places = zip(output["token_ids"], output["logprobs"], strict=False)
    drawn = [(likeliest[token_id], list(likeliest.values())) for token_id, likeliest in places]
    if is_chat:
        places = [{**shape(entry), "top_logprobs": [*map(shape, top[:count])]} for entry, top in drawn]
        return {"content": places}
    return {
        "tokens": [entry.decoded_token for entry, _ in drawn],
        "token_logprobs": [entry.logprob for entry, _ in drawn],
        "top_logprobs": [{e.decoded_token: e.logprob for e in top} for _, top in drawn],
    }


def to_json(answer: dict[str, Any]) -> bytes:
    """
    A whole line of the output. Lone surrogates, which UTF-8 cannot hold, are written as escapes. Raises
    ValueError for NaN and infinities.
    """
    text = json.dumps(answer, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"
