"""What users call: turns prompts into sequences, runs steps until all are finished, and turns tokens into
text.

Follow `generate` -> `step` -> `Scheduler.schedule` -> `ModelRunner.run` -> `Scheduler.postprocess`.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from numbers import Integral
from operator import itemgetter
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner, StepOutput
from nanovllm.engine.ranks import Ranks
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checkpoint import open_checkpoint
from nanovllm.utils.detokenizer import Detokenizer

Prompt = str | list[int] | dict[str, Any]
Messages = list[dict[str, Any]]


class Step(NamedTuple):
    """A step under way."""

    sequences: list[Sequence]
    drawing: list[Sequence]
    num_tokens: int
    output: StepOutput


class LLMEngine:
    """
    `LLMEngine(model, **options)`: options are the fields of `Config`.

    After any exception inside `generate` the engine is empty and usable: no request left, all blocks free.
    """

    model_runner: ModelRunner | None = None
    ranks: Ranks | None = None

    def __init__(self, model: str, **options: Any):
        self.config = Config.from_options(model, options)
        checkpoint = open_checkpoint(self.config.model, self.config.load_format)
        self.config.model = checkpoint.path
        self.config.fill_in(checkpoint.hf_config())
        with ThreadPoolExecutor(1) as pool:  # a tokenizer takes long to import and needs no device
            tokenizer = pool.submit(checkpoint.tokenizer)
            self.model_runner = self._start_runner()
            try:
                self.tokenizer = tokenizer.result()
                self.config.eos = checkpoint.eos_token_ids(self.tokenizer)
            except BaseException:
                self.exit()
                raise
        self.scheduler = Scheduler(self.config)
        self._seeds = random.Random(self.config.seed)
        self._overlap = self.config.device != "cpu"
        self._under_way: Step | None = None
        self._requests: dict[int, Sequence] = {}  # those that are not finished, by seq_id
        self._texts: dict[int, Detokenizer] = {}  # of those with stop texts
        self._aborted: list[Sequence] = []  # for the next step to report
        self._counts = Counter()

    def _start_runner(self) -> ModelRunner:
        """This process's model runner, which has the other ranks' with it."""
        if self.config.tensor_parallel_size == 1:
            return ModelRunner(self.config)
        self.ranks = Ranks(self.config)
        try:
            return ModelRunner(self.config, 0, self.ranks.group, self.ranks)
        except BaseException as error:
            try:
                if isinstance(error, RuntimeError):
                    self.ranks.explain(error)
                raise
            finally:
                self.ranks.group.abort()
                self.ranks.close(at_once=True)
                self.ranks.group.close()

    def exit(self) -> None:
        """
        Free the devices' memory and end the other ranks. May be called twice; the engine cannot be used
        afterwards.
        """
        runner, self.model_runner = self.model_runner, None
        if runner is not None:
            if self.ranks is not None:
                self.ranks.finish_step()
            runner.exit()
        if self.ranks is not None:
            self.ranks.close()

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *_: Any) -> None:
        self.exit()

    def __del__(self) -> None:
        self.exit()

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams) -> int:
        """
        Queue one request and return its id. Raises ValueError, changing nothing, if it cannot be served.
        """
        self._check_usable()
        token_ids = self._check_prompt(prompt, sampling_params, "prompt")
        if sampling_params.n > 1:
            raise ValueError(f"add_request makes one completion of a prompt, got n={sampling_params.n}")
        return self._enqueue(token_ids, sampling_params).seq_id

    def _enqueue(self, token_ids: list[int], params: SamplingParams, index: int = 0) -> Sequence:
        """Queue the index-th completion of a prompt."""
        seed = self._seeds.getrandbits(63) if params.seed is None else (params.seed + index) % 2**63
        seq = Sequence(token_ids, params, self.config.kvcache_block_size, seed)
        self.scheduler.add(seq)
        self._requests[seq.seq_id] = seq
        if params.stop:
            self._texts[seq.seq_id] = Detokenizer(self.tokenizer, params.skip_special_tokens)
        return seq

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """
        Run one step. Returns the requests that finished as (id, completion token ids), and the number of
        prompt tokens computed, or minus the number of sequences decoded. On a GPU a step returns what the one
        before it computed (the first returns nothing), so that the device never waits for the host. Aborted
        requests are returned by the next step.
        """
        self._check_usable()
        start = time.perf_counter()
        sequences, is_prefill = self.scheduler.schedule()
        step = self._launch(sequences, is_prefill) if sequences else None
        if self._overlap:  # the host's work on this step is done while the device is busy with it
            step, self._under_way = self._under_way, step
        finished, num_tokens = self._collect(step) if step is not None else ([], 0)
        self._counts["seconds"] += time.perf_counter() - start
        finished, self._aborted = self._aborted + finished, []
        return [(seq.seq_id, seq.completion_token_ids) for seq in finished], num_tokens

    def _launch(self, sequences: list[Sequence], is_prefill: bool) -> Step:
        num_tokens = sum(seq.num_scheduled_tokens for seq in sequences) if is_prefill else -len(sequences)
        output = self.model_runner.launch(sequences, is_prefill)
        return Step(sequences, self.scheduler.advance(sequences), num_tokens, output)

    def _collect(self, step: Step) -> tuple[list[Sequence], int]:
        token_ids = step.output.token_ids()
        self._check_usable()  # where a rank has failed the tokens are worthless
        finished = self.scheduler.postprocess(step.sequences, token_ids, step.drawing)
        if self._texts:
            finished = self._check_stop_texts(step.drawing, finished)
        for seq in finished:
            del self._requests[seq.seq_id]
            self._counts["finished"] += 1
            self._counts["prompt"] += seq.num_prompt_tokens
            self._counts["cached"] += seq.num_prompt_tokens_cached
        self._counts["generated"] += len(step.drawing)
        return finished, step.num_tokens

    def _check_stop_texts(self, drawing: list[Sequence], finished: list[Sequence]) -> list[Sequence]:
        """
        End the sequences whose newest tokens complete a stop text, and return all that have finished. Where
        steps overlap, the token that such a sequence draws meanwhile is never looked at.
        """
        for seq in drawing:
            text = self._texts.get(seq.seq_id)
            if text is None:
                continue
            num_old = len(text.text)
            text.add(seq.token_ids[seq.num_prompt_tokens + len(text.token_ids) :])
            found = [
                (text.text.find(stop, max(0, num_old - len(stop) + 1)), stop)
                for stop in seq.sampling_params.stop
            ]
            found = [(place, stop) for place, stop in found if place >= 0]
            if found:
                place, stop = min(found)
                keep = len(stop) if seq.sampling_params.include_stop_str_in_output else 0
                seq.text = text.text[: place + keep]
                if not seq.is_finished:
                    finished.append(seq)
                self.scheduler.stop(seq, stop)
            if seq.is_finished:
                del self._texts[seq.seq_id]
        return finished

    def abort(self, request_id: int) -> None:
        """
        End a request and free its blocks at once. Its result has what there is so far and the finish_reason
        "abort". That it has finished already, or never was, is no error.
        """
        self._check_usable()
        seq = self._requests.pop(request_id, None)
        if seq is not None:
            self.scheduler.abort(seq)
            self._texts.pop(request_id, None)
            self._aborted.append(seq)

    def stats(self) -> dict[str, float]:
        """
        Counts since the engine was made: requests (finished, running and waiting now), prompt tokens of the
        finished ones and how many of these the KV cache had, tokens drawn, preemptions, and tokens drawn per
        second of computing.
        """
        counts, scheduler = self._counts, self.scheduler
        return {
            "num_requests_finished": counts["finished"],
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "num_prompt_tokens": counts["prompt"],
            "num_cached_tokens": counts["cached"],
            "cache_hit_rate": counts["cached"] / max(counts["prompt"], 1),
            "num_generated_tokens": counts["generated"],
            "num_preemptions": scheduler.num_preemptions,
            "tokens_per_second": counts["generated"] / counts["seconds"] if counts["seconds"] else 0.0,
        }

    def is_finished(self) -> bool:
        """Whether no request is left."""
        return self.scheduler.is_finished() and self._under_way is None and not self._aborted

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
        parameter at fault, before anything is computed.

        Every result has
          text, token_ids    the completion; token_ids include what ended it
          finish_reason      "stop" (an end-of-sequence token, a stop text or token), "length" or "abort"
          stop_reason        the stop text or stop token id that ended it, else None
          num_prompt_tokens, num_cached_tokens   of the prompt, and how many of these the KV cache had
          outputs            with n > 1 all completions, of which the first also stands above
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
        between two results, and closing the iterator drops what is left.
        """
        self._check_idle()
        prompts = self._as_list_of_prompts(prompts)
        params = self._as_list_of_params(sampling_params, len(prompts))
        checked = [
            self._check_prompt(prompt, p, f"prompts[{i}]")
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
        ]
        return self._generate(list(zip(checked, params, strict=True)), use_tqdm)

    def _generate(
        self, requests: list[tuple[list[int], SamplingParams]], use_tqdm: bool
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        self._check_idle()
        try:
            groups = [[self._enqueue(ids, params, i) for i in range(params.n)] for ids, params in requests]
            index = {seq.seq_id: i for i, group in enumerate(groups) for seq in group}
            num_left = list(map(len, groups))
            for seq_id in self._run_to_end(len(index), use_tqdm):
                i = index[seq_id]
                num_left[i] -= 1
                if not num_left[i]:
                    yield i, self._result(groups[i])
        except BaseException:
            self._clear()
            raise

    def stream(self, prompt: Prompt, sampling_params: SamplingParams = SamplingParams()) -> Iterator[str]:
        """
        The text of one completion, piece by piece while it is made: whole characters that join to the "text"
        of `generate`. Closing the iterator drops the request.
        """
        self._check_idle()
        token_ids = self._check_prompt(prompt, sampling_params, "prompt")
        self._check_streamable(sampling_params)
        return self._stream(token_ids, sampling_params)

    def _stream(self, token_ids: list[int], params: SamplingParams) -> Iterator[str]:
        self._check_idle()
        try:
            growth = TextGrowth(self, self._enqueue(token_ids, params))
            while not self.is_finished():
                self.step()
                if piece := growth.look():
                    yield piece
        except BaseException:
            self._clear()
            raise

    def _check_streamable(self, params: SamplingParams) -> None:
        if self.tokenizer is None or not params.detokenize or params.n > 1:
            raise ValueError(
                f"stream gives the text of one completion: it needs a tokenizer, detokenize and n=1, got "
                f"{params}"
            )

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, as a prompt of it would have them."""
        if not isinstance(text, str):
            raise ValueError(f"text must be a string, got {text!r}")
        return self._tokenize(text, "text")

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        if self.tokenizer is None:
            raise ValueError(f"{self.config.model!r} has no tokenizer")
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _result(self, completions: list[Sequence]) -> dict[str, Any]:
        outputs = [
            {
                "text": self._text(seq),
                "token_ids": seq.completion_token_ids,
                "finish_reason": seq.finish_reason,
                "stop_reason": seq.stop_reason,
            }
            for seq in completions
        ]
        first = completions[0]
        prompt = {
            "num_prompt_tokens": first.num_prompt_tokens,
            "num_cached_tokens": first.num_prompt_tokens_cached,
        }
        return {**outputs[0], **prompt, **({"outputs": outputs} if len(outputs) > 1 else {})}

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
        if not isinstance(messages, list) or not messages:
            raise ValueError(f"messages must be a conversation or a list of conversations, got {messages!r}")
        conversations = [messages] if isinstance(messages[0], dict) else messages
        for i, conversation in enumerate(conversations):
            if (
                not isinstance(conversation, list)
                or not conversation
                or not all(isinstance(m, dict) and "role" in m and "content" in m for m in conversation)
            ):
                raise ValueError(
                    f"conversation {i} must be a list of dicts with role and content, got {conversation!r}"
                )
        if (
            self.tokenizer is None
            or (chat_template or getattr(self.tokenizer, "chat_template", None)) is None
        ):
            raise ValueError(f"the tokenizer of {self.config.model!r} has no chat template")
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message=True needs add_generation_prompt=False, got True")
        options = dict(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
        token_ids = []
        for i, conversation in enumerate(conversations):
            try:
                text = self.tokenizer.apply_chat_template(conversation, tokenize=False, **options)
            except Exception as error:  # whatever a template raises
                raise ValueError(f"the chat template does not accept conversation {i}: {error}") from error
            # the template writes the special tokens itself
            token_ids.append(self.tokenizer.encode(text, add_special_tokens=False))
        return self.generate(token_ids, sampling_params, use_tqdm)

    def _clear(self) -> None:
        """Drop every request."""
        self._under_way = None
        self._requests.clear()
        self._texts.clear()
        self._aborted.clear()
        self.scheduler.clear()
        if self.ranks is not None and self.ranks.failure:
            self.exit()
        elif self.model_runner is not None:  # not shut down in the middle of its work
            self.model_runner.call("reset")

    def _run_to_end(self, num_requests: int, use_tqdm: bool) -> Iterator[int]:
        """Step until no request is left, yielding the ids of those that finish; shows progress and speed."""
        speed = {"Prefill": "-", "Decode": "-"}
        with tqdm(total=num_requests, desc="Generating", dynamic_ncols=True, disable=not use_tqdm) as bar:
            while not self.is_finished():
                start = time.perf_counter()
                finished, num_tokens = self.step()
                rate = abs(num_tokens) / (time.perf_counter() - start)
                speed["Prefill" if num_tokens > 0 else "Decode"] = f"{rate:.0f}tok/s"
                bar.set_postfix(speed, refresh=False)
                bar.update(len(finished))
                yield from (seq_id for seq_id, _ in finished)

    def _text(self, seq: Sequence) -> str:
        """The text of a finished completion."""
        params, token_ids = seq.sampling_params, seq.completion_token_ids
        if self.tokenizer is None or not params.detokenize:
            return ""
        if seq.text is not None:
            return seq.text
        if seq.stop_reason is not None and not params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        return self.tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)

    def _check_idle(self) -> None:
        self._check_usable()
        if not self.is_finished():
            raise RuntimeError("this needs an idle engine, but there are requests that are not finished")

    def _check_usable(self) -> None:
        if self.ranks is not None:
            self.ranks.check()
        if self.model_runner is None:
            raise RuntimeError("this engine has been shut down by exit()")

    @staticmethod
    def _as_list_of_prompts(prompts: Any) -> list[Any]:
        if isinstance(prompts, (str, dict)):
            return [prompts]
        if not isinstance(prompts, (list, tuple)):
            raise ValueError(
                f"prompts must be a string, a list of token ids, or a list of these, got {prompts!r}"
            )
        if prompts and all(isinstance(p, Integral) for p in prompts):
            return [prompts]
        return list(prompts)

    @staticmethod
    def _as_list_of_params(sampling_params: Any, count: int) -> list[SamplingParams]:
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        if not isinstance(sampling_params, (list, tuple)):
            raise ValueError(
                f"sampling_params must be SamplingParams or a list of them, got {sampling_params!r}"
            )
        if len(sampling_params) != count:
            raise ValueError(f"there are {count} prompts but {len(sampling_params)} sampling_params")
        return list(sampling_params)

    def _tokenize(self, text: str, name: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"{name} is text, but {self.config.model!r} has no tokenizer; pass token ids")
        try:
            return self.tokenizer.encode(text)
        except Exception as error:
            raise ValueError(f"{name} cannot be tokenized: {error}; got {text!r}") from error

    def _check_prompt(self, prompt: Any, sampling_params: Any, name: str) -> list[int]:
        """The prompt's token ids. Raises ValueError if the request cannot be served."""
        if not isinstance(sampling_params, SamplingParams):
            raise ValueError(f"sampling_params for {name} must be SamplingParams, got {sampling_params!r}")
        if isinstance(prompt, dict):
            if list(prompt) not in (["prompt"], ["prompt_token_ids"]):
                raise ValueError(f"{name} must have one key, prompt or prompt_token_ids, got {prompt!r}")
            ((key, prompt),) = prompt.items()
            if isinstance(prompt, str) != (key == "prompt"):
                raise ValueError(f"{name}: {key} cannot be {prompt!r}")
        if isinstance(prompt, str):
            token_ids = self._tokenize(prompt, name)
        elif isinstance(prompt, (list, tuple)):
            token_ids = list(prompt)
        else:
            raise ValueError(f"{name} must be a string or a list of token ids, got {prompt!r}")
        if not token_ids:
            raise ValueError(f"{name} is empty: {prompt!r}")
        if sampling_params.stop and self.tokenizer is None:
            raise ValueError(
                f"sampling_params for {name} have stop={sampling_params.stop!r}, but "
                f"{self.config.model!r} has no tokenizer; use stop_token_ids"
            )
        vocab_size = self.config.hf_config.vocab_size
        if set(map(type, token_ids)) != {int}:  # numpy's integers, or what is no token id at all
            for token_id in token_ids:
                if isinstance(token_id, bool) or not isinstance(token_id, Integral):
                    raise ValueError(f"{name}: token ids must be integers, got {token_id!r}")
            token_ids = [int(token_id) for token_id in token_ids]
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{name}: token ids must be from 0 to {vocab_size - 1}, got {token_id}")
        try:
            self.scheduler.check(len(token_ids), sampling_params.max_tokens)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return token_ids


class TextGrowth:
    """What a sequence's text grows by: whole characters, and nothing that a stop text may yet take back."""

    def __init__(self, engine: LLMEngine, seq: Sequence):
        self.engine = engine
        self.seq = seq
        self.text = Detokenizer(engine.tokenizer, seq.sampling_params.skip_special_tokens)
        self.num_shown = 0

    def look(self) -> str:
        """What is new since the last look."""
        seq, text = self.seq, self.text
        if seq.is_finished:
            sure = self.engine._text(seq)
        else:
            text.add(seq.token_ids[seq.num_prompt_tokens + len(text.token_ids) :])
            sure = text.text[: len(text.text) - text.num_held_back(seq.sampling_params.stop)]
        piece = sure[self.num_shown :]
        self.num_shown += len(piece)
        return piece
