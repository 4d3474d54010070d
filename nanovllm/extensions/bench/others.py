"""Other engines on the same work: transformers' `generate`, and llama.cpp."""

import argparse
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from nanovllm.assembly import open_model
from nanovllm.config import Config
from nanovllm.extensions.bench.engine import SAMPLING
from nanovllm.extensions.bench.workloads import Workload


class Transformers:
    """
    What one would write without an engine: `generate` on padded batches, each as long as its longest. The
    model is the one that this engine would run, with random weights: no sequence ends before its
    `max_tokens`, so they cost the same time as a checkpoint's.
    """

    warmup_seqs = 2

    def __init__(self, args: argparse.Namespace):
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

        hf_config = open_model(args.model, {"load_format": args.load_format})[0].hf_config
        own_dtype = hf_config.dtype or ("float32" if args.device == "cpu" else "bfloat16")
        dtype = own_dtype if args.dtype == "auto" else args.dtype
        fields = CONFIG_MAPPING[hf_config.raw["model_type"]].from_dict(hf_config.raw)
        with torch.device(args.device):
            model = AutoModelForCausalLM.from_config(fields, dtype=getattr(torch, dtype))
        self.model, self.batch_size = model.eval(), args.batch_size
        names = SAMPLING if args.temperature else ()
        sampling = {name: getattr(args, name) for name in names}
        # In place of the model's own defaults, which could end a sequence early or narrow the sampling.
        model.generation_config = GenerationConfig(pad_token_id=0, do_sample=bool(names), **sampling)

    def run(self, workload: Workload) -> Counter[str]:
        run, workload, size = Counter(), workload.without_n(), self.batch_size
        start = time.perf_counter()
        for i in range(0, len(workload.prompts), size):
            prompts, max_tokens = workload.prompts[i : i + size], workload.max_tokens[i : i + size]
            tensors = [torch.tensor(prompt) for prompt in prompts]
            ids = pad_sequence(tensors, True, padding_value=-1, padding_side="left").to(self.model.device)
            output = self.model.generate(
                ids.clamp(0), attention_mask=(ids >= 0).long(), max_new_tokens=max(max_tokens)
            )
            made = output.shape[1] - ids.shape[1]
            # A request's tokens beyond its `max_tokens` were computed for nothing and do not count.
            run["output_tokens"] += sum(min(made, count) for count in max_tokens)
        run["seconds"] = time.perf_counter() - start
        return run

    def close(self) -> None:
        del self.model


class LlamaCpp:
    """
    llama.cpp on a .gguf file, with as many threads as torch has: all prompts at first, as many tokens at a
    time as this engine takes, then a token of every sequence a step. Greedy.
    """

    warmup_seqs = 2

    def __init__(self, args: argparse.Namespace):
        try:
            import llama_cpp as api
        except ImportError as error:
            raise ValueError(
                "--engine llama.cpp needs llama-cpp-python: pip install llama-cpp-python"
            ) from error
        path = open_model(args.model, {"load_format": args.load_format})[0].model
        if args.device != "cpu" or args.temperature or not path.lower().endswith(".gguf"):
            raise ValueError("--engine llama.cpp needs --device cpu, --temperature 0 and a .gguf file")
        self.api = api
        self.be_quiet = api.llama_log_callback(lambda *_: None)  # called as long as the library lives
        api.llama_log_set(self.be_quiet, None)
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {path}")
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))

    def run(self, workload: Workload) -> Counter[str]:
        api, run, workload = self.api, Counter(), workload.without_n()
        prompts, max_tokens = workload.prompts, workload.max_tokens
        params = api.llama_context_default_params()
        params.n_ctx = sum(map(len, prompts)) + sum(max_tokens)
        params.n_seq_max, params.kv_unified = len(prompts), True
        params.n_batch, params.n_ubatch = min(Config.max_num_batched_tokens, params.n_ctx), 512
        params.n_threads = params.n_threads_batch = torch.get_num_threads()
        context = api.llama_init_from_model(self.model, params)
        if not context:
            raise ValueError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        inputs = [
            (token, i, seq, i == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for i, token in enumerate(prompt)
        ]
        run["prefill_tokens"], coming, start = len(inputs), [], time.perf_counter()
        for begin in range(0, len(inputs), params.n_batch):
            coming += self._step(context, inputs[begin : begin + params.n_batch])
        run["prefill_seconds"] = time.perf_counter() - start
        for step in range(1, max(max_tokens)):
            coming = self._step(context, [each for each in coming if max_tokens[each[2]] > step])
            run["decode_tokens"] += len(coming)
        run["seconds"] = time.perf_counter() - start
        run["decode_seconds"] = run["seconds"] - run["prefill_seconds"]
        run["output_tokens"] = len(prompts) + run["decode_tokens"]
        api.llama_free(context)
        return run

    def _step(self, context: Any, inputs: list[tuple]) -> list[tuple]:
        """
        Compute one step of (token, position, sequence, whether it samples). The tokens that are sampled in
        it, the likeliest, are the inputs of the next.
        """
        api, size, sampled = self.api, (self.vocab_size,), []
        batch = api.llama_batch_init(len(inputs), 0, 1)
        batch.n_tokens = len(inputs)
        for i, (batch.token[i], batch.pos[i], seq, batch.logits[i]) in enumerate(inputs):
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        failed = api.llama_decode(context, batch)
        api.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        for i, (_, position, seq, samples) in enumerate(inputs):
            if samples:
                logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, i), size)
                sampled.append((int(logits.argmax()), position + 1, seq, True))
        return sampled

    def close(self) -> None:
        self.api.llama_model_free(self.model)
