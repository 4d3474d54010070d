"""What users call: turns prompts into requests, steps until they have ended, and turns tokens into text.

Follow `LLM.generate` downwards: `LLMEngine.step` is next.
"""

import time
from collections.abc import Iterable, Iterator
from numbers import Integral
from operator import itemgetter
from typing import Any

from tqdm.auto import tqdm

from nanovllm.engine.isolation import Isolation, outcome
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams, recommended_params
from nanovllm.text.prompts import Messages, Prompt, as_token_ids, check_template_kwargs
from nanovllm.text.results import GrowingText, make_result
from nanovllm.utils.validation import check_bool, shown


class LLM(LLMEngine):
    """
    `LLM(model, **options)`: options are the fields of `Config`.

    After any exception inside `generate` and its kin the engine is empty and usable: no request left, all
    blocks free.
    """

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] = SamplingParams(),
        use_tqdm: bool = True,
    ) -> list[dict[str, Any]]:
        """
        Complete the prompts; results are in their order.

        prompts: a string, a list of token ids or a dict with one of these as "prompt" or "prompt_token_ids",
        or a list of such. sampling_params: one for all, or one each. Raises ValueError naming the prompt or
        parameter at fault, before anything is computed. Warns of a max_tokens beyond the context, where a
        completion ends.

        Every result has
          text, token_ids    the completion; token_ids include what ended it
          finish_reason      "stop" (an end-of-sequence token, a stop text or token), "length" or "abort"
          stop_reason        the stop text or stop token id that ended it, else None
          num_prompt_tokens, num_cached_tokens   of the prompt, and how many of these the KV cache had
          outputs            with n > 1 all completions, of which the first also stands above
        and where parameters ask for them
          logprobs           of each token of the completion a dict {token id: Logprob}: of that token and the
                             likeliest ones, each with logprob, rank (1 is the likeliest) and decoded_token
          prompt_logprobs    the same for the prompt, whose first token has None
        """
        found = sorted(self.generate_iter(prompts, sampling_params, use_tqdm), key=itemgetter(0))
        return [result for _, result in found]

    def generate_iter(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] = SamplingParams(),
        use_tqdm: bool = False,
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """
        `generate` that yields (index of the prompt, result) as soon as a prompt is done. Nothing is computed
        between two results, and closing the iterator drops what is left. Until the last result other calls
        are a RuntimeError.
        """
        self._check_idle()
        check_bool(use_tqdm, "use_tqdm")
        return self._generate(self.prompts.read_all(prompts, sampling_params), use_tqdm)

    def _generate(
        self, requests: list[tuple[list[int], SamplingParams]], use_tqdm: bool
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        owner = self._begin()
        try:
            groups = [self._enqueue_all(*request) for request in requests]
            index = {seq.seq_id: i for i, group in enumerate(groups) for seq in group}
            num_left = list(map(len, groups))
            for seq_id in self._run_to_end(len(index), use_tqdm):
                i = index[seq_id]
                num_left[i] -= 1
                if not num_left[i]:
                    yield i, make_result(self.tokenizer, groups[i])
        except BaseException:
            self._drop(owner)
            raise

    def generate_from(
        self,
        requests: Iterable[tuple[Prompt, SamplingParams]],
        max_unfinished: int | None = None,
        return_exceptions: bool = False,
    ) -> Iterator[tuple[int, dict[str, Any] | Exception]]:
        """
        `generate_iter` for any number of requests in bounded memory: the next is taken from `requests` only
        while fewer than `max_unfinished` completions (default: twice max_num_seqs) are queued or running. A
        bad request is a ValueError when its turn comes. With `return_exceptions` a request that is bad, or
        fails for reasons of its own such as its size, yields (index, exception) and the others go on.
        """
        owner = self._begin()
        limit = 2 * self.config.max_num_seqs if max_unfinished is None else max_unfinished
        if isinstance(limit, bool) or not isinstance(limit, Integral) or limit < 1:
            raise ValueError(f"max_unfinished must be an integer of at least 1, got {shown(limit)}")
        check_bool(return_exceptions, "return_exceptions")
        step, result_of = self._step, make_result
        if return_exceptions:
            step, result_of = Isolation(self).step, outcome
        coming, groups = enumerate(requests), {}  # the second by seq_id: (index, all completions)
        has_warned = False
        try:
            while True:
                self._own(owner)
                refused = None
                while len(self._requests) < limit and (numbered := next(coming, None)) is not None:
                    i, request = numbered
                    try:
                        token_ids, params = self._read_request(i, request)
                        which = f"prompts[{i}], and maybe later ones"
                        has_warned = has_warned or self.prompts.warn_of_context([(token_ids, params)], which)
                        group = self._enqueue_all(token_ids, params)
                    except ValueError as error:
                        if not return_exceptions:
                            raise
                        refused = i, error
                        break
                    groups.update({seq.seq_id: (i, group) for seq in group})
                if refused is not None:
                    yield refused
                    continue
                if not groups and self.is_finished():
                    self._owner = None
                    return
                for seq_id, _ in step()[0]:
                    i, group = groups.pop(seq_id)
                    if not any(seq.seq_id in groups for seq in group):
                        yield i, result_of(self.tokenizer, group)
        except BaseException:
            self._drop(owner)
            raise

    def _read_request(self, i: int, request: Any) -> tuple[list[int], SamplingParams]:
        if not isinstance(request, tuple) or len(request) != 2:
            raise ValueError(f"requests[{i}] must be (prompt, SamplingParams), got {shown(request)}")
        prompt, params = request
        return self.prompts.read(prompt, params, f"prompts[{i}]"), params

    def stream(self, prompt: Prompt, sampling_params: SamplingParams = SamplingParams()) -> Iterator[str]:
        """
        The text of one completion, piece by piece while it is made: whole characters that join to the "text"
        of `generate`. Closing the iterator drops the request.
        """
        self._check_idle()
        token_ids = self.prompts.read(prompt, sampling_params)
        self.prompts.check_streamable(sampling_params)
        self.prompts.warn_of_context([(token_ids, sampling_params)])
        return self._stream(token_ids, sampling_params)

    def _stream(self, token_ids: list[int], params: SamplingParams) -> Iterator[str]:
        owner = self._begin()
        try:
            text = GrowingText(self.tokenizer, self._enqueue(self._make_sequence(token_ids, params)))
            while not text.seq.is_finished:
                self._step()
                if text.seq.is_finished:
                    self._finish_steps()
                if piece := text.look():
                    yield piece
        except BaseException:
            self._drop(owner)
            raise

    def score(self, prompts: Prompt | list[Prompt], use_tqdm: bool = True) -> list[dict[str, Any]]:
        """
        How likely the model finds texts (or token ids, or dicts as for `generate`). Every result has
          token_ids        of the text
          token_logprobs   natural logarithm of each token's probability after those before it; None for the
                           first
          logprob          their sum, the log-likelihood of the text
        """
        check_bool(use_tqdm, "use_tqdm")
        texts = self.prompts.read_texts(prompts)
        self._begin()
        try:
            scored = [self._enqueue_scoring(token_ids) for token_ids in texts]
            for _ in self._run_to_end(sum(seq is not None for seq in scored), use_tqdm):
                pass
        except BaseException:
            self.clear()
            raise
        logprobs = [[logprob for logprob, *_ in seq.prompt_logprobs] if seq else [] for seq in scored]
        return [
            {"token_ids": ids, "token_logprobs": [None, *found], "logprob": sum(found)}
            for ids, found in zip(texts, logprobs, strict=True)
        ]

    def _enqueue_scoring(self, token_ids: list[int]) -> Sequence | None:
        """Queue what scores all tokens but the first; a single token leaves nothing to score."""
        if len(token_ids) == 1:
            return None
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        seq = self._make_sequence(token_ids[:-1], params)
        seq.scored_token_ids = token_ids[1:]
        return self._enqueue(seq)

    def chat(
        self,
        messages: Messages | list[Messages],
        sampling_params: SamplingParams | list[SamplingParams] = SamplingParams(),
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """
        `generate` for one conversation or a list of them, through the checkpoint's chat template or the one
        given. The answer is a new message, or with continue_final_message=True and
        add_generation_prompt=False more of the last one. What else the template understands (such as
        enable_thinking) goes into chat_template_kwargs.
        """
        self._check_usable()
        token_ids = self.prompts.read_chats(
            messages,
            chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **check_template_kwargs(chat_template_kwargs),
        )
        return self.generate(token_ids, sampling_params, use_tqdm)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, as a prompt of it would have them."""
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, got {shown(text)}")
        return self.prompts.tokenize(text, "text")

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model!r} has no tokenizer")
        if not isinstance(token_ids, (list, tuple)):
            raise ValueError(f"token_ids must be a list of token ids, got {shown(token_ids)}")
        check_bool(skip_special_tokens, "skip_special_tokens")
        vocab_size = max(self.prompts.vocab_size, len(self.tokenizer))  # either may have more
        token_ids = as_token_ids(token_ids, vocab_size, "token_ids")
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends. Raises ValueError for a bad value."""
        try:
            return recommended_params(self._generation_config)
        except ValueError as error:
            raise ValueError(f"generation_config.json of {self.config.model!r}: {error}") from None

    def _run_to_end(self, num_requests: int, use_tqdm: bool) -> Iterator[int]:
        """Step until they all are finished, yielding their ids as they are; shows progress and speed."""
        speed = {"Prefill": "-", "Decode": "-"}
        with tqdm(total=num_requests, desc="Generating", dynamic_ncols=True, disable=not use_tqdm) as bar:
            seconds = 0.0
            while num_requests:
                start = time.perf_counter()
                finished, num_tokens = self._step()
                seconds += time.perf_counter() - start
                if num_tokens:  # else it has only launched a step, for the next call to collect
                    phase = "Prefill" if num_tokens > 0 else "Decode"
                    speed[phase] = f"{abs(num_tokens) / seconds:.0f}tok/s"
                    seconds = 0.0
                bar.set_postfix(speed, refresh=False)
                bar.update(len(finished))
                num_requests -= len(finished)
                if not num_requests:
                    self._finish_steps()
                yield from (seq_id for seq_id, _ in finished)

    def _finish_steps(self) -> None:
        """Drain the step launched before we knew that every request had ended."""
        while not self.is_finished():
            self._step()
        self._owner = None

    def _check_idle(self) -> None:
        self._check_usable()
        if self._requests:
            raise RuntimeError("this needs an idle engine, but there are requests that are not finished")
        self._finish_steps()

    def _begin(self) -> object:
        """For a call that has the engine to itself. Returns the owner of its requests."""
        self._check_idle()
        self._owner = object()
        return self._owner

    def _drop(self, owner: object) -> None:
        """Drop every request, unless the engine has gone over to another call (an iterator may live on)."""
        if self._owner is owner and not self._is_python_ending():
            self.clear()
