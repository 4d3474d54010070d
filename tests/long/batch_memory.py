"""Resident memory of `nanovllm.batch` while it answers many short prompts on a CPU: it must not grow.

    python tests/long/batch_memory.py --count 200000

The model is a small random one; input and output are real files in a folder that is removed afterwards.
"""

import argparse
import os
import tempfile
from pathlib import Path

import paths  # noqa: F401

os.environ.setdefault("OMP_NUM_THREADS", "1")
from nanovllm.extensions.batch import __main__ as batch
from nanovllm.extensions.batch import files as batch_files
from nanovllm.extensions.batch.lines import Answer
from tiny_checkpoints import make_checkpoint


def resident_mib() -> float:
    """Resident memory of this process (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(count: int, every: int, max_tokens: int) -> list[float]:
    """Resident MiB after every so many answers."""
    sizes, write = [], batch_files.Output.write
    num_written = 0

    def write_and_look(self: batch_files.Output, answer: Answer) -> None:
        nonlocal num_written
        write(self, answer)
        num_written += 1
        if num_written % every == 0:
            sizes.append(resident_mib())
            print(f"{num_written:8} answers: {sizes[-1]:.1f} MiB", flush=True)

    batch_files.Output.write = write_and_look
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder) / "model", num_hidden_layers=1, vocab_size=257)
        with open(Path(folder) / "in.jsonl", "w") as file:
            file.writelines(f'{{"prompt": "question {i}"}}\n' for i in range(count))
        files = ["--input", f"{folder}/in.jsonl", "--output", f"{folder}/out.jsonl"]
        engine = ["--device", "cpu", "--max-num-seqs", "256", "--max-tokens", str(max_tokens)]
        batch.main(["--model", str(model), *files, *engine, "--num-kvcache-blocks", "600"])
    return sizes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200_000, help="prompts (default: %(default)s)")
    parser.add_argument("--every", type=int, default=20_000, help="answers between two looks")
    parser.add_argument("--max-tokens", type=int, default=4, help="tokens of each answer")
    args = parser.parse_args()
    found = measure(args.count, args.every, args.max_tokens)
    print(f"from {found[0]:.1f} to {found[-1]:.1f} MiB: {found[-1] - found[0]:+.1f}")
