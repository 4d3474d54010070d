"""What users call: turns prompts into requests, steps until they have ended, and turns tokens into text.

Follow `LLM.generate` downwards: `LLMEngine.step` is next.
"""

import time
from typing import Any

from nanovllm.assembly import assemble, extend, open_model
from nanovllm.engine.input_processor import Prompt
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.results import make_result
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.progress import Progress, tqdm


@extend
class LLM(LLMEngine):
    """
    `LLM(model, **options)`: options are the fields of `Config`.

    After any exception inside `generate` the engine is empty and usable: no request left, all blocks free.
    """

    assembly = f"{assemble.__module__}:{assemble.__name__}"
    open_model = staticmethod(open_model)

    def generate(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[dict[str, Any]]:
        """
        Complete the prompts; results are in their order, see results.py.

        prompts: strings or lists of token ids. sampling_params: one for all, or one each; None is what the
        checkpoint recommends. Raises a ValueError that names the wrong prompt or parameter, before anything
        is computed.
        """
        sequences = list(map(self.make_sequence, self.prompts.read_all(prompts, sampling_params)))
        try:
            self.add(sequences)
            with Progress(len(sequences), tqdm if use_tqdm else None) as progress:
                while not self.is_finished():
                    start = time.perf_counter()
                    finished, num_tokens = self.step()
                    progress.count(len(finished), num_tokens, time.perf_counter() - start)
        except BaseException:
            self.clear()
            raise
        return [make_result(self.tokenizer, seq) for seq in sequences]
