"""The model of lm-evaluation-harness against the harness's own for transformers, on local data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from smollm2 import smollm2_folder, smollm2_gguf  # noqa: F401

from nanovllm import SamplingParams
from nanovllm.extensions.api.lm_eval import NanoVLLM
from tiny_checkpoints import make_checkpoint

OPTIONS = dict(device="cpu", dtype="float32")
CHAT = dict(apply_chat_template=True)
CAPITALS = dict(France="Paris", Japan="Tokyo", Italy="Rome", Egypt="Cairo", Norway="Oslo")
ROWS = [
    {"country": country, "capital": capital, "choices": sorted({capital, "Paris", "Oslo"})}
    for country, capital in CAPITALS.items()
]
CHOICE = """
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
fewshot_split: test
output_type: multiple_choice
doc_to_text: "Question: What is the capital of {{country}}?\\nAnswer:"
doc_to_target: "{{capital}}"
doc_to_choice: choices
num_fewshot: 2
"""
GENERATION = """
task: told_capitals
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
fewshot_split: test
output_type: generate_until
doc_to_text: "Question: What is the capital of {{country}}?\\nAnswer:"
doc_to_target: "{{capital}}"
generation_kwargs: {until: ["\\n\\n", "Question"], max_gen_toks: 12}
num_fewshot: 1
"""
ROLLING = """
task: sentences
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "The capital of {{country}} is {{capital}}, and not one of {{choices}}."
metric_list: [{metric: word_perplexity}]
"""


@pytest.fixture(scope="module")
def tasks_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.json").write_text("\n".join(map(json.dumps, ROWS)))
    for text in (CHOICE, GENERATION, ROLLING):
        name = text.split()[1]
        (folder / f"{name}.yaml").write_text(text.replace("FILE", str(folder / "rows.json")))
    return folder


@pytest.fixture(scope="module")
def tasks(tasks_folder) -> TaskManager:
    return TaskManager(include_path=str(tasks_folder), include_defaults=False)


def assert_close(found: list, expected: list, **tolerance) -> None:
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    assert [logprob for logprob, _ in found] == pytest.approx([other for other, _ in expected], **tolerance)


def run(tasks: TaskManager, model: LM, names: list[str], **options) -> dict[str, list]:
    """The harness's answers by task, in the order of documents and of their requests."""
    found = simple_evaluate(model, tasks=names, task_manager=tasks, bootstrap_iters=0, **options)
    answers = {}
    for name, samples in found["samples"].items():
        samples.sort(key=lambda sample: sample["doc_id"])
        answers[name] = [response[0] for sample in samples for response in sample["resps"]]
        assert len(samples) == len(ROWS)
    return answers


@pytest.fixture(scope="module")
def pair(smollm2_folder):  # noqa: F811
    """Both models of SmolLM2."""
    model = NanoVLLM(str(smollm2_folder), **OPTIONS, num_kvcache_blocks=600)
    yield model, HFLM(str(smollm2_folder), **OPTIONS, batch_size=8)
    model.llm.exit()


@pytest.mark.slow
@pytest.mark.parametrize(
    "names, options", [(["capitals", "told_capitals", "sentences"], {}), (["told_capitals"], CHAT)]
)
def test_tasks_get_the_answers_that_transformers_gives(pair, tasks, names, options):
    found, expected = (run(tasks, model, names, **options) for model in pair)
    assert found["told_capitals"] == expected["told_capitals"] and all(found["told_capitals"])
    assert_close(found.get("capitals", []), expected.get("capitals", []), abs=1e-4)
    for logprob, other in zip(found.get("sentences", []), expected.get("sentences", []), strict=True):
        assert logprob == pytest.approx(other, rel=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=1))


@pytest.fixture(scope="module")
def small_pair(folder):
    """Both models of a small random checkpoint, for texts of 40 tokens."""
    model = NanoVLLM(folder, **OPTIONS, num_kvcache_blocks=100, max_length=40, max_gen_toks=9)
    yield model, HFLM(folder, **OPTIONS, batch_size=8, max_length=40)
    model.llm.exit()


def requests_of(kind: str, *args: tuple) -> list[Instance]:
    return [Instance(kind, {}, each, 0) for each in args]


