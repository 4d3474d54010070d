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
    "block_manager",
    "scheduler",
    "groups",
    "copy_pages",
    "overlap",
    "engine",
    "scores",
    "sampling",
    "edits",
    "requests",
    "grammar",
]
TESTS += [
    "faults",
    "errors",
    "kernels",
    "experts",
    "gpt_oss",
    "int8_cache",
    "fp8_products",
    "quantised",
    "quantization",
    "gguf_blocks",
    "gguf_products",
    "gguf",
    "transformers_model",
    "batch_ray",
    "batch",
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
        ("min(seq.max_num_tokens, self.limits.max_num_tokens)", "seq.max_num_tokens"),
        ("self.num_prefills_in_a_row == MAX_PREFILLS_IN_A_ROW", "False"),
        ("len(self.running) > (self.chunked is not None)", "len(self.running) > 0"),
        ("self.is_prefill, self.num_prefills_in_a_row = False, 0", "self.is_prefill = False"),
        ("            if seq is chunked:\n                continue", "            pass"),
        ("decoding = self.running if self.chunked is None else self.running[:-1]", "decoding = self.running"),
        ("if seq is self.blocked:", "if False:"),
        (
            "seq.num_computed_tokens + 1 - self.tokens_in_reach",
            "seq.num_computed_tokens + 2 - self.tokens_in_reach",
        ),
        ("        self.blocked = None\n        self.block_manager", "        self.block_manager"),
        ("or not forecast.admits(seq, match.blocks)", ""),
        ("half = seq.num_completion_tokens / 2", "half = 0"),
        (
            "len(self.running) + len(held_back) < limit",
            "len(self.running) < limit + 1",
        ),
        ("limit = min(self.max_running, len(self.running) + 1)", "limit = self.max_running"),
        ("num_cached_tokens > budget and scheduled", "num_cached_tokens > budget + 1 and scheduled"),
        ("match.num_computing - match.num_copied >= WAIT", "match.num_computing >= WAIT"),
        ("match.num_computing - match.num_copied >= WAIT", "match.num_computing > WAIT"),
        ("waits = not seq.has_waited and", "waits = len(self.running) > 1 and not seq.has_waited and"),
        ("seq.has_waited = True", "pass"),
        ("if self.block_manager.end_copies():", "if False:"),
        ("if seq.num_prompt_tokens_cached is None:", "if seq.num_prompt_tokens_cached is not None:"),
        ("self.waiting.extendleft(reversed(held_back))", "self.waiting.extend(held_back)"),
        ("self.chunked = seq if remaining > budget else None", "self.chunked = None"),
        ("if seq.num_tokens % block_size > 1:", "if seq.num_tokens % block_size > 0:"),
        ("youngest = self.running.pop()", "youngest = self.running.pop(0)"),
        ("self.waiting.appendleft(seq)", "self.waiting.append(seq)"),
        ("reverse=True)", "reverse=False)"),
        ("if seq.num_tokens == seq.max_num_tokens:", "if seq.num_tokens == seq.max_num_tokens - 1:"),
        ("self.running = [seq for seq in self.running if seq.row >= 0]", "pass"),
        ("if seq.status is over:", "if False:"),
        ("if num_known % block_size == 0:", "if num_known % block_size == 1:"),
        ("elif num_known == seq.max_num_tokens:", "elif num_known == seq.max_num_tokens + 1:"),
        ("if token_id in seq.end_token_ids:", "if token_id in self.limits.eos:"),
        ("self.block_manager.forget_uncomputed(seq)", "pass"),
        ("seq.num_tokens = len(seq.token_ids)", "pass"),
        ("self.free_rows.append(seq.row)", "self.free_rows.insert(0, 0)"),
        ("or num_rule_words + seq.num_rule_words > RULE_WORDS", "or seq.num_rule_words > RULE_WORDS"),
        ("self.num_rule_words -= seq.num_rule_words", "self.num_rule_words = 0"),
    ),
    *mutations_of(
        "limits",
        ("if total <= self.max_num_tokens:", "if total < self.max_num_tokens:"),
        ("min(config.max_model_len, num_cache_tokens + 1)", "min(config.max_model_len, num_cache_tokens)"),
    ),
    *mutations_of(
        "block_manager",
        ("seq.block_table[seq.num_released_blocks :]", "seq.block_table"),
        ("        seq.num_released_blocks = 0\n", ""),
        ("return len(self.free_block_ids) >= self.num_new", "return len(self.free_block_ids) > self.num_new"),
        ("sum(self.blocks[i].ref_count > 0 for i in cached_blocks)", "len(cached_blocks)"),
        ("block.ref_count += 1", "block.ref_count = 1"),
        ("min(start + self.block_size, len(seq)) if end is None", "len(seq) if end is None"),
        (
            "reversed(seq.block_table[seq.num_released_blocks :])",
            "seq.block_table[seq.num_released_blocks :]",
        ),
        (
            "        if block.ref_count == 0:\n            self.used",
            "        if True:\n            self.used",
        ),
        ("seq.num_cached_tokens = seq.num_computed_tokens = 0", "seq.num_cached_tokens = 0"),
        (
            "seq.num_computed_tokens // self.block_size :]",
            "seq.num_computed_tokens // self.block_size + 1 :]",
        ),
        ("return len(seq.block_table) * self.block_size >= len(seq)", "return len(seq.block_table) > 0"),
        ("if len(seq.block_table) * self.block_size < len(seq):", "if len(seq.block_table) < len(seq):"),
        ("and seq.num_computed_tokens >= known:", "and True:"),
        ("popitem(last=False)", "popitem(last=True)"),
        ("min(start + self.block_size, seq.num_cacheable_tokens)", "start + self.block_size"),
        ("if block_id != -1 and self.blocks[block_id].packed == packed:", "if block_id != -1:"),
        ('if prefix != -1 else b""', 'if False else b""'),
        ("target, match.num_copied)", "target, match.num_copied + 1)"),
        ("(match.blocks) * self.block_size + match.num_copied", "(match.blocks) * self.block_size"),
        ("if match.num_copied and not self.blocks[match.source].ref_count:", "if False:"),
        ("if is_free and len(self.free_block_ids) <=", "if is_free and len(self.free_block_ids) <"),
        ("is_free = num_common and self.blocks[block_id].ref_count == 0", "is_free = num_common"),
        ("        self._forget(block)\n        block.reset()", "        block.reset()"),
        ("self._list(seq, i, self.computing)", "self._list(seq, i, self.computed)"),
        ("stop = seq.num_blocks if end == seq.num_tokens else end // size", "stop = seq.num_blocks"),
        ("self.computing.move(block_id, self.computed)", "pass"),
        ("for index in (self.computed, self.computing):", "for index in (self.computed,):"),
        ("            self._list(seq, end // self.block_size, self.computed, end)", "            pass"),
    ),
    *mutations_of(
        "prefix_index",
        ("end = (best[1] + 1) * TOKEN_BYTES", "end = (best[1] + 2) * TOKEN_BYTES"),
        (
            "num_common_bytes(others, tokens) // TOKEN_BYTES",
            "num_common_bytes(others, tokens) // TOKEN_BYTES + 1",
        ),
        ("        self.remove(block_id)\n", ""),
        ("children[max(i - 1, 0) : i + 1]", "children[i : i + 1]"),
        ("children[max(i - 1, 0) : i + 1]", "children[max(i - 1, 0) : i]"),
        ("del children[bisect_left(children, (tokens, block_id))]", "del children[-1]"),
        (
            "insort(self._children.setdefault(parent, []), (",
            "list.append(self._children.setdefault(parent, []), (",
        ),
    ),
    *mutations_of(
        "groups",
        ("= seq.packed_prompt", "= seq.packed_prompt + bytes(8)"),
        ("if place + 1 < len(self._sorted):", "if False:"),
        ("self._common[place] = min(common, self._common[place])", "pass"),
        (
            "self._common[place] = min(common, self._common[place])",
            "self._common[place] = max(common, self._common[place])",
        ),
        (
            "            high = middle - 1\n    return low",
            "            high = middle - 1\n    return low + 1",
        ),
        ("prefix_lens[low:high] = end", "prefix_lens[low:high] = end + 1"),
        ("Group(low, high, int(prefix_lens[low]), end)", "Group(low, high, 0, end)"),
        ("        self._sent = tables\n", ""),
        ("buffer = np.zeros_like(self._sent)", "buffer = self._sent.copy()"),
        ("members.append(order[low:high])", "members.append(np.sort(order[low:high]))"),
        (
            "(slot + first, min(self.members_per_task, size - first), *span)",
            "(slot + first, self.members_per_task, *span)",
        ),
        ("num_parts[low:high] += 1", "num_parts[low:high] = 1"),
        ("return sorted(found, key=lambda interval: (interval[0], -interval[1]))", "return found"),
        (
            "self.num_grouped_tokens = int(prefix_lens.sum())",
            "self.num_grouped_tokens |= int(prefix_lens.sum())",
        ),
    ),
    *mutations_of(
        "forecast",
        ("self._num_owners(block_id) == 1 and block_id not in found", "block_id not in found"),
        ("self._num_owners(block_id) == 1 and block_id not in found", "self._num_owners(block_id) == 1"),
        (" - (block_id in self.block_manager.pinned)", ""),
        ("[*self.held_back, (seq, cached_blocks)]", "[(seq, cached_blocks)]"),
        ("self.num_blocks_at_most = at_most\n", "pass\n"),
        ("sorted(growing, reverse=True)", "sorted(growing)"),
        ("needed += full - shared", "needed += full"),
        ("insort(rests, rest)", "rests.append(rest)"),
        ("num_tokens = seq.num_tokens + (not is_prefilled)", "num_tokens = seq.num_tokens"),
        ("if seq.may_end_early:", "if True:"),
        ("if not is_prefilled:", "if False:"),
    ),
    *mutations_of(
        "sequence",
        ("return -(-self.num_tokens // self.block_size)", "return self.num_tokens // self.block_size + 1"),
        ("self.num_prompt_tokens + (sampling", "self.num_prompt_tokens + 1 + (sampling"),
        (
            "return self.token_ids[self.num_prompt_tokens :]",
            "return self.token_ids[self.num_prompt_tokens - 1 :]",
        ),
        ("return self.num_scored == len(self.scored_token_ids)", "return True"),
        ("del self.logprobs[self.num_completion_tokens :]", "pass"),
        ("self.num_scored = self.first_scored + len(self.prompt_logprobs)", "pass"),
        ("self.num_scored = self.first_scored + len(", "self.num_scored = len("),
        ("return self.num_tokens - 1 if self.is_scored else self.num_scored", "return self.num_tokens - 1"),
        ("return self.num_tokens - 1 if self.is_scored", "return self.num_tokens if self.is_scored"),
    ),
    *mutations_of(
        "llm_engine",
        ("            if not self.unfinished:\n", "            if False:\n"),
        ("            self._draw(self.under_way, attempt)\n", "            pass\n"),
        ("        self.grammars.drop(seq.seq_id)", "        pass"),
    ),
    *mutations_of(
        "recovery",
        ("del seq.token_ids[length:]", "pass"),
        ("engine.ended, engine.attempt = {} if reports else engine.ended, None", "engine.attempt = None"),
        ("        engine.unfinished.pop(seq_id, None)", "        pass"),
        ("    engine.grammars.reset()", "    pass"),
        ("if len(suspects) == 1:", "if suspects:"),
        ("if seq is group or seq.leader is group:", "if seq is culprit:"),
    ),
    *mutations_of(
        "model_runner",
        ("from_cache = not np.array_equal(batch.lens_q, batch.lens_k)", "from_cache = False"),
        ("return self.rows.inputs.block_tables[rows]", "return self.rows.inputs.block_tables[rows] * 0"),
        ("token_positions(batch.lens_q, batch.lens_k)", "token_positions(batch.lens_q, batch.lens_q)"),
    ),
    *mutations_of(
        "nanovllm/text/grammar",
        (" and not seq.is_finished", ""),
        ("if reader.matcher.is_error():", "if False:"),
        ("            self.__dict__.pop(name, None)", "            pass"),
    ),
    *mutations_of("nanovllm/engine/compile_ahead", ("        gc.freeze()", "        gc.isenabled()")),
    *mutations_of(
        "nanovllm/text/matchers",
        ("self.sequence.token_ids[self.num_read :]", "self.sequence.token_ids[-1:]"),
        ("        matcher.reset()", "        pass"),
        ("        if matcher.is_error():", "        if False:"),
        ("elif len(self._lexers) < self._max_lexers:", "elif False:"),
        ("max(1, min(MAX_LEXERS, int(MAX_SECONDS / seconds)))", "MAX_LEXERS"),
    ),
    *mutations_of("nanovllm/layers/sampler", ("0 if is_whole else self.vocab_start", "0")),
    *mutations_of("nanovllm/kernels/sampling", ("token = column + vocab_start", "token = column")),
    *mutations_of(
        "nanovllm/kernels/copy_pages",
        (":end] = pages[:, :, source, :end]", ":end + 1] = pages[:, :, source, : end + 1]"),
        ("* TOKEN_WORDS", "* TOKEN_WORDS + 1"),
        ("if part * WORDS >= num_words:", "if (part + 1) * WORDS > num_words:"),
    ),
    *mutations_of(
        "batch",
        ("+ positions % self.block_size", "+ (positions + 1) % self.block_size"),
        (
            "lens_k = starts + lens_q",
            "lens_k = lens_q",
        ),
        ("needs |= seq.needs", "needs = seq.needs"),
    ),
    *mutations_of(
        "scoring",
        (
            "indices.append(np.arange(first + seq.num_scored, first + end))",
            "indices.append(np.arange(seq.num_scored, end))",
        ),
        ("start += seq.num_scheduled_tokens", "start += len(seq)"),
    ),
    *mutations_of(
        "device_rows",
        ("        if rows != self.batch:", "        if not self.batch:"),
        ("(self.has_prefilled or rows != self.batch)", "self.has_prefilled"),
        ("(self.has_prefilled or rows != self.batch)", "rows != self.batch"),
        ("            self.groups.reset()\n", "            pass\n"),
        ("if len(seq.block_table) != num_blocks[seq.row]:", "if False:"),
        ("np.array([[seq.seed] for seq in sequences]", "np.array([[seq.seed >> 32] for seq in sequences]"),
        (
            "range(start + num_sent, start + num_blocks)",
            "range(start + num_sent + 1, start + num_blocks + 1)",
        ),
        ("            self.num_blocks[seq.row] = 0\n", ""),
        ("self.batch: list[int] = []", "self.batch = getattr(self, 'batch', [])"),
    ),
    *mutations_of(
        "edits",
        ("self.history[to_device(np.array(list(edits.rules)), self.device)] = -1", "pass"),
        ("self.token_flags[to_device(edits.flagged_rows, self.device)] = fills[:, None]", "pass"),
        ("if seq.row != row]", "if False]"),
        ("rows = [*edits.dropped_rows, *edits.rules]", "rows = [*edits.rules]"),
        (
            "self.rules[row].data_ptr() if row in self.rules else 0",
            "self.rules[row].data_ptr() if row in self.rules else 1",
        ),
        ("(rows, positions % HISTORY)", "(rows, positions % (HISTORY - 1))"),
        ("        self.rules.clear()\n", ""),
        ("min(seq.num_prompt_tokens + params.min_tokens, FOREVER)", "min(params.min_tokens, FOREVER)"),
        (
            "flags[token_id] = flags.get(token_id, fill) + count",
            "flags[token_id] = flags.get(token_id, fill) + 1",
        ),
        (
            "return list(enumerate(seq.token_ids[start:], start))",
            "return list(enumerate(seq.token_ids[start:], start + 1))",
        ),
        ("float(seq.needs & TOKEN_FLAGS > 0)", "1.0"),
        ("(applies_masks and needs & Needs.LOGPROBS)", "False"),
        ("            apply_masks(logits, masks)", "            pass"),
    ),
    *mutations_of(
        "nanovllm/text/results",
        ("start, stop = min(found, key=itemgetter(0))", "start, stop = max(found, key=itemgetter(0))"),
        ("start, stop = min(found, key=itemgetter(0))", "start, stop = min(found)"),
        ("start, stop = min(found, key=itemgetter(0))", "start, stop = found[0]"),
        ("            self._read(-1)", "            pass"),
    ),
    *mutations_of(
        "nanovllm/llm",
        ("if self.unfinished and self._call is not call:", "if False:"),
        ("if self._call is queued:", "if True:"),
        ("if not queued or self.is_finished():", "if not queued:"),
    ),
    *mutations_of("nanovllm/batch/files", ("        while rest:", "        if rest:")),
    *mutations_of(
        "nanovllm/batch/ray",
        ("return self.num_deaths == MAX_ATTEMPTS - 1", "return False"),
        ("if self.suspects and not member.load else None", "if self.suspects else None"),
        ("self.room if work is None or work.is_suspect", "self.room if work is None"),
        ("member.load < self.room and (work", "(work"),
        ("            member.num_deaths = 0", "            pass"),
        ("if num_deaths == MAX_DEATHS:", "if False:"),
        ("if member in self.members:", "if True:"),
        ("Work(line, MAX_ATTEMPTS - 1) for line", "Work(line, 0) for line"),
        ("                raise result\n", "                pass\n"),
    ),
    *mutations_of(
        "nanovllm/kernels/decode_inputs",
        ("    if length > 0:", "    if length >= 0:"),
        ("tl.where(length > 0, block *", "tl.where(length >= 0, block *"),
        ("used = position // BLOCK_SIZE + 1", "used = position // BLOCK_SIZE"),
    ),
    *mutations_of(
        "nanovllm/kernels/kv_store",
        ("            if slot >= 0:", "            if slot > 0:"),
        ("    elif slot >= 0:", "    elif slot > 0:"),
        ("ROUND_KV=is_prefill and is_8_bit", "ROUND_KV=False"),
        ("(BLOCK_SIZE + place // 16 * 16) * HEAD_DIM", "(BLOCK_SIZE + place) * HEAD_DIM"),
        ("    if slot < 0:", "    if slot <= 0:"),
        ("if len(slots) == 1 and not is_int8(k_cache):", "if len(slots) == 1:"),
        ("        if page >= 0:", "        if page > 0:"),
        ("written = slot_mapping >= 0", "written = slot_mapping > 0"),
    ),
    *mutations_of(
        "nanovllm/kernels/decode_attention",
        ("first = tl.maximum(context_len - WINDOW, 0)", "first = tl.maximum(context_len - WINDOW + 1, 0)"),
        ("highest = tl.where(split == 0, sink, highest)", "highest += sink"),
        (
            "begins = (context_lens - rule.window).clamp_min(0)",
            "begins = (context_lens - rule.window + 1).clamp_min(0)",
        ),
        ("            key, value = key.to(query.dtype), value.to(query.dtype)", "            pass"),
        ("tl.where(seen, fast_log2(value_scale), 0.0)", "fast_log2(value_scale)"),
        ("widen(value) - 1152.0", "widen(value) - 1151.0"),
        ("begin = first // TILE * TILE", "begin = first"),
        ("kv_head = share // READERS", "kv_head = share % KV_HEADS"),
        ("len(q) == 1 and not is_int8(k_cache):", "len(q) == 1:"),
    ),
    *mutations_of(
        "nanovllm/kernels/int8_cache",
        ("if numbers != [*range(first, first + len(numbers))]:", "if not numbers:"),
        ("x.abs().amax(-1) / LARGEST", "x.abs().amax(-1) / 126"),
        ('.masked_fill(scales <= SMALLEST, float("inf"))', ""),
        ("half & -half", "1"),
        ("tl.minimum(start + tl.arange(0, TILE), end - 1)", "start + tl.arange(0, TILE)"),
        ("(end - 1) // 16 * 16)", "end - 1)"),
        (
            "tl.maximum(tl.max(tl.abs(half1), axis=1), tl.max(tl.abs(half2), axis=1))",
            "tl.max(tl.abs(half1), axis=1)",
        ),
        ("key_scale = (both << 16)", "key_scale = (both & 0xFFFF0000)"),
    ),
    *mutations_of(
        "nanovllm/layers/attention",
        ("if is_int8(self.k_cache) and step.is_prefill:", "if False:"),
    ),
    *mutations_of(
        "nanovllm/kernels/prefill_attention",
        ("token[None, :] > last_key[:, None] - WINDOW", "token[None, :] >= last_key[:, None] - WINDOW"),
        ("begin = tl.minimum(tl.cdiv(begin, KEY_TILE) * KEY_TILE, all_seen)", "begin = 0"),
        ("mask.triu(last - rule.window + 1)", "mask.triu(last - rule.window)"),
        ("    key, value = key.to(query.dtype), value.to(query.dtype)", "    pass"),
    ),
    *mutations_of(
        "nanovllm/kernels/all_reduce",
        ("most_rows -= most_rows % self.size", "pass"),
        ("self.turn ^= 1", "pass"),
        ("self.turn = 0  # all ranks have finished with both halves", "pass"),
    ),
    *mutations_of(
        "nanovllm/kernels/router",
        ("value = tl.where(value > LOWEST, value, LOWEST)", "pass"),
        (
            "mask=is_real)\n    tl.store(weights + row * TOP_K + place, share * FACTOR",
            "mask=is_real)\n    tl.store(weights + row * TOP_K + place, share",
        ),
        ("index[:, None] // SIZE", "index[:, None]"),
    ),
    *mutations_of(
        "nanovllm/kernels/moe_fp8",
        ("* scale[:, None] * x_scale[None, :]", "* scale[:, None]"),
        ("(line % PARTS) * OUT_FEATURES + place", "place"),
    ),
    *mutations_of(
        "nanovllm/kernels/moe_quantised",
        ("within // 2 * 8 + piece * 2", "within // 2 * 2 + piece * 16"),
        ("following = sums_scales + (start + STEP) // GROUP", "following = sums_scales + start // GROUP"),
        ("above + ZERO_POINT, tl.float32", "above, tl.float32"),
    ),
    *mutations_of(
        "nanovllm/kernels/moe_mxfp4",
        ("piece * 4 + byte % 2 * 2 + half", "piece * 4 + half * 2 + byte % 2"),
        ("(value - first.to(tl.float32))", "(first.to(tl.float32) - value)"),
        ("acc = first_sum + second_sum", "acc = first_sum"),
        ("tl.where(exponent < -11, 0.0", "tl.where(exponent < -12, 0.0"),
    ),
    *mutations_of(
        "nanovllm/kernels/moe_quantised_matvec",
        ("row % BRICK_ROWS * BRICK_PIECES", "row % BRICK_ROWS"),
        ("        others *= share\n", ""),
        ("added *= tl.load(weights + pair", "added = tl.load(weights + pair"),
    ),
    *mutations_of(
        "nanovllm/layers/moe",
        ("self.down_proj.bias if self.group.rank == 0 else None", "self.down_proj.bias"),
        (
            "matrix[number % per_expert :: per_expert]",
            "matrix[number % per_expert * len(matrix) // 2 :][: len(matrix) // per_expert]",
        ),
    ),
    *mutations_of(
        "nanovllm/layers/quantization/mxfp4",
        ("self.has_whole_bricks and ", ""),
        (
            "torch.stack((packed & 15, packed >> 4), dim=-1)",
            "torch.stack((packed >> 4, packed & 15), dim=-1)",
        ),
    ),
    *mutations_of(
        "nanovllm/kernels/moe",
        ("tl.store(counters + each, 0, mask=is_expert)", "pass"),
    ),
    *mutations_of(
        "nanovllm/kernels/experts",
        ("member < tl.load(table + expert", "member <= tl.load(table + expert"),
    ),
    *mutations_of(
        "nanovllm/kernels/moe_matvec", ("tl.sum(squares) / HIDDEN + eps", "tl.sum(squares) / HIDDEN")
    ),
    *mutations_of("nanovllm/checkpoints/tokenizer", ("tokenizer.normalizer = normalizers.NFC()", "pass")),
    *mutations_of(
        "nanovllm/kernels/quantised_weight",
        ("low | high << 4", "high | low << 4"),
        ("largest=scales.amax(1)", "largest=scales.amin(1)"),
        ("each.view(torch.uint8).transpose(1, 2)", "each.view(torch.uint8)"),
        (
            "scale + offset, mask=inside)\n        tl.store(out + row * WIDTH + column + 16",
            "scale, mask=inside)\n        tl.store(out + row * WIDTH + column + 16",
        ),
        ("zero = ZERO_POINT\n", "zero = 0\n"),
        ("place += column // GROUP", "place += byte // GROUP"),
        ("place = (row // TILE_ROWS)", "place = row"),
        ("return tl.where(code > 127, -size, size)", "return size"),
        ("tl.where(exponent > 0, 8, 0)", "8"),
        (
            "grid = grid[rows.start // height : cdiv(rows.stop, height)]",
            "grid = grid[: cdiv(rows.stop, height)]",
        ),
    ),
    *mutations_of(
        "nanovllm/kernels/quantised_matvec",
        ("place += piece * INPUTS // GROUP", "place += piece // GROUP"),
        (
            "multiply_by_arithmetic(current, others, KIND, 4)",
            "multiply_by_arithmetic(current, others, KIND, 0)",
        ),
        ("            parts += its_zero.to(tl.float32) * sums", "            pass"),
        ("        if KIND != INT4 and zeros is not None:", "        if False:"),
        ("        squares += others * others", "        pass"),
        ("row = (line % 2) * (out_features // 2) + line // 2\n    piece", "row = line\n    piece"),
        ("can_convert = gpu_supports_fp8(x.device) if weight.is_fp8 else", "can_convert ="),
    ),
    *mutations_of(
        "nanovllm/kernels/quantised_linear",
        ("        tl.store(counter, 0)", "        pass"),
        ("step = tl.program_id(1) * STEPS + i", "step = i"),
        ("place = step * BLOCK_K // GROUP + group", "place = step * BLOCK_K // GROUP"),
        ("above: tl.constexpr = 128 if KIND == INT4 else 0", "above: tl.constexpr = 0"),
        ("STEPS=cdiv(steps, splits)", "STEPS=steps // splits"),
        ("if GROUP == 0:\n        acc *=", "if True:\n        acc *="),
        ("        num_stages = 2  # more", "        pass  # more"),
    ),
    *mutations_of(
        "nanovllm/kernels/fp8_linear",
        ("    value = (value * scale).to(dtype).to(tl.float32) * gain", "    value = value * gain"),
        ("scales + part.to(tl.int64) * padded_rows + row", "scales + part.to(tl.int64) * WIDTH + row"),
        ("column_scales + WIDTH + column", "column_scales + column"),
        ("div(LARGEST).clamp_min(SMALLEST)", "div(LARGEST)"),
        ("value *= tl.load(row_scales + row) * column_scale", "value *= column_scale"),
        ("for part in tl.static_range(1, PARTS)", "for part in tl.static_range(2, PARTS)"),
        ("x.sum(1) if x.dim() == 3 else x", "x[:, 0] if x.dim() == 3 else x"),
        ("leave_scales and bias is None and not", "leave_scales and not"),
        ("return Unscaled(y, x.scales, weight.scales[:, 0])", "return y"),
    ),
    *mutations_of(
        "nanovllm/layers/residual_stream",
        ("(self.x, None) if self.added is None else (self.added, self.x)", "(self.x, None)"),
        ("        self.added = None\n        return rows", "        return rows"),
        ("if self.added is not None and self.norm.group.size > 1:", "if False:"),
    ),
    *mutations_of(
        "nanovllm/layers/activation",
        ("silu_and_mul(self.product.scaled()", "silu_and_mul(self.product.values"),
    ),
    *mutations_of(
        "nanovllm/checkpoints/gguf",
        ('added = 1.0 if is_gemma and name.endswith("norm") else 0.0', "added = 0.0"),
        ('"attention.sliding_window_pattern", 6) if window else 1', '"attention.sliding_window_pattern", 6)'),
        ('if raw["num_hidden_layers"] == 62:', "if False:"),
        ('ENDS_OF_TURN = ("<|im_end|>", "<end_of_turn>")', 'ENDS_OF_TURN = ("<|im_end|>",)'),
    ),
    *mutations_of(
        "nanovllm/checkpoints/gguf_blocks",
        ("sub_(8).unsqueeze(-2)", "sub_(7).unsqueeze(-2)"),
        ("torch.cat((steps & 63, (rest >> 4)", "torch.cat((steps & 63, (rest & 15)"),
        (
            "return floats(scale) * scales, -floats(step) * steps",
            "return floats(scale) * scales, floats(step) * steps",
        ),
        ("torch.cat((pairs & 15, pairs >> 4), dim=-1)", "torch.cat((pairs >> 4, pairs & 15), dim=-1)"),
    ),
    *mutations_of(
        "nanovllm/layers/quantization/gguf",
        ("zero_point = 8 if offsets is None else 0", "zero_point = 8"),
        ("(piece.kind, piece.tile, piece.offsets is None, piece.scales.dtype)", "(piece.kind,)"),
        ("and (runtime.HAVE_TRITON or not on_gpu)", ""),
        ("zeros = zeros / 17  #", "pass  #"),
    ),
    *mutations_of(
        "nanovllm/models/transformers_parts",
        ("F.pad(value, (0, narrower))", "value"),
        ("-distance: window == 0}", "-distance: True}"),
        ("if not hands_over_rotation(query, key, value):", "if False:"),
    ),
    *mutations_of(
        "nanovllm/models/transformers_faster",
        ("bias = self.bias if self.group.rank == 0 or not self.is_part else None", "bias = self.bias"),
        ("y = self.group.all_reduce(y) if self.is_part else y", "pass"),
    ),
    *mutations_of(
        "nanovllm/models/transformers_model",
        ("_replace(sinks=made.get(attention.rule.sinks))", "_replace(sinks=None)"),
    ),
    *mutations_of(
        "nanovllm/models/transformers_ranks",
        ('.chunk(2 if dim == EXPERTS_CUT["gate_up_proj"] else 1, dim)', ".chunk(1, dim)"),
    ),
    *mutations_of(
        "nanovllm/models/transformers_weights",
        ("sources.sort(key=lambda source: dot_natural_key(source[0].name))", "pass"),
    ),
    *mutations_of(
        "nanovllm/checkpoints/transformers_config",
        ('if isinstance(settings, dict) and settings.get("rope_type") == "longrope":', "if False:"),
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
            command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-k", "not can_still_be_made"]
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
