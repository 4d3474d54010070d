"""How many times faster than its own model for transformers lm-evaluation-harness scores a few-shot task.

    python tests/long/evaluation_speed.py FOLDER

Both get the same questions with four answers each, made of random words; transformers only the first
`--questions-of-hf`, since its time grows in proportion.
"""

import argparse
import random
import time
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM

from nanovllm.extensions.api.lm_eval import NanoVLLM

WORDS = (Path(__file__).parents[2] / "README.md").read_text().split()


def make_requests(num_questions: int, num_shots: int) -> list[Instance]:
    pick = random.Random(0)

    def words(count: int) -> str:
        return " ".join(pick.choice(WORDS) for _ in range(count))

    shots = "".join(f"Question: {words(20)}?\nAnswer: {words(3)}\n\n" for _ in range(num_shots))
    contexts = [f"{shots}Question: {words(20)}?\nAnswer:" for _ in range(num_questions)]
    pairs = [(context, f" {words(3)}") for context in contexts for _ in range(4)]
    return [Instance("loglikelihood", {}, pair, 0) for pair in pairs]


def seconds_per_question(model: LM, requests: list[Instance]) -> float:
    wall, processor = time.perf_counter(), time.process_time()
    model.loglikelihood(requests, disable_tqdm=True)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    count = len(requests) // 4
    print(f"{type(model).__name__}: {count} questions in {wall:.1f} s, {processor:.1f} s of processor")
    return wall / count


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="of a checkpoint")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--questions-of-hf", type=int, default=200)
    parser.add_argument("--shots", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-size", type=int, default=8, help="of transformers")
    args = parser.parse_args()
    requests, options = make_requests(args.questions, args.shots), dict(device=args.device, dtype=args.dtype)
    ours = NanoVLLM(args.folder, **options)
    time_of_ours = seconds_per_question(ours, requests)
    ours.llm.exit()
    theirs = HFLM(args.folder, batch_size=args.batch_size, **options)
    time_of_theirs = seconds_per_question(theirs, requests[: 4 * args.questions_of_hf])
    print(f"{time_of_theirs / time_of_ours:.1f} times faster")
