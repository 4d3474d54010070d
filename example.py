"""The quick start: two questions to a small chat model.

    python example.py                                         SmolLM2-135M-Instruct, fetched once
    python example.py --model Qwen/Qwen3-0.6B                 a hub id, a folder or a .gguf file
    python example.py --prompts in.jsonl --output out.jsonl   a file of prompts, with nanovllm.batch

docs/batch.md says what files of prompts look like and which other options the last form takes.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams

QUESTIONS = ["introduce yourself", "list all prime numbers within 100"]
DEFAULTS = ["--model=smollm2", "--temperature=0.6", "--max-tokens=256"]  # given again, the last one counts


def as_prompt(tokenizer: Any, question: str) -> list[int]:
    """The token ids that a chat model is asked with, as its own template writes a question."""
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Generate text with Nano-vLLM.", allow_abbrev=False)
    add = parser.add_argument
    add("--model", help="folder, .gguf file or hub id (default: SmolLM2-135M-Instruct, fetched once)")
    add("--prompts", metavar="FILE", help="for python -m nanovllm.batch, with all of its options")
    add("--output", type=Path, metavar="FILE", help="gets the answers, a JSON object a line")
    add("--temperature", type=float, help="0 is greedy (default: 0.6)")
    add("--max-tokens", type=int, help="per prompt (default: 256)")
    add("--tensor-parallel-size", type=int, default=1, help="ranks to split the model over")
    add("--enforce-eager", action="store_true", help="do without CUDA graphs")
    add("--device", default="auto", help="cpu, cuda or auto (default)")
    add("--seed", type=int, help="makes sampled results repeatable")
    add("--timeline", metavar="FILE", help=".html: a page that shows what happened; .json: a trace")
    add("--extensions", metavar="MODULE:NAME", help="of your own, with commas between (docs/extending.md)")
    argv = [*DEFAULTS, *argv]
    if parser.parse_known_args(argv)[0].prompts:
        from nanovllm.extensions.batch.__main__ import run_command

        options = [argument.replace("--prompts", "--input") for argument in argv]
        run_command(["--output=/dev/stdout", *options])
        return

    args = parser.parse_args(argv)
    params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    names = "tensor_parallel_size enforce_eager device seed timeline extensions".split()
    options = {name: getattr(args, name) for name in names}
    with LLM(args.model, **options) as llm:
        results = llm.generate([as_prompt(llm.tokenizer, question) for question in QUESTIONS], params)
    answers = [{"prompt": question, **result} for question, result in zip(QUESTIONS, results, strict=True)]
    if args.output:
        args.output.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
        return
    for answer in answers:
        print(f"\nPrompt: {answer['prompt']}\nCompletion: {answer['text']}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"example.py: {error}")
    except KeyboardInterrupt:
        print("example.py: interrupted", file=sys.stderr)
        sys.exit(130)
