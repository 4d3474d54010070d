"""Deliberate faults, one line each, in the parts that keep the books: the tests must fail for every one.

`python tests/long/mutations.py` applies them one at a time to a copy of this checkout and runs the tests
there, the quickest first, until one fails. A run that does not end counts as failed: some faults wait for
ever.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TESTS = [
    "simulation",
    "sequence",
    "block_manager",
    "scheduler",
    "token_prefixes",
    "hold_back",
    "admission",
    "budget",
    "planner",
    "copy_pages",
    "overlap",
    "graphs",
    "engine",
    "model",
    "reach",
    "scores",
    "trainer",
    "sampling",
    "edits",
    "logprobs",
    "requests",
    "prompts",
    "options",
    "porting",
    "lm_eval",
    "grammar",
]
TESTS += [
    "faults",
    "errors",
    "attention_variant",
    "compile_ahead",
    "layers",
    "kernels",
    "shared_prefix",
    "attention_rule",
    "experts",
    "gpt_oss",
    "exaone",
    "int8_cache",
    "fp8_products",
    "products",
    "layers",
    "moe",
    "quantised",
    "quantization",
    "loader",
    "adapter",
    "gguf_blocks",
    "gguf_products",
    "compiled_decode",
    "gguf",
    "gguf_architectures",
    "hub",
    "support",
    "published",
    "text_part",
    "tekken",
    "loader",
    "parallel",
    "adapter",
    "model_config",
    "transformers_model",
    "quantised_experts",
    "transformers_exact",
    "exact_kernels",
    "options",
    "terminal",
    "batch_ray",
    "batch",
    "async",
    "processes",
    "parallel",
    "scripts",
    "cpu",
    "schedules",
    "ranks",
]
TIMEOUT = 300  # seconds for one file of tests


class Mutation(NamedTuple):
    file: str
    line: str
    fault: str  # what stands there instead


def mutations_of(file: str, *pairs: tuple[str, str]) -> list[Mutation]:
    path = f"{file}.py" if "/" in file else f"nanovllm/engine/{file}.py"
    return [Mutation(path, line, fault) for line, fault in pairs]


MUTATIONS = [
    *mutations_of(
        "scheduler",
        ("not can_decode or self.policy.prefers_prefill(self.num_prefills_in_a_row)", "True"),
        ("len(self.running) > has_chunk", "len(self.running) > 0"),
        ("        self.num_prefills_in_a_row = 0\n        return", "        return"),
        ("seq is chunked or seq.slot < 0", "seq.slot < 0"),
        ("decoding = self.running if self.chunked is None else self.running[:-1]", "decoding = self.running"),
        ("if seq is self.blocked or not has_room", "if not has_room"),
        ("seq.num_computed_tokens + 1 - self.reach", "seq.num_computed_tokens + 2 - self.reach"),
        ("        self.blocked = None\n        self.block_manager", "        self.block_manager"),
        (
            "self.block_manager.release(seq, num_past)\n                    self.blocked = None",
            "self.block_manager.release(seq, num_past)",
        ),
        ("if verdict is Verdict.STOP or not", "if not"),
        ("if not scheduled:  # else", "if True:  # else"),
        ("len(self.free_slots) > len(self.held_back)", "self.free_slots"),
        ("hit.num_tokens > budget and scheduled", "hit.num_tokens > budget + 1 and scheduled"),
        ("self.held_back.append((seq, hit))", "self.held_back.append((seq, Hit([], 0)))"),
        ("            admission.ended(seq)\n", "            pass\n"),
        ("if seq.num_prompt_tokens_cached is None:", "if seq.num_prompt_tokens_cached is not None:"),
        ("self.chunked = seq if remaining > seq.num_scheduled_tokens else None", "self.chunked = None"),
        ("> seq.num_scheduled_tokens else None", "> seq.num_scheduled_tokens else self.chunked"),
        ("if seq.num_tokens % block_size > 1:", "if seq.num_tokens % block_size > 0:"),
        ("return running[-1]", "return running[0]"),
        ("self.waiting.move_to_end(seq, last=False)", "pass"),
        ("reverse=True)", "reverse=False)"),
        (
            "if seq.num_tokens == seq.request.max_num_tokens:",
            "if seq.num_tokens == seq.request.max_num_tokens - 1:",
        ),
        ("        self.running.remove(seq)\n", ""),
        ("if seq.status is over:", "if False:"),
        ("if num_known % block_size == 0 and", "if num_known % block_size == 1 and"),
        ("and seq.num_computed_tokens >= num_known:", "and True:"),
        (
            "or num_known == seq.request.max_num_tokens:",
            "or num_known == seq.request.max_num_tokens + 1:",
        ),
        ("is_stop = token_id in seq.request.end", "is_stop = token_id in seq.request.params.stop"),
        ("self.block_manager.forget_uncomputed(seq)", "pass"),
        ("seq.num_tokens = len(seq.token_ids)", "pass"),
        ("self.free_slots.append(seq.slot)", "self.free_slots.insert(0, 0)"),
        (
            "            del self.waiting[seq]\n        elif",
            "            self.waiting.pop(seq)\n            self.waiting = self.waiting.copy()\n        elif",
        ),
    ),
    *mutations_of(
        "block_manager",
        ("seq.block_table[seq.num_released_blocks : end]", "seq.block_table[:end]"),
        ("        seq.num_released_blocks = 0\n", ""),
        ("return len(self.free_block_ids) >= seq", "return len(self.free_block_ids) > seq"),
        ("len(self.used_block_ids.intersection(hit.blocks))", "len(hit.blocks)"),
        ("seq.num_blocks + len(hit.pins) - num_used", "seq.num_blocks - num_used"),
        ("block.ref_count += 1", "block.ref_count = 1"),
        ("(i + 1) * self.block_size <= seq.num_tokens:", "(i + 1) * self.block_size < seq.num_tokens:"),
        (
            "reversed(seq.block_table[seq.num_released_blocks : end])",
            "seq.block_table[seq.num_released_blocks : end]",
        ),
        (
            "        if block.ref_count == 0:\n            self.used",
            "        if True:\n            self.used",
        ),
        ("seq.num_cached_tokens = seq.num_computed_tokens = 0", "seq.num_cached_tokens = 0"),
        (
            "seq.block_table[seq.num_computed_tokens // self.block_size :]",
            "seq.block_table[seq.num_computed_tokens // self.block_size + 1 :]",
        ),
        ("return len(seq.block_table) >= seq", "return len(seq.block_table) > 0 * seq"),
        ("if len(seq.block_table) < seq.num_blocks", "if len(seq.block_table) < seq.num_tokens"),
        ("if block_id != -1 and self.blocks[block_id].token_ids == seq.block(i):", "if block_id != -1:"),
        ("        if prefix != -1:\n", "        if False:\n"),
        ("        self._forget(block_id)\n        self._take", "        self._take"),
        ("        self.prefix_cache.leaving(seq)\n", ""),
        ("        self._close(seq, end // self.block_size - 1)\n", ""),
        ("        self.prefix_cache.written(seq, end - self.block_size, end)\n", ""),
    ),
    *mutations_of(
        "block_manager",
        ("next(iter(self.pool.free_block_ids))", "next(reversed(self.pool.free_block_ids))"),
        ("return Hit(blocks, len(blocks) * size)", "return Hit(blocks, len(blocks))"),
        ("range(self.max_cached(seq) // size)", "range(len(seq) // size)"),
    ),
    *mutations_of(
        "nanovllm/extensions/prefixes/token_prefixes",
        ("min(end, most)", "end"),
        ("self.pinned: set[int] = set()", 'self.pinned = getattr(self, "pinned", set())'),
        ("self.pool.give_back(block_id)", "pass"),
        ("if rest and self.pool.blocks[", "if True or self.pool.blocks["),
        ("or seq in self.have_waited:", "or len(state.running) < 2:"),
        ("self.have_waited.add(seq)", "pass"),
        ("seq.block_table[first], num_copied", "seq.block_table[first], num_copied + 1"),
        ("TokenHit(blocks, start + num_common,", "TokenHit(blocks, start,"),
        ("hit.num_tokens, hit.pins = start, ()", "hit.pins = ()"),
        ("if last % size == 0 or last == seq.num_tokens:", "if last == seq.num_tokens:"),
        ("if length > best[1]:", "if length > best[1] + 1:"),
        ("if differ.any() else length", "if differ.any() else length + 1"),
        ("            if not children:", "            if False:"),
        ("children[max(i - 1, 0) : i + 1]", "children[i : i + 1]"),
        ("children[max(i - 1, 0) : i + 1]", "children[max(i - 1, 0) : i]"),
        ("del children[bisect_left(children, (packed, block_id))]", "del children[-1]"),
        (
            "insort(self.children.setdefault(place, []), (",
            "list.append(self.children.setdefault(place, []), (",
        ),
        ("pins = (block_id,) if num_common and", "pins = () if True or"),
        ("if pins and not pool.can_allocate(seq, hit):", "if False:"),
        ("if num_common and pool.blocks[block_id].ref_count == 0 else", "if num_common else"),
        ("self.add(seq, i, COMPUTING,", "self.add(seq, i, COMPUTED,"),
        ("if last % size == 0 or last == seq.num_tokens:", "if True:"),
        ("if last % size == 0 or last == seq.num_tokens:", "if last % size == 0:"),
        ("        if block_id in self.blocks:", "        if False:"),
        ('"num_soon", 0) - hit.num_tokens', '"num_soon", 0)'),
        ("if num_gained < WAIT", "if num_gained <= WAIT"),
        ("        self.forgotten(block_id)\n", ""),
    ),
    *mutations_of(
        "nanovllm/extensions/prefixes/planner",
        ("(pack(seq.request.token_ids), seq.seq_id)", "(pack([*seq.request.token_ids, 0]), seq.seq_id)"),
        ("for each in self._prompts if each[1] in rows]", "for each in self._prompts]"),
        ("before[pair] if pair in before", "next(iter(before.values())) if before"),
        ("plan.prefix_lens[sharing] = bounds[-1]", "plan.prefix_lens[sharing] = bounds[-1] + 1"),
        ("Prefix(first, last, begin, int(between.min()))", "Prefix(first, last, 0, int(between.min()))"),
        ("first + 1 + np.flatnonzero", "first + np.flatnonzero"),
        ("np.zeros(shape, np.int32) for shape", "np.ones(shape, np.int32) for shape"),
        ("plan.queries[queries] = sharing", "plan.queries[queries] = np.sort(sharing)"),
        ("min(self.queries_per_item, num_queries - first)", "self.queries_per_item"),
        ("plan.num_partials[sharing] += 1", "plan.num_partials[sharing] = 1"),
        ("longest[prefix.first : prefix.last] = i", "longest[prefix.first] = i"),
        ("yield prompts, [0, prefix.end]", "yield prompts, [prefix.begin, prefix.end]"),
        ("        self.num_prefix_tokens = 0\n", ""),
        ("= sharing[0], common", "= sharing[-1], common"),
        ("min([*self._common.values()][", "max([*self._common.values()]["),
        ("// self.unit * self.unit", ""),
    ),
    *mutations_of(
        "nanovllm/extensions/safety/admission",
        ("self.num_words += len(seq.", "self.num_words = len(seq."),
        ("self.num_words > self.processor.max_words", "self.num_words >= self.processor.max_words"),
        ("                self.num_words += len(other.request.own.get(name, ()))\n", ""),
        ("self.max_running = min(self.max_running + 1, self.max_num_seqs)", "pass"),
        ("min(self.max_running + 1, self.max_num_seqs)", "self.max_running + 1"),
        ("(is_first and len(running) < self.max_running)", "(len(running) < self.max_running)"),
        ("(is_first and len(running) < self.max_running)", "is_first"),
        ("num_owners(pool, block_id) == 1 and block_id not in found", "block_id not in found"),
        ("num_owners(pool, block_id) == 1 and block_id not in found", "num_owners(pool, block_id) == 1"),
        (" - (block_id in pool.prefix_cache.pinned)", ""),
        ("[*state.held_back, (seq, hit)]", "[(seq, hit)]"),
        (
            "(seq.request.max_num_tokens - seq.num_prompt_tokens - half)",
            "(seq.request.max_num_tokens - seq.num_prompt_tokens)",
        ),
        ('if seq.finish_reason != "abort" and may_end_early(seq):', "if may_end_early(seq):"),
        ('if seq.finish_reason != "abort" and may_end_early(seq):', 'if seq.finish_reason != "abort":'),
        ("SHARE_WEIGHT * (share - self.share)", "SHARE_WEIGHT * share"),
        ("half = seq.num_completion_tokens / 2", "half = 0"),
        ("is_first = state.held_back is not self.held_back", "is_first = self.held_back is None"),
        ("        self.num_blocks_at_most += -(-(seq.", "        at_most = -(-(seq."),
        ("sorted(growing, reverse=True)", "sorted(growing)"),
        ("needed += full - count", "needed += full"),
        ("insort(rests, rest)", "rests.append(rest)"),
        ("num_tokens = seq.num_tokens + (not is_prefilled)", "num_tokens = seq.num_tokens"),
        ("        if may_end_early(seq):\n", "        if True:\n"),
        ("if not is_prefilled:", "if False:"),
    ),
    *mutations_of(
        "sequence",
        (
            "        self.finish_reason: str | None = None",
            "        self.finish_reason = getattr(self, 'finish_reason', None)",
        ),
        (
            "        self.num_released_blocks = 0",
            "        self.num_released_blocks = getattr(self, 'num_released_blocks', 0)",
        ),
        (
            "return -(-self.num_tokens // self.request.block_size)",
            "return self.num_tokens // self.request.block_size + 1",
        ),
        (
            "return self.token_ids[self.num_prompt_tokens :]",
            "return self.token_ids[self.num_prompt_tokens - 1 :]",
        ),
        ("self.block_hashes: list[int] = []", "self.block_hashes = getattr(self, 'block_hashes', [])"),
    ),
    *mutations_of(
        "llm_engine",
        (
            "self._overlap and step.sequences is sequences and self.unfinished",
            "self._overlap and step.sequences is sequences",
        ),
        ("                self._sample(step)\n", "                pass\n"),
        ("self.ended, self.attempt = [], None", "self.attempt = None"),
        ("self.seconds += time.perf_counter()", "self.seconds = time.perf_counter()"),
    ),
    *mutations_of("scheduler", ("                self.num_drawn_tokens -= 1\n", "")),
    *mutations_of(
        "nanovllm/extensions/safety/recovery",
        ("del seq.token_ids[position:]", "pass"),
        ("engine.unfinished.values() if seq not in engine.ended]", "engine.unfinished.values()]"),
        ("if len(suspects) == 1:", "if suspects:"),
        ("        self.admission.max_running = max_running\n", ""),
        (
            "        self.admission.max_running = self.admission.max_num_seqs\n        return",
            "        return",
        ),
        ("        if not self.engine.unfinished:", "        if False:"),
        ("if seq.request.own is culprit.request.own:", "if seq is culprit:"),
    ),
    *mutations_of(
        "model_runner",
        ("from_cache = batch.lens_q != batch.lens_k", "from_cache = False"),
        ("return self.slots.inputs.block_tables[slots]", "return self.slots.inputs.block_tables[slots] * 0"),
        ("put(batch.positions)", "put(batch.positions - batch.positions[0])"),
        ('min(self.group.gather("budget", budget))', 'self.group.gather("budget", budget)[0]'),
        ("        if not self.decoded:", "        if True:"),
        ('                self.notify("stop")\n', ""),
    ),
    *mutations_of(
        "nanovllm/extensions/structured/grammar",
        ("source = self._source(wanted) + NO_FORCING", "source = self._source(wanted)"),
        ("{' | '.join(texts)}\".replace(", "{' | '.join(texts)}\".strip("),
        ("16 * 2**20 + 24 * 2**10 * MAX_LEVELS", "16 * 2**20"),
        ("    if number > most:", "    if False:"),
        ('wanted.grammar.count("::=")', "0"),
        ("_call_in_thread(make).result(MAX_SECONDS)", "_call_in_thread(make).result(60)"),
        ("        if wanted.disable_additional_properties:", "        if True:"),
    ),
    *mutations_of(
        "nanovllm/extensions/structured/json_schema",
        ("is_part or is_listing + len(merged) > 1", "is_part or len(merged) > 1"),
        ("is_part or is_listing + len(merged) > 1", "is_listing + len(merged) > 1"),
        ("        if is_listing and not any(name in schema for name in ALLOWING):", "        if is_listing:"),
        ('key.replace("~1", "/")', 'key.replace("~1", "~")'),
    ),
    *mutations_of(
        "nanovllm/extensions/api/async_llm",
        (
            'await asyncio.to_thread(prompts.make_request, prompt, params, "prompt")',
            'prompts.make_request(prompt, params, "prompt")',
        ),
    ),
    *mutations_of(
        "nanovllm/extensions/startup/compile_ahead",
        ("        gc.freeze()", "        gc.isenabled()"),
        ('if name.startswith("nanovllm.")', 'if name.startswith("nanovllm.kernels.")'),
        ('            self._cache.put("", MARKER, binary=False)', "            pass"),
    ),
    *mutations_of(
        "nanovllm/extensions/structured/matchers",
        ("self.sequence.token_ids[self.num_read :]", "self.sequence.token_ids[-1:]"),
        ("            self._num_users[lexer] -= 1", "            pass"),
        ("        if matcher.is_error():", "        if False:"),
        ("        if len(self._num_users) < self._max_lexers and", "        if not self._num_users and"),
        ("            if self._max_lexers == 0:", "            if True:"),
        ("max(1, min(MAX_LEXERS, int(MAX_SECONDS / seconds)))", "MAX_LEXERS"),
    ),
    *mutations_of(
        "kv_cache", ('if self.device.type == "cpu" and num_blocks:', 'if self.device.type == "cpu":')
    ),
    *mutations_of(
        "model_runner",
        ("            part.reset()", "            pass"),
        ("kind = size, batch.plan_key, batch.wanted", "kind = size, batch.plan_key, 0"),
    ),
    *mutations_of(
        "model_runner",
        ("step.vocab_start = lm_head.vocab_start", "step.vocab_start = 0"),
        ("lm_head.gather(logits), 0", "lm_head.gather(logits), step.vocab_start"),
    ),
    *mutations_of(
        "nanovllm/extensions/logits/logprobs",
        ("(blocks.amax(2), count).sort(1).values", "(blocks.amax(2), count)"),
        ("-logits.shape[1] % BLOCK), value=-torch.inf", "-logits.shape[1] % BLOCK), value=0"),
        ("MAX_LOGPROBS * any(", "MAX_LOGPROBS or any("),
        ("step.temperatures.masked_fill(step.temperatures == 0, 1)", "step.temperatures"),
        ("step, temperatures, step.lowest", "step, temperatures, None"),
        ("    order = sys.maxsize", "    order = 15"),
        ("super().drawn(self._logits, tokens,", "super().drawn(raw_logits, tokens,"),
    ),
    *mutations_of(
        "nanovllm/extensions/logits/kernels/likelihood",
        (
            "x.log_softmax(1).gather(1, ids), ranks",
            "(x - x.logsumexp(1, keepdim=True)).gather(1, ids), ranks",
        ),
        ("x /= temperatures[rows, None]", "x *= 1 / temperatures[rows, None]"),
        ("(x > x.gather", "(x >= x.gather"),
        ("        larger += x > first", "        larger += x >= first"),
        ("        most = highest", "        most = x"),
        ("x = tl.where(x < threshold,", "x = tl.where(x <= threshold,"),
    ),
    *mutations_of(
        "nanovllm/extensions/logits/scores",
        ("target, num_top)", "target, MAX_LOGPROBS)"),
    ),
    *mutations_of(
        "nanovllm/extensions/logits/bias",
        ("biases[token_id] += bias", "biases[token_id] = bias"),
        ("for token_id, bias in biases.items()]", "for token_id, bias in params.logit_bias]"),
    ),
    *mutations_of(
        "nanovllm/extensions/text/results",
        ("itertools.takewhile(math.isfinite, top_logprobs)", "top_logprobs"),
    ),
    *mutations_of(
        "nanovllm/extensions/safety/options",
        ('value = value.removesuffix("_logprobs")', "pass"),
    ),
    *mutations_of(
        "nanovllm/extensions/logits/logprobs",
        ("return logits.to(torch.float32, copy=True)", "return logits"),
        ("any(each.changes_logits for each in step.processors)", "True"),
        ("    order = 0  # before", "    order = 50  # before"),
    ),
    *mutations_of(
        "nanovllm/extensions/structured/kernels/token_masks",
        ("token = (vocab_start + column)", "token = column"),
    ),
    *mutations_of(
        "nanovllm/extensions/structured/bitmask",
        (" and not seq.is_finished", ""),
        ("            if state.matcher.is_error():", "            if False:"),
        ("            self.__dict__.pop(name, None)", "            pass"),
        ("        while self._states:", "        while False:"),
        ("self._states.pop(seq).close()", "self._states[seq].close()"),
    ),
    *mutations_of(
        "nanovllm/extensions/prefixes/kernels/copy_pages",
        (":end] = pages[:, :, source, :end]", ":end + 1] = pages[:, :, source, : end + 1]"),
        ("* TOKEN_BYTES", "* TOKEN_BYTES + 1"),
        ("byte = tl.program_id(2) * BYTES +", "byte ="),
        ("            copies[:, 2] = pages.shape[3]", "            pass"),
    ),
    *mutations_of(
        "batch",
        ("+ positions % self.block_size", "+ (positions + 1) % self.block_size"),
        ("lens_k.append(end)", "lens_k.append(end - start)"),
        ("            wanted |= seq.request.wanted\n            if", "            if"),
    ),
    *mutations_of(
        "nanovllm/extensions/logits/scores",
        ("place = start - seq.num_computed_tokens", "place = 0"),
        ("return self.num_scored < len(self.targets)", "return False"),
        ("self.num_scored = self.first + len(self.found)", "self.num_scored = self.first"),
        ("self.num_scored = self.first + len(self.found)", "self.num_scored = len(self.found)"),
        ("return len(seq) - 1 if scores is None else scores.num_scored", "return len(seq) - 1"),
        ("            scores.restart()", "            pass"),
        ("start += seq.num_scheduled_tokens", "start += len(seq)"),
    ),
    *mutations_of(
        "batch",
        ("        if slots != self.decoded:", "        if not self.decoded:"),
        ("            self.is_new = True", "            pass"),
        ("        self.is_new = True\n        self.ever", "        self.ever"),
        ("if seq.num_tokens % self.block_size == 1:", "if False:"),
        ("seq.request.seed, temperature", "seq.seq_id, temperature"),
        ("start + len(seq.block_table) - 1]", "start + len(seq.block_table)]"),
        ("if seq.num_tokens % self.block_size == 1:", "if seq.num_tokens % self.block_size == 2:"),
        ("self.decoded: list[int] = []", "self.decoded = getattr(self, 'decoded', [])"),
    ),
    *mutations_of(
        "nanovllm/extensions/logits/bias",
        ("self.history[slots] = to_device(history, device)", "pass"),
        ("if seq.slot == slot and slot not in new}", "if slot not in new}"),
        ("        self._in_slots = kept | new", "        self._in_slots |= new"),
        ("self.addresses.zero_()[slots]", "self.addresses[slots]"),
        ("place = step.positions % HISTORY", "place = step.positions % (HISTORY - 1)"),
        ("        self._in_slots.clear()\n        self.rules.clear()\n", "        self._in_slots.clear()\n"),
        ("min(len(request.token_ids) + params.min_tokens, FOREVER)", "min(params.min_tokens, FOREVER)"),
        (
            "np.arange(start, end) % HISTORY",
            "np.arange(start + 1, end + 1) % HISTORY",
        ),
        ("        if len(rules) > RULE_WORDS:", "        if len(rules) >= RULE_WORDS:"),
    ),
    *mutations_of(
        "nanovllm/extensions/logits/penalties",
        ("self.token_flags[slots] = flags.int()[:, None]", "pass"),
        (
            "added += [(token_id, 1) for token_id in seq.completion_token_ids]",
            "added += [(token_id, 1) for token_id in set(seq.completion_token_ids)]",
        ),
    ),
    *mutations_of(
        "nanovllm/extensions/logits/slot_settings",
        (
            "self.numbers_of(seq.request.params) if self.name in seq.request.own else self.neutral",
            "self.numbers_of(seq.request.params)",
        ),
        ("[self.neutral] * num_slots", "[[0.5] * len(self.neutral)] * num_slots"),
    ),
    *mutations_of(
        "nanovllm/extensions/logits/logprobs",
        ("            del so_far[len(seq.token_ids) - seq.num_prompt_tokens :]", "            pass"),
        ("in seq.request.own and not seq.is_finished\n", "in seq.request.own\n"),
    ),
    *mutations_of(
        "nanovllm/extensions/text/results",
        ("min(found, key=found.get, default=None)", "max(found, key=found.get, default=None)"),
        ("min(found, key=found.get, default=None)", "min(found, default=None)"),
        ("min(found, key=found.get, default=None)", "next(iter(found), None)"),
        ("            self._read(-1)", "            pass"),
        (
            "if self.detokenizer.num_tokens < params.min_tokens:",
            "if self.detokenizer.num_tokens <= params.min_tokens:",
        ),
    ),
    *mutations_of(
        "nanovllm/extensions/safety/prompt_checks",
        ("length + max_tokens > most]", "length + max_tokens >= most]"),
        ('", ..." * (len(found) > 3)', '", ..." * (len(found) >= 3)'),
    ),
    *mutations_of(
        "nanovllm/distributed/ranks",
        ("self.failures[0]", "self.failures[-1]"),
    ),
    *mutations_of(
        "nanovllm/extensions/text/llm",
        ("(seed + i) % 2**63", "seed + i"),
        ("if self._call is queued and", "if"),
        ("if not queued or self.is_finished():", "if not queued:"),
        ("while len(queued) < limit and", "while len(queued) <= limit and"),
    ),
    *mutations_of(
        "nanovllm/extensions/api/llm",
        ("            if self.unfinished:", "            if False:"),
        ("            self._own_ids.clear()", "            pass"),
        ("engine.clear = engine.exit = lambda: None", "engine.exit = lambda: None"),
        ("if name in MISSING_METHODS else", "if False else"),
    ),
    *mutations_of(
        "nanovllm/extensions/text/llm", ("tqdm if use_tqdm else no_bar", "no_bar if use_tqdm else tqdm")
    ),
    *mutations_of(
        "nanovllm/extensions/api/engine_args",
        ("cls.__init__.__signature__ = signature.replace(parameters=parameters)", "pass"),
        ("(.*(?:\\n {8,}.*)*)", "(.*)"),
    ),
    *mutations_of(
        "nanovllm/extensions/server/terminal",
        ("        except KeyboardInterrupt:", "        except InterruptedError:"),
        ("                messages = start\n            elif", "                pass\n            elif"),
        ("                    if answer:", "                    if False:"),
        ("text.translate(CONTROLS) if sys.stdout.isatty() else text", "text"),
        ("default_sampling_params(temperature=TEMPERATURE)", "default_sampling_params()"),
    ),
    *mutations_of(
        "nanovllm/extensions/server/__main__",
        ("except BrokenPipeError:", "except InterruptedError:"),
        ("ImportError, RuntimeError", "RuntimeError"),
    ),
    *mutations_of(
        "./bench",
        ("    if others or not is_known:", "    if not is_known:"),
    ),
    *mutations_of(
        "nanovllm/extensions/bench/report",
        (
            "np.interp(edges, [0, *seconds], np.cumsum([0, *values]))",
            "np.interp(edges, seconds, np.cumsum(values))",
        ),
    ),
    *mutations_of(
        "nanovllm/extensions/batch/__main__",
        ("self.start = self.bar.start_t = time.time()", "self.start = self.bar.start_t"),
    ),
    *mutations_of(
        "nanovllm/extensions/batch/files",
        ("        while rest:", "        if rest:"),
        ("        if fcntl is None:", "        if False:"),
    ),
    *mutations_of(
        "nanovllm/extensions/batch/lines",
        ("number if math.isfinite(number := float(text)) else text", "float(text)"),
        (' or name == "error":', ":"),
    ),
    *mutations_of(
        "nanovllm/extensions/api/async_llm",
        ("for listener in dict.fromkeys(touched):", "for listener in set(self.listeners.values()):"),
        ("if other.loop is listener.loop:", "if other is listener:"),
    ),
    *mutations_of(
        "nanovllm/distributed/group",
        ("torch.inf).amin(0).long()", "-torch.inf).amax(0).long()"),
        ("scores < scores.amax(0)", "scores < scores[0]"),
    ),
    *mutations_of(
        "nanovllm/distributed/ranks",
        (
            "num_threads = max(1, torch.get_num_threads() // self.group.size)",
            "num_threads = torch.get_num_threads()",
        ),
        ("    torch.set_num_threads(num_threads)\n    parts", "    parts"),
        ("        torch.set_num_threads(num_threads)\n        with", "        with"),
        ("            pipe.close()", "            pass"),
        ("        runner.exit()", "        pass"),
    ),
    *mutations_of(
        "nanovllm/extensions/api/foreign_options",
        ("if value is not None and not any(", "if not any("),
        ("type(value) is type(each) and value == each", "value == each"),
        ("ignored += [name] if value is not None else []", "ignored += [name]"),
        ("stacklevel=stacklevel + 1", "stacklevel=stacklevel"),
        ("        elif name in SamplingParams.__struct_fields__:", "        elif False:"),
    ),
    *mutations_of(
        "nanovllm/extensions/text/llm",
        ("return use_tqdm if callable(use_tqdm) else tqdm", "return tqdm"),
    ),
    *mutations_of("nanovllm/extensions/api/lm_eval", ("if value is not None}", "if True}")),
    *mutations_of(
        "nanovllm/extensions/safety/prompt_checks",
        ('if isinstance(first, dict) and "role" in first:', "if False:"),
        ("if isinstance(first, str) and first is not prompt:", "if False:"),
    ),
    *mutations_of(
        "input_processor",
        (
            "        params = replace(params)",
            "        params = as_token_ids.__dict__.setdefault(params, replace(params))",
        ),
        ("check(value == field.default,", "check(True,"),
        ("len(token_ids) + (params.max", "len(token_ids) + 1 + (params.max"),
        ("min(most, self.max_num_tokens)", "most"),
        ("if total <= self.max_num_tokens:", "if total < self.max_num_tokens:"),
        ("min(config.max_model_len, num_cache_tokens + 1)", "min(config.max_model_len, num_cache_tokens)"),
        ("else self.eos", "else frozenset()"),
    ),
    *mutations_of("nanovllm/extensions/batch/files", ("        while rest:", "        if rest:")),
    *mutations_of(
        "nanovllm/extensions/batch/ray",
        ("return self.num_deaths == MAX_ATTEMPTS - 1", "return False"),
        ("if self.suspects and not member.load else None", "if self.suspects else None"),
        ("self.room if work is None or work.is_suspect", "self.room if work is None"),
        ("member.load < self.room and (work", "(work"),
        ("            member.num_deaths = 0", "            pass"),
        ("if num_deaths == MAX_DEATHS:", "if False:"),
        ("if member in self.members:", "if True:"),
        ("Work([line], MAX_ATTEMPTS - 1) for line", "Work([line], 0) for line"),
        ("                raise result\n", "                pass\n"),
        ('if count * ranks > available["GPU"]:', 'if count > available["GPU"]:'),
        ('if count * ranks > available["GPU"]:', 'if count * ranks >= available["GPU"]:'),
    ),
    *mutations_of(
        "nanovllm/kernels/decode_inputs",
        ("    if length > 0:", "    if length >= 0:"),
        ("tl.where(length > 0, block *", "tl.where(length >= 0, block *"),
        ("used = position // BLOCK_SIZE + 1", "used = position // BLOCK_SIZE"),
    ),
    *mutations_of(
        "nanovllm/kernels/kv_store",
        ("    if slot >= 0:", "    if slot > 0:"),
        ("        if page >= 0:", "        if page > 0:"),
        ("written = slot_mapping >= 0", "written = slot_mapping > 0"),
        ("if numbers != [*range(first, first + len(numbers))]:", "if not numbers:"),
        ("return tl.trans(key).to(DTYPE), value.to(DTYPE)", "return tl.trans(key), value"),
    ),
    *mutations_of(
        "nanovllm/extensions/int8_cache/kernels/store",
        ("    if slot >= 0:", "    if slot > 0:"),
        (
            "page_sizes(cache, head_dim)[0], stages, is_prefill)",
            "page_sizes(cache, head_dim)[0], stages, False)",
        ),
        ("(BLOCK_SIZE + place // 16 * 16) * HEAD_DIM", "(BLOCK_SIZE + place) * HEAD_DIM"),
        (
            "tl.maximum(tl.max(tl.abs(half1), axis=1), tl.max(tl.abs(half2), axis=1))",
            "tl.max(tl.abs(half1), axis=1)",
        ),
    ),
    *mutations_of(
        "nanovllm/extensions/models/attention_rule",
        (
            "return context_len - HOOKS.constants.window",
            "return context_len - HOOKS.constants.window + 1",
        ),
        ("highest = tl.where(is_first, sink, highest)", "highest += sink"),
        (
            "return (context_lens - self.window).clamp_min(0)",
            "return (context_lens - self.window + 1).clamp_min(0)",
        ),
        (
            "if not self.softcap and self.sinks is None:  # nothing",
            "if rows is None or not self.softcap and self.sinks is None:  # nothing",
        ),
    ),
    *mutations_of(
        "nanovllm/extensions/prefixes/cascade",
        ("is_fit and layer.variant.hooks.first_token is None else", "is_fit else"),
        ("self.num_read += self.planner.num_prefix_tokens", "self.num_read = self.planner.num_prefix_tokens"),
        ("if step.attention_plan is None or self.only_plans:", "if True:"),
        (
            "self.buffer.copy_(to_device(message, self.buffer.device))",
            "self.buffer = to_device(message, self.buffer.device)",
        ),
    ),
    *mutations_of(
        "nanovllm/extensions/prefixes/kernels/shared_prefix",
        ("if LAYER.begin is not None:", "if False:"),
        ("    return LAYER.score(score, LAYER)", "    return score"),
    ),
    *mutations_of(
        "nanovllm/kernels/attention_variant",
        ('str(getattr(each, "cache_key", each)) for each in self', "str(each) for each in self"),
    ),
    *mutations_of(
        "nanovllm/kernels/split_kv",
        ("begin = first // TILE * TILE", "begin = first"),
    ),
    *mutations_of(
        "nanovllm/kernels/decode_attention",
        ("share // (SIZES.SHARES // SIZES.KV_HEADS)", "share % SIZES.KV_HEADS"),
        ("        key, value = key.to(query.dtype), value.to(query.dtype)", "        pass"),
    ),
    *mutations_of(
        "nanovllm/extensions/int8_cache/kernels/decode",
        ("tl.where(seen, fast_log2(value_scale), 0.0)", "fast_log2(value_scale)"),
        ("widen(value) - 1152.0", "widen(value) - 1151.0"),
    ),
    *mutations_of(
        "nanovllm/extensions/int8_cache/kernels/int8_cache",
        ("written = slots >= 0", "written = slots >= -1"),
        ("x.abs().amax(-1) / LARGEST", "x.abs().amax(-1) / 126"),
        ('.masked_fill(scales <= SMALLEST, float("inf"))', ""),
        ("half & -half", "1"),
        ("tl.minimum(start + tl.arange(0, TILE), end - 1)", "start + tl.arange(0, TILE)"),
        ("(end - 1) // 16 * 16)", "end - 1)"),
        ("key_scale = (both << 16)", "key_scale = (both & 0xFFFF0000)"),
    ),
    *mutations_of(
        "nanovllm/layers/attention",
        ("        if step.is_prefill:\n            k, v =", "        if False:\n            k, v ="),
    ),
    *mutations_of(
        "nanovllm/kernels/prefill_attention",
        ("token[None, :] > unseen_key[:, None]", "token[None, :] >= unseen_key[:, None]"),
        ("begin = tl.minimum(tl.cdiv(begin, KEY_TILE) * KEY_TILE, all_seen)", "begin = 0"),
        ("(key >= begins[:, None]) & (key < ends[:, None])", "key < ends[:, None]"),
    ),
    *mutations_of(
        "nanovllm/extensions/ranks/reports",
        ("min(map(self._read_report,", "max(map(self._read_report,"),
    ),
    *mutations_of(
        "nanovllm/extensions/ranks/peer_group",
        ('all(self.gather("access", int(has_peer_access(self.config))))', "has_peer_access(self.config)"),
        ('if not all(self.gather("mapped", int(self.shared.is_mapped))):', "if not self.shared.is_mapped:"),
        ("        if self.shared is not None:", "        if False:"),
    ),
    *mutations_of(
        "nanovllm/extensions/ranks/kernels/all_reduce",
        ("most_rows -= most_rows % self.size", "pass"),
        ("self.turn ^= 1", "pass"),
        ("self.turn = 0  # all ranks have finished with both halves", "pass"),
    ),
    *mutations_of(
        "nanovllm/extensions/experts/kernels/router",
        ("value = tl.where(value > LOWEST, value, LOWEST)", "pass"),
        ("weights / weights.sum(-1, keepdim=True)", "weights"),
        ("share /= tl.sum(share, axis=1)[:, None]", "pass"),
        ("tl.store(counters + each, 0, mask=is_expert)", "pass"),
    ),
    *mutations_of(
        "nanovllm/extensions/experts/kernels/grouped_gemm",
        ("* scale[:, None] * x_scale[None, :]", "* scale[:, None]"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/kernels/grouped_gemm",
        ("line % SIZES.PARTS * SIZES.OUT_FEATURES + place", "place"),
        ("member < masked_load(operands.table", "member <= masked_load(operands.table"),
        (
            "expert, assignment = tl.full([], 0, tl.int32), tile * SIZES.BLOCK_M + member",
            "expert, assignment = tl.full([], 0, tl.int32), member",
        ),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/kernels/permute_k",
        ("within // 2 * 8 + piece * 2", "within // 2 * 2 + piece * 16"),
        ("tl.program_id(1) * SIZE + tl.arange(0, SIZE)", "tl.arange(0, SIZE)"),
        ("half * 16 + within // 8 * 2", "within // 8 * 2"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/kernels/grouped_codes",
        ("following = sums_scales + (start + STEP) // GROUP", "following = sums_scales + start // GROUP"),
        ("codes = _multiply_add(codes, scale, offset)", "codes = codes * scale"),
        ("                offset = _expand(next_shift.to(low.dtype))", "                pass"),
        ("high_scale = _expand(next_shift.to(low.dtype))", "pass"),
        ("above + ZERO_POINT, tl.float32", "above, tl.float32"),
        ("        tl.store(counter, 0)", "        pass"),
        ("start = begin + step * STEP", "start = step * STEP"),
        ("if steps % count == 0", "if True"),
        ("k // BYTES * (BYTES * PER_BYTE) + k % BYTES", "k"),
    ),
    *mutations_of(
        "nanovllm/extensions/experts/kernels/grouped_mxfp4",
        ("piece * 4 + byte % 2 * 2 + half", "piece * 4 + half * 2 + byte % 2"),
        ("(value - first.to(tl.float32))", "(first.to(tl.float32) - value)"),
        ("acc = first_sum + second_sum", "acc = first_sum"),
        ("tl.where(exponent < -11, 0.0", "tl.where(exponent < -12, 0.0"),
    ),
    *mutations_of(
        "nanovllm/extensions/experts/kernels/gemv_codes",
        ("row % ROWS * SIZES.BRICK_PIECES", "row % ROWS"),
        ("share = masked_load(weights + place, is_piece)[:, :, :, None]", "share = None"),
        ("added *= masked_load(weights", "added = masked_load(weights"),
    ),
    *mutations_of(
        "nanovllm/extensions/experts/moe",
        (
            "        if is_alone:\n            return PendingAdd",
            "        if True:\n            return PendingAdd",
        ),
        ("self.down_proj.bias if self.group.rank == 0 else None", "self.down_proj.bias"),
        (
            "matrix[number % per_expert :: per_expert]",
            "matrix[number % per_expert * len(matrix) // 2 :][: len(matrix) // per_expert]",
        ),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/fp4",
        ("self.has_whole_bricks and ", ""),
        ("unpack(blocks[..., 1:].flatten(1))", "unpack(blocks[..., 1:].flip(-1).flatten(1))"),
        ("blocks[..., 0], shard)", "blocks[..., 0] + 1, shard)"),
    ),
    *mutations_of(
        "nanovllm/extensions/experts/kernels/gemv",
        ("tl.sum(squares) / HIDDEN + eps", "tl.sum(squares) / HIDDEN"),
    ),
    *mutations_of(
        "nanovllm/extensions/checkpoints/gguf_tokenizer",
        ("tokenizer.normalizer = normalizers.NFC()", "pass"),
        ('SPLITS_BY_ARCHITECTURE.get(given.get("general.architecture"), pre)', "pre"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/kernels/quantised_weight",
        ("low | high << 4", "high | low << 4"),
        ("largest=scales.amax(1)", "largest=scales.amin(1)"),
        (
            ".unflatten(0, (-1, BRICK_ROWS)).transpose(1, 2)",
            ".unflatten(0, (-1, BRICK_ROWS)).flip(2).transpose(1, 2)",
        ),
        ("tl.float32) - zero) * scale_of[half] + offset", "tl.float32) - zero) * scale_of[half]"),
        ("zero = ZERO_POINT\n", "zero = 0\n"),
        ("place += column // GROUP", "place += byte // GROUP"),
        ("place = (row // TILE_ROWS)", "place = row"),
        ("(code & 0x80) << 8 | (code & 0x7F) << 7", "(code & 0x7F) << 7"),
        ("(code & 8) << 12 | (code & 7) << 9", "(code & 7) << 9"),
        (
            "grid = grid[rows.start // height : cdiv(rows.stop, height)]",
            "grid = grid[: cdiv(rows.stop, height)]",
        ),
        ("self.shape[1] % unit == 0 and self.group % group_unit == 0", "self.shape[1] % unit == 0"),
        ("self.shape[1] % unit == 0 and self.group % group_unit == 0", "self.group % group_unit == 0"),
        ("scale_of, offset = (scale, offset), 0.0", "offset = 0.0"),
        ("flatten()[HALF // self.group :]", "flatten()"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/kernels/multiply_words",
        (
            "multiply_by_arithmetic(words, others, KIND, 4)",
            "multiply_by_arithmetic(words, others, KIND, 0)",
        ),
        ("        parts += zero.to(tl.float32) * sums", "        pass"),
        ("more * zero.to(tl.float32)", "more * scale.to(tl.float32)"),
        ("    if KIND < INT4 and grids[1] is not None:", "    if False:"),
        ("        squares += more", "        pass"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/kernels/quantised_matvec",
        ("+ piece * INPUTS // GROUP", "+ piece // GROUP"),
        ("out_feature = _out_feature(place, out_features // PARTS, PARTS)", "out_feature = place"),
        ("8, 9 if weight.is_fp8 else 0", "8, 0"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/products",
        ("rows, stream.normed = stream.normed, None  # for", "rows = stream.normed  # for"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/kernels/fp8_linear",
        ("        column = column_at(column, PER_BYTE)", "        pass"),
        ("    value = (value * scale).to(dtype).to(tl.float32) * gain", "    value = value * gain"),
        ("scales + part.to(tl.int64) * padded_rows + row", "scales + part.to(tl.int64) * WIDTH + row"),
        ("column_scales + part * WIDTH + column", "column_scales + column"),
        ("div(LARGEST).clamp_min(SMALLEST)", "div(LARGEST)"),
        ("value *= tl.load(row_scales + row) * column_scale", "value *= column_scale"),
        ("for part in tl.static_range(1, PARTS)", "for part in tl.static_range(2, PARTS)"),
        ("values.sum(1) if is_sum else values", "values[:, 0] if is_sum else values"),
        ("leave_scales and bias is None and not", "leave_scales and not"),
        ("return Unscaled(y, x.scales, weight.scales[:, 0])", "return y"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/products",
        ("(pending_add, stream.x), None", "(pending_add, None), None"),
        ("inputs, stream.pending_add = (pending_add, stream.x), None", "inputs = pending_add, stream.x"),
        ("silu_and_mul(Unscaled.of(self.product).scaled()", "silu_and_mul(Unscaled.of(self.product).values"),
        ("leave_scales=gated)", "leave_scales=True)"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/fp8",
        ("if layer.hidden_size is None or not can_use_fp8", "if True or not can_use_fp8"),
    ),
    *mutations_of(
        "nanovllm/extensions/products/products",
        ("return not is_prefill and 0 < rows <= MAX_ROWS", "return 0 < rows <= MAX_ROWS"),
        ("return not is_prefill and rows <= MAX_FUSED_ROWS", "return not is_prefill"),
        ("        if not stream.is_untouched:\n", "        if False:\n"),
        ("layer.group.size == 1 and can_fuse", "can_fuse"),
        ("x = stream.normalised() if squares", "x = stream.residual() if squares"),
    ),
    *mutations_of(
        "nanovllm/layers/linear",
        ("if product.accepts(rows, is_prefill):", "if True:"),
        ("        self.set_matrix(self.matrix)\n", ""),
        ("isinstance(x, Tensor) else x.activated()", "isinstance(x, Tensor) else x.product"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/bitsandbytes",
        ("is_high_first=True", "is_high_first=False"),
        ("torch.uint8, ORDER, NF4", "torch.uint8, None, NF4"),
        ("shard.rows.start * inputs // 2 : shard", "0 : shard"),
        ("columns=shard.columns)", "columns=slice(0, shard.size[1]))"),
        ('* scales + parts["offset"]', "* scales"),
        (".repeat_interleave(NESTED)", ".repeat(NESTED)"),
        ("check(torch.equal(loaded[...], TABLE)", "check(True"),
        ("choose(state, field, [value], value)", "pass"),
        ("inputs % GROUP == 0", "True"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/kernels/nf4",
        ("tables[:, 8:] ^= 255 * (tables[:, :8] >> 7)", "pass"),
        ("bits[8:] -= (bits[:8] ^ bits[8:]) >> 7 & 1", "pass"),
        ("(code % 2, code < 8)", "(code < 8, code % 2)"),
        ("prmt.b32 {0}, {1:#010x}, {2:#010x}, place", "prmt.b32 {0}, {1:#010x}, {2:#010x}, opposite"),
        ("prmt.b32 $1, low, high, 0x6240", "prmt.b32 $1, low, high, 0x7351"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/fp4",
        ("torch.mul if self.source == MODELOPT else", "torch.mul if True else"),
        ("        self.factors.fill_(1)\n", ""),
        ("torch.tensor(FP4_CODES).argsort()", "torch.tensor(FP4_CODES)"),
        ("(scales - 127).exp2()", "(scales - 126).exp2()"),
        ("self.factors[shard.place] = factor", "self.factors[:] = factor"),
        ("0 < factor < torch.inf", "0 <= factor"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/scaled",
        ("low, high = codes & 15, codes >> 4", "high, low = codes & 15, codes >> 4"),
        ("codes[:, first : first + stop - start]", "codes[:, : stop - start]"),
        ("(table[1:] + table[:-1]) / 2", "table[1:]"),
    ),
    *mutations_of(
        "nanovllm/extensions/checkpoints/pickled",
        ("weights_only=True", "weights_only=False"),
        ("check(is_stored and is_small,", "check(is_small,"),
        ("or entry.file_size <= MAX_BYTES_OF_PICKLE", "or True"),
        (" and tensor.is_cpu", ""),
        (" and tensor.layout == torch.strided", ""),
        ("isinstance(name, str) and is_plain", "is_plain"),
    ),
    *mutations_of(
        "nanovllm/extensions/models/qwen3_moe",
        ('"norm_topk_prob": True', '"norm_topk_prob": False'),
    ),
    *mutations_of(
        "nanovllm/extensions/checkpoints/gguf",
        ("tensor[:].float() - model.gguf_added_to_norms", "tensor[:].float()"),
        ("if model.gguf_rotates_neighbours and part in rotated:", "if part in rotated:"),
        ("if len(parts) != len(found):", "if False:"),
        ("block and int(block[1]) in unused", "False"),
        (
            'self._number("block_count") - self._number("nextn_predict_layers", 0)',
            'self._number("block_count")',
        ),
        ('.removesuffix("_bias")', ""),
        ("not fields & own.keys()", "not own.keys()"),
        ('each.name.endswith("_exps.weight")', "True"),
        ("not math.isclose(value, own, rel_tol=1e-5)", "value != own"),
        ("values.float().numpy().view(np.uint8)", "values.float().flip(0).numpy().view(np.uint8)"),
        ('elif part == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:', "elif False:"),
        ("if kinds.get(end) == CONTROL", "if end in kinds"),
        ('ends.discard("<|end|>")', "pass"),
        ('in ("eos", "eot", "eom")', 'in ("eos", "eot")'),
        ('scaling.type", "linear")', 'scaling.type", "none")'),
        (
            'number("rope.scaling.factor", older, float)',
            'number("rope.scaling.factor", 0.0, float)',
        ),
        ('scaling["attn_factor"] = attn_factor', "pass"),
        ('ENDS_OF_TURN = {"<|im_end|>", "<end_of_turn>"}', 'ENDS_OF_TURN = {"<|im_end|>"}'),
    ),
    *mutations_of(
        "nanovllm/extensions/checkpoints/gguf_tokenizer",
        ('begins = kind == "llama" or given.get("pre") in WHOLE_WORDS', 'begins = kind == "llama"'),
        ("for regex in SPLITS[pre]]", "for regex in SPLITS[pre][:1]]"),
        ('f"{BEFORE}{UPPER}*{LOWER}+"', 'f"{UPPER}*{LOWER}+"'),
        ('rf"{SIGNS}[\\r\\n/]*|{SPACES}"', 'rf"{SIGNS}[\\r\\n]*|{SPACES}"'),
        ("ignore_merges=pre in WHOLE_WORDS", "ignore_merges=False"),
    ),
    *mutations_of(
        "nanovllm/extensions/models/gemma3",
        (
            '"attention.sliding_window_pattern", 6) if fields["sliding_window"] else 1',
            '"attention.sliding_window_pattern", 6)',
        ),
    ),
    *mutations_of(
        "nanovllm/extensions/models/decoder",
        ("= config.query_pre_attn_scalar**-0.5", "= config.head_dim**-0.5"),
    ),
    *mutations_of(
        "nanovllm/checkpoints/model_config",
        (', "layer_types": full}.items()', "}.items()"),
    ),
    *mutations_of(
        "nanovllm/extensions/checkpoints/untrusted",
        ("(config.vocab_size + widths)", "config.vocab_size"),
    ),
    *mutations_of(
        "nanovllm/checkpoints/folder",
        ("for name in listed or shard.keys():", "for name in shard.keys():"),
        ("path.name != name or ", ""),
    ),
    *mutations_of(
        "nanovllm/extensions/checkpoints/adapter",
        ('rf"(.*\\.)?({key})$"', 'rf"(.*\\.)?{key}$"'),
    ),
    *mutations_of(
        "nanovllm/extensions/batch/files",
        ('.rstrip("\\r\\n")', ".rstrip()"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/fp8",
        ('name.replace(".", r"\\.").replace', "name.replace"),
        ("return name[3:]", "return name"),
        ('"FP8_PER_CHANNEL_PER_TOKEN": (1, 0)', '"FP8_PER_CHANNEL_PER_TOKEN": ONE_TILE'),
        (', "k_scale", "v_scale"', ""),
        ("self.has_flat_scales = source == MODELOPT", "self.has_flat_scales = True"),
    ),
    *mutations_of(
        "nanovllm/extensions/checkpoints/untrusted",
        ('"ignore": said.get("exclude_modules")}', "}"),
        ('check(isinstance(said, dict), f"{file}', 'check(True, f"{file}'),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/integers",
        ("stored / self.highest if", "stored if"),
        ("                zeros = zeros & 15\n", "                pass\n"),
        (
            "            if self.bits == 4:\n                zeros",
            "            if True:\n                zeros",
        ),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/gguf_blocks",
        ("integers.sub_(self.middle) if", "integers.sub_(self.middle - 1) if"),
        ("fields(end, 4, 4) | tops << 4", "fields(end, 4, 4).roll(4, -1) | tops << 4"),
        ("            floats[..., 1:, :].neg_()", "            pass"),
        ("found.append(rest & (1 << bits) - 1)", "found.insert(0, rest & (1 << bits) - 1)"),
        ("(floats.shape[-2], -1))", "(floats.shape[-2], -1)).flip(-2)"),
        ("PackedIntegers(PAIRS, (1, 32), 4)", "PackedIntegers(PAIRS, (1, 32), 0)"),
        ("PackedIntegers((4, 1), (2, 1), 32)", "PackedIntegers((4, 1), (2, 2), 32)"),
        ("-127, -104, -83,", "-127, -104, -84,"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/gguf",
        (".to(self.device, self.dtype)", ".to(self.dtype)"),
        ("if self.is_stacked and len(self.runs) > 1:", "if False:"),
        ("self.packed[rows], pairs)", "self.packed, pairs)"),
        ('.type == "cpu" and size[0] % LANES:', '.type == "cpu" and False:'),
        ("members[start : start + count]]", "members[start : start + 1]]"),
        ("if TYPES[kind].values == BLOCK:", "if True:"),
        ("zero_point = 0 if offsets else 8", "zero_point = 8"),
        (
            "groupby(pieces, lambda piece: piece[:2])",
            "groupby(pieces, lambda piece: (piece[0], piece[1][:2]))",
        ),
        ("runtime.HAVE_TRITON and dtype in", "dtype in"),
        ("zeros = zeros / 17  #", "pass  #"),
        (
            "if self.weight is not None and len(x) >= SOME_ROWS",
            "if self.weight is not None and len(x) > SOME_ROWS",
        ),
        ('4 * config.get("num_weights", 0) <=', "0 <="),
    ),
    *mutations_of(
        "nanovllm/extensions/transformers/parts",
        ("value = F.pad(value, (0, attention.head_dim - value_dim))", "pass"),
        ("-distance: window == 0}", "-distance: True}"),
        ("if not hands_over_rotation(query, key, value):", "if False:"),
        ('if options["sliding_window"] == OTHER_MASK:', "if False:"),
        ("window if is_known else OTHER_MASK", "window"),
        ("(value, num_heads, scale, *attention.features.values())", "(value, num_heads, scale)"),
        ("(value, num_heads, scale, *attention.features.values())", "(value, *attention.features.values())"),
    ),
    *mutations_of(
        "nanovllm/extensions/transformers/faster",
        ("bias = self.bias if self.group.rank == 0 or not self.is_part else None", "bias = self.bias"),
        ("y = self.group.all_reduce(y) if self.is_part else y", "pass"),
        ("return self.group.all_reduce(run_experts(", "return (run_experts("),
        ("if type(module) is Conv1D:", "if False:"),
        ("return linear_like(module) if is_plain else None", "return linear_like(module)"),
        ("linear.is_quantisable = module.out_features > 1", "pass"),
        ("        up = gate.flip(0)", "        up = gate"),
        ("+ gates.std(-1, unbiased=False, keepdim=True) * deviations", ""),
        ('if hasattr(module, "_gaussian_topk"):', "if False:"),
    ),
    *mutations_of(
        "nanovllm/extensions/transformers/model",
        ("if buffer.dtype == torch.bool:", "if False:"),
        ("return [*dict.fromkeys(found)]", "return found"),
        ('"attention_mask": mask', '"attention_mask": tokens'),
    ),
    *mutations_of(
        "nanovllm/extensions/transformers/classes",
        ('if module.attention_type == "local" else 0', "if False else 0"),
        ("scaling=1.0, ", ""),
        ("(module.num_kv_heads, -1, module.head_dim)", "(1, -1, module.head_dim)"),
    ),
    *mutations_of(
        "nanovllm/extensions/models/gguf",
        ("if found.get(field) == 0}", "if False}"),
        ('fields["num_hidden_layers"] in (46, 62)', 'fields["num_hidden_layers"] == 46'),
        ('fields["num_hidden_layers"] in (46, 62)', 'fields["num_hidden_layers"] == 62'),
        ('"num_experts_per_tok": ("expert_used_count",)', '"num_experts_per_tok": ("expert_count",)'),
        ('number("rope.scaling.attn_factor", 1.0, float)', "1.0"),
        ("[SLIDING if kind else FULL for kind in kinds]", "[FULL if kind else SLIDING for kind in kinds]"),
        ('theta | (fields["rope_scaling"] or {}), SLIDING: theta', "theta, SLIDING: theta"),
        ('"residual_scale", 1.0', '"embedding_scale", 1.0'),
        ('{"mscale": scale, "mscale_all_dim": scale}', '{"mscale": scale}'),
        ('number("expert_gating_func", 1) == 2', "False"),
        ('"greedy" if fields["n_group"] == 1 else "group_limited_greedy"', '"greedy"'),
        ('"blk.0.ffn_norm.weight" not in stored', "False"),
    ),
    *mutations_of(
        "nanovllm/extensions/models/llama",
        ('if fields["sliding_window"] else {}', "if False else {}"),
    ),
    *mutations_of(
        "nanovllm/extensions/transformers/ranks",
        (' or getattr(module, "activation_sparsity", 0)', ""),
        ("if not (shares or are_experts_cut):", "if not shares:"),
    ),
    *mutations_of(
        "nanovllm/extensions/transformers/weights",
        (
            "    for number, matrix in enumerate(value):\n",
            "    for number, matrix in enumerate(value.flip(0)):\n",
        ),
        ("is_one_by_one = any(map(EXPERT.search, known))", "is_one_by_one = False"),
        ("parts.get(found[2], found[2])", "found[2]"),
        ("sources.sort(key=lambda source: dot_natural_key(source[0].name))", "pass"),
        ("ignored = MASKS, *", "ignored = "),
    ),
    *mutations_of(
        "nanovllm/extensions/transformers/config",
        ('if settings.get("rope_type") == "longrope":', "if False:"),
        ("if isinstance(size, list):", "if False:"),
        ("if model_type == kind and raw.get(field):", "if False:"),
        ("theirs._decode_special_floats(raw)", "raw"),
        ('value * ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[1]', "value"),
        ("        check_rope(settings, known)\n", ""),
        (" and not hasattr(transformers, str(name))", ""),
        ("str(name).isidentifier() and ", ""),
    ),
    *mutations_of(
        "nanovllm/extensions/models/exaone",
        ("    .attn.attention.out_proj.   .self_attn.o_proj.\n", ""),
        (".mlp.gate_proj.\n", ".mlp.up_proj.\n"),
        ('    gguf = GGUFModel("exaone", "exaone")\n', ""),
    ),
    *mutations_of(
        "nanovllm/extensions/models/config",
        ("if not found and type_decides(names):", "if False:"),
        ('    "layer_norm_epsilon": "rms_norm_eps",\n', ""),
        ('    "activation_function": "hidden_act",\n', ""),
    ),
    *mutations_of(
        "nanovllm/extensions/checkpoints/names",
        ('name = f"model.{name}"', "pass"),
        ("name = tied.get(name, name)", "pass"),
        ("if not torch.equal(other[...], tensor[...]):", "if False:"),
    ),
    *mutations_of(
        "nanovllm/extensions/checkpoints/untrusted",
        (" if listed or not file.match(OTHER_COPY)", ""),
        ("tokenizer.backend_tokenizer.post_processor = begin", "pass"),
        (" TEKKEN: 2**26,", ""),
        ('if type(tokenizer).__name__.startswith("MistralCommon"):', "if False:"),
        ("if super().has_tokenizer() else", "if False else"),
    ),
    *mutations_of(
        "nanovllm/extensions/checkpoints/hub",
        ("glob.escape(file) for file in", "file for file in"),
        ('("*/*", OTHER_COPY)', '("*/*",)'),
        ("(.*[-._/])?{re.escape(kind)}", ".*{re.escape(kind)}"),
        (' and "mmproj" not in file', ""),
        (", ignored=())", ")"),
        ("-00001\\1", "-00002\\1"),
        ("_refuse_gguf_alone(name, {})", "pass"),
    ),
    *mutations_of(
        "nanovllm/extensions/checkpoints/support",
        ("Tensor.__float__: 1.0", "Tensor.__float__: 0.0"),
        ("Tensor.__bool__: False", "Tensor.__bool__: True"),
        ("headers = [*checkpoint.tensors()]", "headers = []"),
        ("build(split.with_checkpoint(checkpoint))", "build(split)"),
        ("    checkpoint.eos_token_ids(checkpoint.tokenizer())\n", ""),
        (" if not each.name.endswith(UNREADABLE)", ""),
        ("dtype=tensor.dtype, device=META", "dtype=torch.float32, device=META"),
        ("+ sum(map(Tensor.numel, others))", "+ 0"),
        ("            status, lines = 1,", "            status, lines = 0,"),
    ),
    *mutations_of(
        "nanovllm/extensions/checkpoints/text_part",
        ('        fields["tie_word_embeddings"] = config["tie_word_embeddings"]', "        pass"),
        ('"default" if rope == "mrope" else rope', "rope"),
        ('{"norm_topk_prob": True}', "{}"),
        (" embed_vision audio_tower embed_audio\n", "\n"),
        ("matrix.chunk(len(parts))", "matrix.chunk(len(parts))[::-1]"),
        ("matrices.shape[1 if len(parts) == 2 else 2] == hidden_size", "True"),
        ("        if name is None:\n            continue\n", ""),
        ('for part in ("text_config", "vision_config", "audio_config")', "for part in ()"),
    ),
    *mutations_of(
        "nanovllm/extensions/checkpoints/gguf_file",
        ('or metadata.get("split.no") != 0', ""),
        ('if others.get("split.no") != number - 1:', "if False:"),
        ('if len(tensors) != metadata.get("split.tensors.count"):', "if False:"),
    ),
    *mutations_of(
        "nanovllm/extensions/checkpoints/adapter",
        ("saved = saved.t()", "pass"),
        ("if sum(not PLAIN_NAME.fullmatch(key) for key in given) > MAX_PATTERNS:", "if False:"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/patterns",
        ("([*+{]|(?<![(*+}])\\?)", "[*+{]"),
        (" or choices > MAX_CHOICES", ""),
        (' or "#" in written:', ":"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/compressed_tensors",
        ("for name in sorted(names) if", "for name in sorted(names, reverse=True) if"),
        ("formats.get(find_target(name) or CLASS)", "formats.get(CLASS)"),
    ),
    *mutations_of("nanovllm/extensions/quantised/integers", (" or self.stored_tile == ONE_TILE", "")),
    *mutations_of(
        "nanovllm/extensions/quantised/integers",
        ("loaded[...] + self.zero_point", "loaded[...]"),
    ),
    *mutations_of(
        "nanovllm/extensions/quantised/fp8", ('if "weight_block_size" in config else', "if True else")
    ),
    *mutations_of(
        "memory", ("min(config.max_model_len, max(tokens + 1", "max(config.max_model_len, max(tokens + 1")
    ),
    *mutations_of("slots", ("self.max_blocks = min(self.max_blocks, config.num_kvcache_blocks)", "pass")),
    *mutations_of(
        "nanovllm/extensions/models/config",
        ("0 < bits < 7 and torch.cpu._is_avx512_bf16_supported()", "0 < bits < 7"),
        ("0 < bits < 7", "4 <= bits < 7"),
    ),
    *mutations_of("nanovllm/extensions/models/rope", ("    check_rope_keys(settings)\n", "")),
    *mutations_of(
        "nanovllm/extensions/models/rope",
        ('settings["rope_type"], settings.get("attn_factor", 1.0)', 'settings["rope_type"], 1.0'),
    ),
    *mutations_of(
        "nanovllm/extensions/exact/trainer",
        ("mask.cumsum(1) - 1 if position_ids", "torch.arange(shape[1]).expand(shape) if position_ids"),
        ("(positions.diff() == 1) & (mask", "(mask"),
        (" & (mask.nonzero()[:, 0].diff() == 0)", ""),
        ("hidden.new_zeros(", "hidden.new_ones("),
        ("next_power_of_2(int(positions.max()) + 1)", "next_power_of_2(int(positions.max()))"),
        ('parameters["amplitude"] = ROPE', "_ = ROPE"),
        ("exact_linear(x, weight, bias)", "F.linear(x, weight, bias)"),
        ("lambda x, weight: add_rms_norm(x, None, weight, self.eps)[0]", "lambda x, weight: x * weight"),
        (
            "exact_silu_and_mul, silu_and_mul_torch, gate_up",
            "lambda x: x.chunk(2, 1)[0].sigmoid() * silu_and_mul_torch(x), silu_and_mul_torch, gate_up",
        ),
        ("layer.backend = ExactBackend(CacheLayout(q.dtype))", "pass"),
        (
            "lambda rows: token_logprobs(rows, columns, temperatures)[0]",
            "lambda rows: rows.float().log_softmax(1).gather(1, columns)",
        ),
        ("grad.sum(0) if of_bias", "grad[0] if of_bias"),
        ("grad.T @ x if of_weight else None", "grad.T @ x"),
        ("silu_and_mul_torch, gate_up)", "silu_and_mul_torch, gate_up.detach())"),
        ("is_causal=True", "is_causal=False"),
        (
            "lambda x, *_: exact_mixture(moe, x, weights, chosen, is_prefill=True)",
            "partial(self.plain, chosen.experts.long())",
        ),
        ("logits.detach(), gate.top_k, gate.norm_topk_prob", "logits.detach(), gate.top_k, True"),
        ("if self.gate.norm_topk_prob:", "if True:"),
        (
            "shares = shares / shares.sum(1, keepdim=True)",
            "shares = shares / shares.detach().sum(1, keepdim=True)",
        ),
        ('"down_proj": downs}', '"down_proj": downs.detach()}'),
        ('    "output_router_logits",\n', ""),
        ("check(not is_list,", "check(True,"),
        ("check(window is None,", "check(True,"),
        ("    if weights:\n", "    if not weights:\n"),
        ("kind is nn.Linear or not", "not"),
        ("check(len(weights) == 1,", "check(True,"),
        ("check(not is_cast,", "check(True,"),
    ),
    *mutations_of(
        "nanovllm/extensions/exact/check",
        ("return int(largest != 0)", "return 0"),
        ("if exact:\n        make_exact", "if not exact:\n        make_exact"),
    ),
    *mutations_of(
        "nanovllm/extensions/exact/exact_parts",
        ("    parts.make_backend = lambda *where: read_prefixes(ExactBackend(where[-1]), config)\n", ""),
        ("if matrix.quantised.group:", "if False:"),
        ("return exact_linear(x, codes.mul_(scales).to(x.dtype), bias)", "return super().multiply(x, bias)"),
        ("[*map(Unfolded, super().products(layer))]", "super().products(layer)"),
        ("layout.rotate = rotate_alone", "layout.rotate = rotate"),
        ("check_exact(config, scheme.kinds if scheme", "(lambda *_: None)(config, scheme.kinds if scheme"),
        ("store_hooks(cache, head_dim, True)", "store_hooks(cache, head_dim, _)"),
    ),
    *mutations_of(
        "nanovllm/extensions/exact/kernels/ordered_sum",
        ("for part in range(1, count):", "for part in reversed(range(1, count)):"),
        ("total = total + parts[:, part]", "total += parts[:, part]"),
        ("total = parts[:, 0].float()", "total = parts[:, 0]"),
        ("parts + part * WIDTH", "parts + (PARTS - part) * WIDTH"),
    ),
    *mutations_of(
        "nanovllm/extensions/exact/backend_check",
        ("module.__class__ = ExactLinear", "pass"),
        ("if not is_exact or any(", "if any("),
        (
            'if not is_exact or any(hasattr(module, "num_experts") for module in model.modules()):',
            "if not is_exact:",
        ),
        ("ROWS = 1, 2,", "ROWS = 2, 2,"),
        ("MOST_ROWS = 257", "MOST_ROWS = 65"),
    ),
    *mutations_of(
        "nanovllm/extensions/exact/attention",
        ("if any(layer.variant.hooks[:-1]):", "if False:"),
    ),
    *mutations_of(
        "nanovllm/extensions/exact/kernels/sums",
        ("tl.where(total > 0, total, 1.0)", "total"),
        ("acc = tl.fma(acc, shrink, next_acc * weight)", "acc = acc + next_acc * weight"),
        ("place + SIZES.HEAD_DIM + 1, highest_of(", "place + SIZES.HEAD_DIM, highest_of("),
    ),
    *mutations_of(
        "nanovllm/extensions/exact/kernels/attention",
        ("for first in range(0, tiles, FOLDED):", "for first in range(FOLDED, tiles, FOLDED):"),
        ("prefix_sums + number * SUMS", "prefix_sums"),
        ("tl.where(first + j < tiles, SIZES.HEADS, 0)", "SIZES.HEADS"),
        ("KEY_TILE) < common, reader, seq)", "KEY_TILE) < common, seq, seq)"),
        ("index = first + row // SIZES.HEADS", "index = first + row % QUERIES"),
        ("(row < QUERIES * SIZES.HEADS) & (index < len_q)", "index < len_q"),
        ("some_seen = tl.minimum(position + QUERIES, len_k)", "some_seen = position"),
    ),
    *mutations_of(
        "nanovllm/extensions/exact/kernels/product",
        ("tl.load(bias + weight_row)", "tl.load(bias + weight_row % width)"),
        ("EVEN=in_features % block_k == 0", "EVEN=True"),
    ),
    *mutations_of(
        "nanovllm/extensions/exact/options",
        ('needs("tensor_parallel_size", [config.tensor_parallel_size], [1])', "pass"),
    ),
    *mutations_of(
        "nanovllm/extensions/exact/kernels/attention_torch",
        ("WIDTH = 16", "WIDTH = 1"),
        ("TILES_AT_ONCE = 16", "TILES_AT_ONCE = 10_000"),
        ("scores.amax((1, 3)", "scores.amax((1, 2, 3)"),
        (
            "functools.reduce(torch.add, (scores @ values[:, :num_tiles]).unbind(1))",
            "(lambda sums: sums[:, : num_tiles // 2].sum(1) + sums[:, num_tiles // 2 :].sum(1))"
            "(scores @ values[:, :num_tiles])",
        ),
    ),
    *mutations_of(
        "nanovllm/extensions/exact/attention",
        ("k, v = (x.to(self.layout.dtype).to(q.dtype) for x in (k, v))", "pass"),
        ("attend(q, k, v, ExactVariant(variant.scale), step)", "attend(q, k, v, variant, step)"),
    ),
    *mutations_of(
        "nanovllm/extensions/exact/products",
        ("if len(x) == 1 else x", "if len(x) == 0 else x"),
        ("x.split(max(1, ONE_THREAD // x.shape[1]))", "[x]"),
        ("choose_kernels(x, weights, is_prefill=True)", "choose_kernels(x, weights, is_prefill)"),
        ("weights._replace(linear=exact_linear)", "weights"),
        ("most = max(1, ONE_THREAD // (2 * weights.width))", "most = max(1, len(x))"),
        ("not is_prefill and few_rows(", "few_rows("),
        ("if is_half and has_hopper_shared_memory(weight.device)", "if is_half"),
        ("use_triton(weight) and weight.element_size() == 2", "use_triton(weight)"),
        ("return super().products(layer) + few_rows_products(self.weight)", "return super().products(layer)"),
        ("ExactHead if are_exact else FewRowsHead", "FewRowsHead"),
        ("(product, is_exact=False)", "(multiply)"),
    ),
    *mutations_of(
        "nanovllm/extensions/exact/options",
        ('needs("the weights\' format", formats, FORMATS)', "pass"),
        ("*map(model.window, range", "*map(lambda _: 0, range"),
    ),
    *mutations_of(
        "nanovllm/assembly",
        ("dense_weight(exact,", "dense_weight(False,"),
        ("exact_parts.make_exact(parts, config", "(lambda *_: None)(parts, config"),
    ),
    *mutations_of(
        "nanovllm/extensions/cpu/compiled",
        ("not is_query and slot >= 0", "is_value and slot >= 0"),
        ("        total += number", "        total += high"),
        ("head // (heads // kv_heads)", "head % kv_heads"),
    ),
    *mutations_of(
        "nanovllm/extensions/cpu/packing",
        ("low | high << 4", "high | low << 4"),
        ("torch.zeros(outputs) if bias is None else bias.float()", "torch.zeros(outputs)"),
    ),
    *mutations_of(
        "nanovllm/extensions/cpu/decode", (", attn.k_cache.numel(), *", ", attn.k_cache.numel() // 2, *")
    ),
    *mutations_of(
        "nanovllm/extensions/ranks/peer_group", ("OrderedGroup if config.exact else GlooGroup", "GlooGroup")
    ),
]


def apply(mutation: Mutation, root: Path) -> None:
    file = root / mutation.file
    text = file.read_text()
    assert text.count(mutation.line) == 1, (
        f"{mutation.file} has {text.count(mutation.line)} of {mutation.line!r}"
    )
    file.write_text(text.replace(mutation.line, mutation.fault))


def find_failure(mutation: Mutation, tests: list[str]) -> str | None:
    """The first test that fails with this fault, or None."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
        apply(mutation, copy)
        for name in tests:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-m", ""]  # slow ones, too
            command += ["-k", "not can_still_be_made"]
            try:
                run = subprocess.run(
                    [*command, *map(str, copy.glob(f"tests/**/test_{name}.py"))],
                    cwd=copy,
                    env={**os.environ, "PYTHONPATH": str(copy)},
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT,
                )
            except subprocess.TimeoutExpired:
                return f"test_{name}.py did not end"
            if run.returncode:
                failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return failed[0] if failed else run.stdout[-200:]
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="those whose line or file contains this")
    parser.add_argument("--tests", default=",".join(TESTS), help="files of tests, in order")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if args.only in m.file or args.only in m.line]
    survivors, start = [], time.perf_counter()
    for mutation in chosen:
        failure = find_failure(mutation, args.tests.split(","))
        print(f"{mutation.file}: {mutation.line.strip()} -> {mutation.fault.strip()}", flush=True)
        print(f"    {failure or 'NOT CAUGHT'}", flush=True)
        survivors += [] if failure else [mutation]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught in {time.perf_counter() - start:,.0f} s")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
