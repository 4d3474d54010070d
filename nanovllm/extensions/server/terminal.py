"""`nanovllm chat` and `nanovllm generate`: a model in a terminal, which shows texts as they are made."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace

from nanovllm import EngineArgs
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils import FlexibleArgumentParser

COMMANDS = "/clear begins a new conversation. /exit or Ctrl-D ends the program, Ctrl-C only an answer."
TEMPERATURE = 0.6  # where the checkpoint recommends none
# Signs that a model could take a terminal over with: all that control it, but line feeds and tabs.
CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})


def chat(argv: Sequence[str]) -> None:
    parser = _make_parser("chat", f"A conversation with a model in the terminal. {COMMANDS}")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    args = _parse(parser, argv, "as many as fit")
    start = [] if args.system is None else [{"role": "system", "content": args.system}]
    with contextlib.suppress(ImportError):  # it is not there on Windows
        import readline  # noqa: F401  so that `input` knows the arrow keys and what was said before
    if sys.stdin.isatty():
        print(f"Loading {args.model}. {COMMANDS}")
    with LLM(args.model, **args.engine) as llm:
        llm.prompts.render_chats([*start, {"role": "user", "content": "Hello!"}])  # or an error at once
        converse(llm, _params(llm, args, None), start)


def converse(llm: LLM, params: SamplingParams, start: list[dict[str, str]]) -> None:
    """Read what is said and answer it, until the input ends. Only what got an answer stays in `messages`."""
    messages, prompt = start, "> " if sys.stdin.isatty() else ""
    while True:
        try:
            text = input(prompt).strip()
            if text == "/exit":
                return
            if text == "/clear":
                messages = start
            elif text:
                asked, answer = [*messages, {"role": "user", "content": text}], ""
                try:
                    for piece in llm.stream(llm.prompts.render_chats(asked)[0], params):
                        answer += piece
                        show(piece)
                finally:
                    if answer:
                        messages = [*asked, {"role": "assistant", "content": answer}]
                show("\n")
        except EOFError:
            return show("\n" if prompt else "")
        except KeyboardInterrupt:
            show("\n")
        except ValueError as error:  # such as a conversation that has become too long
            print(f"nanovllm chat: {error}", file=sys.stderr)


def generate(argv: Sequence[str]) -> None:
    parser = _make_parser("generate", "Continue texts. (chat is what answers questions.)")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a text (default: what stdin has)")
    args = _parse(parser, argv, "256")
    prompts = args.prompts or [sys.stdin.read()]
    with LLM(args.model, **args.engine) as llm:
        params = _params(llm, args, 256)
        if len(prompts) == 1:
            for piece in llm.stream(prompts[0], params):
                show(piece)
            return show("\n")
        for prompt, result in zip(prompts, llm.generate(prompts, params), strict=True):
            show(f"\nPrompt: {prompt}\nCompletion: {result['text']}\n")


def show(text: str) -> None:
    sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _make_parser(command: str, about: str) -> argparse.ArgumentParser:
    parser = FlexibleArgumentParser(prog=f"nanovllm {command}", description=about)
    model = "folder, .gguf file or hub id (default: smollm2, which is small and fetched once)"
    parser.add_argument("--model", default="smollm2", help=model)
    return parser


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str], max_tokens: str) -> argparse.Namespace:
    sampling = {"max_tokens": (int, f"most tokens of an answer (default: {max_tokens})")}
    usual = "what the checkpoint recommends, else "
    return EngineArgs.parse_options(parser, argv, "how tokens are drawn", sampling, TEMPERATURE, usual)


def _params(llm: LLM, args: argparse.Namespace, max_tokens: int | None) -> SamplingParams:
    params = llm.default_sampling_params(temperature=TEMPERATURE)
    return replace(params, **{"max_tokens": max_tokens, **args.defaults})