def test_texts_beyond_the_longest_lose_their_start_as_with_transformers(small_pair):
    """A text of 41 tokens still fits: nothing is computed after the last one."""
    pairs = [("x" * n + f"a rose {m}", "is a rose"[:m]) for n in (0, 24, 25, 26, 90) for m in (1, 9)]
    pairs += [("", "a rose"), ("<|end|>A rose", " is"), ("A rose ", "is"), ("x", "y" * 40)]
    texts = [("A rose",), ("A rose is a rose. " * 9,), ("x" * 40,), ("x" * 41,), ("",)]
    scored, rolled = (
        [getattr(model, kind)(requests_of(kind, *args), disable_tqdm=True) for model in small_pair]
        for kind, args in (("loglikelihood", pairs), ("loglikelihood_rolling", texts))
    )
    assert_close(*scored, abs=1e-4)
    assert rolled[0] == pytest.approx(rolled[1], rel=1e-5)
    prompts = [("A rose is " * n, {"until": ["\n"], "max_gen_toks": 12, "do_sample": False}) for n in (1, 9)]
    told = [model.generate_until(requests_of("generate_until", *prompts), True) for model in small_pair]
    assert told[0] == told[1]


def test_contexts_of_several_continuations_are_computed_once(small_pair):
    model, _ = small_pair
    pairs = [(f"{letter} is one letter of the alphabet, so", f" {n}") for n in range(4) for letter in "abc"]
    before = model.llm.stats()["num_cached_tokens"]
    model.loglikelihood(requests_of("loglikelihood", *pairs), disable_tqdm=True)
    assert model.llm.stats()["num_cached_tokens"] - before >= 3 * 3 * 32  # of each context two blocks, thrice


def test_completions_are_drawn_as_the_task_says(small_pair):
    model, _ = small_pair
    read = model._read_settings
    assert read({}) == SamplingParams(0, 9)
    assert read({"temperature": 0.7, "do_sample": False, "max_new_tokens": 5}) == SamplingParams(0, 5)
    given = {"until": "a", "do_sample": True, "temperature": "0.5", "top_p": 0.9, "max_gen_toks": 3}
    assert read(given) == SamplingParams(0.5, 3, top_p=0.9, stop=["a"])
    left_open = {"num_beams": 1, "top_k": None, "temperature": None, "until": None, "max_gen_toks": None}
    assert read(left_open) == SamplingParams(0, 9)
    computed = model.llm.stats()["num_prompt_tokens"]
    with pytest.raises(ValueError, match="num_beams=10 is not offered"):
        good, bad = ("A rose", {}), ("A rose", {"num_beams": 10})
        model.generate_until(requests_of("generate_until", good, bad), True)
    assert model.llm.stats()["num_prompt_tokens"] == computed
    with pytest.raises(ValueError, match="max_gen_toks must be less than max_length=40, got 40"):
        model.generate_until(requests_of("generate_until", ("A rose", {"max_gen_toks": 40})))
    with pytest.raises(ValueError, match="continuation must have at most max_length=40 tokens, got 41"):
        model.loglikelihood(requests_of("loglikelihood", ("A rose", "x" * 41)), disable_tqdm=True)


def test_a_chat_template_gets_what_the_task_and_the_user_say(folder):
    with_template = dict(chat_template_args={"letter": "x"}, enable_thinking=False)
    model = NanoVLLM(folder, **OPTIONS, num_kvcache_blocks=8, **with_template)
    model.tokenizer.chat_template = (
        "{{ letter }}{{ enable_thinking }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}"
    )
    history = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    assert model.apply_chat_template(history[:1]) == "xFalse[A]:"
    assert model.apply_chat_template(history, add_generation_prompt=False) == "xFalse[A][B"
    assert "/" not in model.tokenizer_name and model.tokenizer_name
    model.llm.exit()


@pytest.mark.slow
def test_the_command_of_the_harness_knows_the_model(folder, tasks_folder):
    command = [sys.executable, "-m", "nanovllm.extensions.api.lm_eval", "--model", "nanovllm", "--limit", "2"]
    command += ["--tasks", "capitals", "--include_path", str(tasks_folder), "--batch_size", "auto"]
    command += ["--model_args", f"pretrained={folder},num_kvcache_blocks=64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "nanovllm (" in done.stdout and "|capitals|" in done.stdout
