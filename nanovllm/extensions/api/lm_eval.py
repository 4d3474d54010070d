"""Runs the tasks of lm-evaluation-harness: `python -m nanovllm.integrations.lm_eval --model nanovllm ...`
is `lm_eval` with one more model.

Knows the harness and `LLM`. All requests of a task go to the engine at once, sorted by their tokens: those
that begin alike are neighbours, and what they have in common is computed once.
"""

from itertools import chain, islice
from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import Reorderer, get_rolling_token_windows, make_disjoint_window

from nanovllm import LLM, SamplingParams
from nanovllm.utils.validation import check

# Within a step prompts share whole blocks only, so that small ones leave less to be computed twice.
BLOCK_SIZE = 16
DEFAULT_DEVICE = "cuda:0"  # the harness's, also where there is none
Scored = tuple[Any, list[int], list[int]]  # the harness's name for the request, context, continuation


def begin_alike(request: tuple[list[int], Any]) -> tuple[int, ...]:
    """Sorted by this, requests whose tokens begin alike are neighbours."""
    return tuple(request[0])


@register_model("nanovllm")
class NanoVLLM(TemplateLM):
    """
    pretrained:         the model, as for `LLM`, whose other options may be given too.
    max_length:         most tokens that are computed for a request; as many as the model can, if not given.
    max_gen_toks:       most tokens of a completion, where the task does not say.
    add_bos_token:      begin each text with the special tokens, or not; None leaves that to the tokenizer.
    prefix_token_id:    what stands before a text that has no context; the tokenizer's BOS, else EOS.
    chat_template_args: variables of the chat template, of which enable_thinking may be given by itself.

    The harness's batch_size is not needed: the engine makes its own batches.
    """

    def __init__(
        self,
        pretrained: str,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
        device: str = DEFAULT_DEVICE,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **options: Any,
    ):
        super().__init__()
        if max_length is not None:
            options["max_model_len"] = max_length + 1  # nothing is computed after the last token
        options = {"kvcache_block_size": BLOCK_SIZE, "max_model_len": None, **options}
        self.llm = LLM(pretrained, device="auto" if device == DEFAULT_DEVICE else device, **options)
        self.tokenizer = self.llm.tokenizer
        if self.tokenizer is None:
            raise ValueError(f"{pretrained!r} has no tokenizer, which evaluation needs")
        self.pretrained = pretrained
        self.max_length = self.llm.prompts.max_num_tokens - 1
        self.max_gen_toks = max_gen_toks
        self.add_bos_token = add_bos_token
        self.custom_prefix_token_id = prefix_token_id
        self.chat_template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self.chat_template_args["enable_thinking"] = enable_thinking

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        candidates = self.custom_prefix_token_id, self.tokenizer.bos_token_id, self.eot_token_id
        return next(token_id for token_id in candidates if token_id is not None)

    @property
    def tokenizer_name(self) -> str:
        """Part of the name under which the harness keeps rendered requests."""
        return (self.tokenizer.name_or_path or self.pretrained).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self.chat_template_args,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """A text that a chat template has begun with BOS gets no second one."""
        if add_special_tokens is None:
            begins = string.startswith(self.tokenizer.decode([self.prefix_token_id]))
            add_special_tokens = False if begins else self.add_bos_token
        return self.llm.prompts.tokenize(string, "a request", add_special_tokens is not False)

    def _loglikelihood_tokens(
        self, requests: list[Scored], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """
        Log-likelihood of each continuation, and whether it is greedy. Contexts that are too long lose their
        start.
        """
        texts = []  # each with the place of its continuation
        for _, context, continuation in requests:
            rule = f"a continuation must have at most max_length={self.max_length} tokens"
            check(len(continuation) <= self.max_length, rule, len(continuation))
            text = (context + continuation)[-self.max_length - 1 :]
            texts.append((text, len(text) - len(continuation)))
        order = Reorderer(texts, begin_alike)
        texts, first_tokens = map(list, zip(*order.get_reordered(), strict=True))
        scores = self.llm.score(texts, not disable_tqdm, first_tokens)
        answers = [(score["logprob"], {*score["token_ranks"]} <= {None, 1}) for score in scores]
        answers = order.get_original(answers)
        for (name, *_), answer in zip(requests, answers, strict=True):
            if name is not None:
                self.cache_hook.add_partial("loglikelihood", name, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows of max_length."""
        windows, sums = [], []
        for request in requests:
            token_ids = self.tok_encode(*request.args)
            cut = get_rolling_token_windows(token_ids, self.prefix_token_id, self.max_length, context_len=1)
            windows.append([(None, *make_disjoint_window(window)) for window in cut])
        logprobs = iter(self._loglikelihood_tokens([*chain.from_iterable(windows)], disable_tqdm))
        for request, some in zip(requests, windows, strict=True):
            sums.append(sum(logprob for logprob, _ in islice(logprobs, len(some))))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, sums[-1])
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        asked = []
        for context, settings in (request.args for request in requests):
            params = self._read_settings(settings)
            room = self.max_length - params.max_tokens
            check(room > 0, f"max_gen_toks must be less than max_length={self.max_length}", params.max_tokens)
            asked.append((self.tok_encode(context)[-room:], params))
        order = Reorderer(asked, begin_alike)
        results = self.llm.generate(*map(list, zip(*order.get_reordered(), strict=True)), not disable_tqdm)
        texts = order.get_original([result["text"] for result in results])
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _read_settings(self, settings: dict[str, Any]) -> SamplingParams:
        """
        The task's gen_kwargs, without those that it leaves open. What is not the harness's own must be an
        option of `SamplingParams`.
        """
        settings = {name: value for name, value in settings.items() if value is not None}
        settings = normalize_gen_kwargs(settings, self.max_gen_toks)
        temperature, max_tokens = settings.pop("temperature", 0), settings.pop("max_gen_toks")
        stop = [text for text in settings.pop("until") if text]
        del settings["do_sample"]  # has decided the temperature
        return SamplingParams(float(temperature), max_tokens, stop=stop, **settings)


if __name__ == "__main__":
    cli_evaluate()
