"""Writes what a Recorder has kept: a page for a browser, or a trace for Perfetto."""

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from nanovllm.config import Config
from nanovllm.extensions.timeline.recorder import MAX_TOKENS, RecordedSequence, Recorder
from nanovllm.utils.validation import check

HERE = Path(__file__).parent


def make_recorder(config: Config) -> Recorder:
    """What records, and writes `config.timeline` in the end. Raises ValueError if such a file cannot be."""
    path = Path(config.timeline)
    check(path.suffix in (".html", ".json"), "timeline must end in .html or .json", config.timeline)
    check(path.absolute().parent.is_dir(), "timeline must be in a folder that exists", config.timeline)
    return Recorder(partial(write, path.absolute(), Path(config.model).name))


def write(path: Path, title: str, recorder: Recorder) -> None:
    """Write the file, whose ending says what it is."""
    if path.suffix == ".json":
        content = json.dumps({"traceEvents": trace_events(recorder)})
    else:
        content = make_page(page_data(recorder, title))
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        warnings.warn(f"the timeline was not written: {error}", stacklevel=2)


# --- the page ---


def make_page(data: dict[str, Any]) -> str:
    # Within the page's script element no text can end it, or begin a comment.
    script = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    page = (HERE / "page.html").read_text(encoding="utf-8")
    before, rest = page.split("/*data*/")
    between, after = rest.split("/*script*/")
    return before + script + between + (HERE / "page.js").read_text(encoding="utf-8") + after


def page_data(recorder: Recorder, title: str) -> dict[str, Any]:
    """What page.js reads. Sequences are named by their place in the list."""
    num_steps = last_complete_step(recorder) + 1
    numbers = {seq_id: i for i, seq_id in enumerate(recorder.sequences)}
    room = MAX_TOKENS
    sequences = []
    for recorded in recorder.sequences.values():
        sequences.append(sequence_data(recorded, num_steps, room))
        room -= len(sequences[-1]["tokens"])
    events = [
        (step, event, block_id, numbers.get(seq_id, 0), index)
        for step, event, block_id, seq_id, index in recorder.block_events
    ]
    return {
        "title": title,
        "block_size": recorder.block_size,
        "num_blocks": recorder.num_blocks,
        "num_blocks_shown": max((event[2] + 1 for event in events), default=0),
        "blocks_used": [step.num_used_blocks for step in recorder.steps[:num_steps]],
        "cut": recorder.cut,
        "steps": [
            [
                int(step.is_prefill),
                *(round(value, 3) for value in (step.start, step.end, step.host, step.device)),
                step.num_sequences,
                step.num_tokens,
                step.special,
            ]
            for step in recorder.steps[:num_steps]
        ],
        "sequences": sequences,
        "events": events,
        "words": words_of(sequences, recorder.tokenizer),
    }


def last_complete_step(recorder: Recorder) -> int:
    return max((i for i, step in enumerate(recorder.steps) if step.end), default=-1)


def sequence_data(recorded: RecordedSequence, num_steps: int, room: int) -> dict[str, Any]:
    seq = recorded.seq
    return {
        "id": seq.seq_id,
        "prompt": seq.num_prompt_tokens,
        "num_tokens": len(seq.token_ids),
        "tokens": seq.token_ids[:room],
        "hashes": [f"{number:016x}" for number in recorded.hashes],
        "arrived": min(recorded.arrived, num_steps - 1),
        "first": recorded.first_token,
        "preempted": [step for step in recorded.preempted if step < num_steps],
        "ended": recorded.ended,
        "reason": seq.finish_reason,
        "spans": [
            [kind, first, min(last, num_steps - 1), *rest]
            for kind, first, last, *rest in recorded.spans
            if first < num_steps
        ],
    }


def words_of(sequences: list[dict[str, Any]], tokenizer: Any) -> dict[int, str]:
    """The text of each token that is shown."""
    if tokenizer is None:
        return {}
    token_ids = sorted({token_id for sequence in sequences for token_id in sequence["tokens"]})
    return {token_id: tokenizer.decode([token_id]) for token_id in token_ids}


# --- Chrome's trace format ---


def trace_events(recorder: Recorder) -> list[dict[str, Any]]:
    """Steps as complete events, of the device and of the host; a row for each sequence; counters."""
    names = {0: "engine", 1: "sequences"}
    events = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in names.items()
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
        for tid, name in enumerate(("device", "host"))
    ]
    steps = recorder.steps[: last_complete_step(recorder) + 1]
    for i, step in enumerate(steps):
        kind = "prefill" if step.is_prefill else "decode"
        facts = {
            "step": i,
            "sequences": step.num_sequences,
            "tokens": step.num_tokens,
            "special": step.special,
        }
        events.append(
            interval(f"{kind} {step.num_sequences}", 0, 0, step.end - step.device, step.device, facts)
        )
        events.append(interval(f"prepare {kind}", 0, 1, step.start, step.host, facts))
        counts = {"sequences": step.num_sequences, "blocks in use": step.num_used_blocks}
        for name, value in counts.items():
            events.append({"ph": "C", "name": name, "pid": 0, "ts": step.start * 1000, "args": {name: value}})
    for recorded in recorder.sequences.values():
        seq_id = recorded.seq.seq_id
        for kind, first, last, *rest in recorded.spans:
            if last < len(steps):
                start = steps[first].start
                facts = dict(zip(("before", "computed", "found in the cache"), rest, strict=False))
                events.append(interval(kind, 1, seq_id, start, steps[last].end - start, facts))
    return events


def interval(
    name: str, pid: int, tid: int, start: float, duration: float, facts: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": round(start * 1000, 1), "dur": round(duration * 1000, 1)}
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, **times, "args": facts}
