"""What users call: turns prompts into requests, steps until they have ended, and turns tokens into text.

Follow `LLM.generate` downwards: `LLMEngine.step` is next.
"""

from typing import Any

from tqdm.auto import tqdm

from nanovllm.assembly import assemble_core, extend
from nanovllm.engine.input_processor import Prompt
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.progress import LOOK, Progress


def make_result(tokenizer: Any, seq: Sequence) -> dict[str, Any]:
    """
    text, token_ids    the completion; token_ids include what ended it, the text does not
    finish_reason      "stop" (an end-of-sequence token or a stop token), "length" or "abort"
    stop_reason        the stop token id that ended it, else None
    num_prompt_tokens, num_cached_tokens   of the prompt, and how many of these the KV cache had
    """
    token_ids = seq.completion_token_ids
    shown = token_ids[:-1] if seq.finish_reason == "stop" else token_ids
    return {
        "text": "" if tokenizer is None else tokenizer.decode(shown, skip_special_tokens=True),
        "token_ids": token_ids,
        "finish_reason": seq.finish_reason,
        "stop_reason": seq.stop_reason,
        "num_prompt_tokens": seq.num_prompt_tokens,
        "num_cached_tokens": seq.num_prompt_tokens_cached or 0,  # None: never admitted
    }


@extend
class LLM(LLMEngine):
    """
    `LLM(model, **options)`: options are the fields of `Config`.

    After any exception inside `generate` the engine is empty and usable: no request left, all blocks free.
    """

    assembly = staticmethod(assemble_core)

    def generate(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] = SamplingParams(),
        use_tqdm: bool = True,
    ) -> list[dict[str, Any]]:
        """
        Complete the prompts; results are in their order, see `make_result`.

        prompts: strings or lists of token ids. sampling_params: one for all, or one each. Raises a ValueError
        that names the wrong prompt or parameter, before anything is computed.
        """
        requests = self.prompts.read_all(prompts, sampling_params)
        try:
            sequences = self.add(requests)
            with tqdm(total=len(sequences), disable=not use_tqdm, **LOOK) as bar:
                progress = Progress(bar, self)
                while not self.is_finished():
                    progress.show(*self.step())
        except BaseException:
            self.clear()
            raise
        return [make_result(self.tokenizer, seq) for seq in sequences]
