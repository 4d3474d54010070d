"""When does a sequence get its next block of KV cache?

An Observer is told of every block. With blocks of 16, a prompt of 15 tokens and one of 16 behave alike until
the border: the token that is drawn last is not in the cache yet. It is written by the step that computes the
next one. So a block is opened when there is a token *beyond* the border, and closed, which is when others can
find it, when its last token has been written or is about to be.
"""

from typing import Any

from harness import callers_of

from nanovllm import LLM, SamplingParams
from nanovllm.engine.interfaces import Observer
from nanovllm.engine.sequence import Sequence

SIZE = 16


class WatchBlocks(Observer):
    watches = True

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, int]] = []
        self.num_tokens = 0

    def added(self, sequences: list[Sequence]) -> None:
        [self.seq] = sequences

    def block(self, event: str, block_id: int, seq: Sequence | None) -> None:
        self.rows.append((self.seq.num_tokens, event, block_id))

    def launching(self, step: Any) -> None:
        kind = "prefill" if step.batch.is_prefill else "decode"
        self.rows.append((self.seq.num_tokens, f"{kind} of {self.seq.num_scheduled_tokens}", -1))


def watch(num_prompt_tokens: int) -> list[tuple[int, str, int]]:
    watcher = WatchBlocks()
    options = {"kvcache_block_size": SIZE, "num_kvcache_blocks": 8}
    with LLM("smollm2", **options, extensions=[watcher]) as llm, callers_of(WatchBlocks):
        prompt = list(range(100, 100 + num_prompt_tokens))
        llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    return watcher.rows


def main() -> None:
    runs = {length: watch(length) for length in (SIZE - 2, SIZE - 1, SIZE)}
    for length, rows in runs.items():
        print(f"\nA prompt of {length} tokens\n  tokens | what happens")
        for num_tokens, event, block_id in rows:
            print(f"  {num_tokens:6} | {event}" + (f" block {block_id}" if block_id >= 0 else ""))
    for length, rows in runs.items():
        # The second block is taken when the sequence has SIZE + 1 tokens, whatever the prompt's length.
        taken = [num_tokens for num_tokens, event, _ in rows if event == "taken"]
        assert taken == [length, SIZE + 1], taken
        assert [num_tokens >= SIZE for num_tokens, event, _ in rows if event == "closed"] == [True]


if __name__ == "__main__":
    main()
