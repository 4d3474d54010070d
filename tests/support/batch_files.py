"""Files of requests, and `python -m nanovllm.batch` over them."""

import json
from pathlib import Path

from nanovllm.extensions.batch import __main__ as batch

ENGINE = ["--device", "cpu", "--kvcache-block-size", "16", "--num-kvcache-blocks", "200"]
ROOT = Path(batch.__file__).parents[2]


def write_lines(path: Path, lines: list) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), "utf-8")
    return path


def read_answers(path: Path) -> list[dict]:
    """The answers in the order of the input, each of which must be there once."""
    whole = path.read_bytes().split(b"\n")[:-1]  # the rest, after a kill, is a piece of a line
    answers = [json.loads(line) for line in whole]
    assert len({answer["line"] for answer in answers}) == len(answers)
    return sorted(answers, key=lambda answer: answer["line"])


def run_batch(checkpoint: Path, source: Path, output: Path, *options) -> None:
    files = ["--model", checkpoint, "--input", source, "--output", output]
    batch.main([*map(str, files), *ENGINE, "--max-tokens", "4", *map(str, options)])
