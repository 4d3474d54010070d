"""Other people's files: damaged ones are refused by name, quickly and in little memory, or load right;
hostile ones run nothing, lead nowhere and hang nothing.

damaged_checkpoints.py makes the damage, and tries thousands when it is run as a script. What one file's
parser does with one kind of damage is tested in test_loader.py and test_gguf.py.
"""

import json
import multiprocessing
import os
import pickle
import shutil
import struct
import time
from pathlib import Path

import damaged_checkpoints
import pytest
import torch
import transformers
from damaged_checkpoints import (
    KINDS,
    OPTIONS,
    TINY,
    judge,
    make_sources,
    read_header,
    try_all,
    write_header,
)
from gguf_files import write_gguf
from open_checkpoints import open_checkpoint
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.assembly import get_model_class
from nanovllm.distributed.group import Group, use_group
from nanovllm.extensions.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from nanovllm.extensions.checkpoints.untrusted import MAX_BYTES
from nanovllm.utils.loader import load_model
from tiny_checkpoints import edit_json, make_checkpoint, one_thread  # noqa: F401  a fixture


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    return make_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture
def folder(sources, tmp_path) -> Path:
    """A valid checkpoint in one file, with a tokenizer."""
    return shutil.copytree(sources["one file"], tmp_path / "checkpoint")


def load(path: Path) -> torch.nn.Module:
    checkpoint = open_checkpoint(path)
    config = checkpoint.hf_config()
    model = get_model_class(config)(config)
    load_model(model, checkpoint)
    return model


def assert_refused(path: Path, *words: str) -> None:
    outcome, message = judge(path, True)
    assert outcome == "refused", message
    assert all(word in message for word in words), message


# Random damage


def test_every_kind_of_damage_is_refused_or_harmless(sources):
    results = list(try_all(sources, 2, range(len(KINDS))))
    assert [result for result in results if result.outcome == "FAILED"] == []
    assert {result.outcome for result in results} == {"refused", "loaded"}


def crash_then_hang(connection, sources, seed) -> None:
    """In place of the child process's work."""
    connection.send("ready")
    if connection.recv() == 0:
        os.abort()
    time.sleep(60)


def test_a_crash_and_a_hang_are_results(monkeypatch):
    fork = multiprocessing.get_context("fork")  # quick, and enough for what this child does
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork)
    monkeypatch.setattr(damaged_checkpoints, "_work", crash_then_hang)
    monkeypatch.setattr(damaged_checkpoints, "HANGS_AFTER", 1.0)
    crash, hang = try_all({}, 0, range(2))
    assert (crash.outcome, crash.message) == ("FAILED", "the process ended with exit code -6")
    assert (hang.outcome, hang.index) == ("FAILED", 1) and "hangs" in hang.message


@pytest.mark.parametrize("source", ["one file", "sharded", "gguf", "gguf quantised"])
def test_an_undamaged_checkpoint_loads(sources, source):
    path = sources[source] / "model.gguf" if "gguf" in source else sources[source]
    assert judge(path, False) == ("loaded", "with the weights of the file")


# Files


def test_a_pipe_in_place_of_a_checkpoint_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    assert_refused(tmp_path / "model.gguf", "neither a folder nor a regular file")


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tekken.json", "tokenizer_config.json", "generation_config.json"],
)
def test_a_huge_json_file_is_refused_unread(folder, name):
    with open(folder / name, "ab") as file:
        file.truncate(2**40)  # sparse
    with pytest.raises(
        ValueError, match=f"{name} is larger than {MAX_BYTES.get(name, MAX_BYTES['.json'])} bytes"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"]
)
@pytest.mark.parametrize("text", ['{"a":' * 100_000, "[" * 100_000 + "]" * 100_000], ids=["objects", "lists"])
def test_json_without_a_bottom_is_refused(folder, name, text):
    (folder / name).write_text(text)
    assert_refused(folder)


def test_an_index_without_a_bottom_is_refused(sources, tmp_path):
    folder = shutil.copytree(sources["sharded"], tmp_path / "checkpoint")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ' * 100_000)
    assert_refused(folder, "model.safetensors.index.json is not readable JSON")


def test_a_header_with_very_many_tensors_is_refused_in_time(folder):
    header, data = read_header(folder / "model.safetensors")
    nothing = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    write_header(folder / "model.safetensors", {f"t{i}": nothing for i in range(100_000)} | header, data)
    start = time.process_time()
    with pytest.raises(ValueError, match="has no place"):
        load(folder)
    assert time.process_time() - start < 3


@pytest.mark.parametrize("target", ["folder", "file"])
def test_a_link_among_further_chat_templates_cannot_lead_out(folder, target):
    outside = folder.parent / "outside"
    outside.mkdir()
    (outside / "secret.jinja").write_text("secret")
    templates = folder / "additional_chat_templates"
    if target == "folder":
        templates.symlink_to(outside)
    else:
        templates.mkdir()
        (templates / "secret.jinja").symlink_to(outside / "secret.jinja")
    assert_refused(folder, "leads out of the folder")


@pytest.mark.parametrize(
    "name",
    [
        "merges.txt",
        "tokenizer.model",
        "source.spm",
        "additional_chat_templates/a.jinja",
        "x/tokenizer.1.0.json",
    ],
)
def test_any_file_but_weights_has_a_largest_size(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    with open(folder / name, "wb") as file:
        file.truncate(3 << 30)  # sparse
    edit_json(folder / "tokenizer_config.json", fast_tokenizer_files=["x/tokenizer.1.0.json"])
    with pytest.raises(ValueError, match=f"{Path(name).name} is larger than"):
        open_checkpoint(folder).tokenizer()


@pytest.mark.parametrize("key", ["vocab", "merges", "source_spm", "target_spm"])
def test_a_tokenizer_config_cannot_have_a_path_for_the_vocabulary(folder, key):
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text('{"a": 0, "<unk>": 1}')
    (folder / "merges.txt").write_text("#version: 0.2\n")
    os.mkfifo(folder.parent / "outside")  # whoever opens it waits for ever
    edit_json(
        folder / "tokenizer_config.json",
        **{"tokenizer_class": "GPT2Tokenizer", "unk_token": "<unk>", key: str(folder.parent / "outside")},
    )
    with pytest.raises(ValueError, match=f"{key} cannot be"):
        open_checkpoint(folder).tokenizer()


@pytest.mark.parametrize("key", ["vocab", "\\u0076oca\\u0062"])
def test_the_vocabulary_of_a_tokenizer_cannot_be_a_path(folder, key):
    outside = folder.parent / "outside.txt"
    outside.write_text("[UNK]\nsecret\n")
    text = '{"version": "1.0", "added_tokens": [], "model": {"type": "WordPiece", "unk_token": "[UNK]", '
    text += f'"continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "{key}" : "{outside}"}}}}'
    (folder / "tokenizer.json").write_text(text)
    edit_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    with pytest.raises(ValueError, match="tokenizer.json: the vocabulary cannot be the name of a file"):
        open_checkpoint(folder).tokenizer()


@pytest.mark.parametrize("key", ["tokenizer_file", "vocab_file", "fast_tokenizer_files"])
def test_a_tokenizer_config_cannot_name_files_elsewhere(folder, key):
    outside = folder.parent / "tokenizer.1.0.json"
    shutil.copy(folder / "tokenizer.json", outside)
    edit_json(
        folder / "tokenizer_config.json", **{key: [f"../{outside.name}"] if key[-1] == "s" else str(outside)}
    )
    assert_refused(folder)


def test_the_path_of_a_map_that_nobody_opens_may_stay_in_a_tokenizer_config(folder):
    edit_json(
        folder / "tokenizer_config.json", special_tokens_map_file="/home/author/map.json", vocab_file=None
    )
    assert open_checkpoint(folder).tokenizer().encode("hi") == open_checkpoint(folder).tokenizer().encode(
        "hi"
    )


# Configurations


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_theta": 0}},
        {"rope_parameters": {"rope_theta": "10000"}},
        {"rope_parameters": {"rope_theta": float("nan")}},
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        {"rope_parameters": {"rope_type": "linear", "factor": "2"}},
        {"rope_parameters": {"rope_type": ["yarn"]}},
        {"rope_parameters": {"rope_type": "frequency_factors", "factors": [1, 2, 3]}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 10**400}},
        {"rope_parameters": {"rope_theta": float("inf")}},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": -1},
        {"rms_norm_eps": True},
        {"rms_norm_eps": 10**39},
        {"rms_norm_eps": 10**400},
        {"rope_parameters": {"rope_theta": 10**39}},
        {"rope_parameters": None, "rope_theta": 10**400},
        {"tie_word_embeddings": "false"},
        {"attention_bias": 0.5},
        {"head_dim": 31},
        {"num_attention_heads": 3, "num_key_value_heads": 2},
    ],
    ids=lambda changes: str(changes)[:50],
)
def test_settings_that_make_no_numbers_are_refused(folder, changes):
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match="config.json"):
        open_checkpoint(folder).hf_config()


@pytest.mark.parametrize(
    "changes",
    [
        *({field: 2**24} for field in ("hidden_size", "intermediate_size", "vocab_size", "head_dim")),
        {"num_hidden_layers": 2**10, "intermediate_size": 2**10, "layer_types": None},
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 2**12},
        {"architectures": ["Qwen3MoeForCausalLM"], "moe_intermediate_size": 2**17},
    ],
    ids=str,
)
def test_a_model_that_its_files_cannot_hold_is_refused_before_it_is_built(folder, changes):
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match="config.json describes a larger model than its files can hold"):
        open_checkpoint(folder).hf_config()
    open_checkpoint(folder, "dummy").hf_config()  # somebody's wish, who has no files


def test_a_model_that_a_gguf_file_cannot_hold_is_refused(sources):
    checkpoint = open_checkpoint(sources["gguf"] / "model.gguf")
    checkpoint.metadata["qwen3.feed_forward_length"] = 2**24
    with pytest.raises(ValueError, match="model.gguf describes a larger model than its files can hold"):
        checkpoint.hf_config()


@pytest.mark.parametrize("shape", [1, 17, (16, 1)])
def test_frequency_factors_of_a_wrong_shape_are_refused(folder, shape):
    file = write_gguf(folder, extra_tensors=[("rope_freqs.weight", torch.ones(shape))])
    with pytest.raises(ValueError, match="model.gguf: .*rotary factors must be"):
        open_checkpoint(file).hf_config()


# Weights that are no numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.v_proj.weight"]
)
def test_a_weight_that_is_no_number_is_refused_by_the_name_of_its_tensor(folder, name, value):
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"model.safetensors: tensor {name}: holds NaN, infinity"):
        load(folder)


def test_a_weight_that_its_dtype_turns_into_infinity_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e30
    save_file(tensors, folder / "model.safetensors")
    load(folder)
    torch.set_default_dtype(torch.float16)
    try:
        with pytest.raises(ValueError, match="too large for torch.float16"):
            load(folder)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("row, rank", [(0, 0), (-1, 1)])
def test_the_rank_that_holds_the_weight_refuses_it(tmp_path, row, rank):
    make_checkpoint(tmp_path, **TINY | {"num_key_value_heads": 2})
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][row, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with use_group(Group(1 - rank, 2)):
        load(tmp_path)
    with use_group(Group(rank, 2)), pytest.raises(ValueError, match="up_proj.weight: holds NaN"):
        load(tmp_path)


def test_a_scale_that_is_no_number_is_refused_by_the_name_of_its_tensor(sources, tmp_path):
    raw = bytearray((sources["gguf quantised"] / "model.gguf").read_bytes())
    stored = open_checkpoint(sources["gguf quantised"] / "model.gguf").stored["blk.1.ffn_down.weight"]
    start = raw.index(stored.encoded.tobytes())
    struct.pack_into("<e", raw, start + 34 * 5, float("nan"))
    (tmp_path / "model.gguf").write_bytes(raw)
    with pytest.raises(ValueError, match="tensor model.layers.1.mlp.down_proj.weight: holds NaN"):
        load(tmp_path / "model.gguf")


def test_large_weights_are_not_taken_for_infinity(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)  # the sum overflows
    save_file(tensors, folder / "model.safetensors")
    assert load(folder).model.norm.weight.max() == pytest.approx(3e38)


# Code


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self):
        return (os.mkdir, (str(self.proof),))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "tokenizer.pkl"])
@pytest.mark.parametrize("weights", [True, False], ids=["beside weights", "instead of weights"])
def test_a_pickle_is_never_opened(folder, name, weights):
    proof = folder / "executed"
    (folder / name).write_bytes(pickle.dumps(Payload(proof)))
    if weights:
        assert judge(folder, False)[0] == "loaded"
    else:
        (folder / "model.safetensors").unlink()
        is_read = name == "pytorch_model.bin"  # by what makes tensors alone
        said = "is not a complete file of torch.save" if is_read else "GGUF and pytorch_model*.bin are read"
        assert_refused(folder, said)
    assert not proof.exists()


def test_a_shard_that_is_a_pickle_is_refused(sources, tmp_path):
    folder = shutil.copytree(sources["sharded"], tmp_path / "checkpoint")
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    (folder / "evil.bin").write_bytes(pickle.dumps(Payload(folder / "executed")))
    edit_json(index, weight_map=weight_map | {"model.norm.weight": "evil.bin"})
    assert_refused(folder, "evil.bin is not a complete safetensors file")


@pytest.mark.parametrize(
    "name", ["AutoModelForCausalLM", "AutoTokenizer", "pipeline", "Trainer", ["a"], 7, "os.system"]
)
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_only_a_tokenizers_class_can_be_named_as_the_tokenizers(folder, file, name, monkeypatch):
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("transformers was asked")
    )
    edit_json(folder / file, tokenizer_class=name, auto_map={"AutoTokenizer": ["evil.T", "evil.T"]})
    with pytest.raises(ValueError, match="tokenizer_class"):
        open_checkpoint(folder).tokenizer()


@pytest.mark.parametrize(
    "name", ["Qwen2Tokenizer", "PreTrainedTokenizerFast", "LlamaTokenizerFast", "OwnTokenizer"]
)
def test_tokenizers_classes_can_be_named(folder, name):
    edit_json(folder / "tokenizer_config.json", tokenizer_class=name)
    assert open_checkpoint(folder).tokenizer() is not None


def test_a_panic_of_the_tokenizers_library_is_an_error_like_others(folder, monkeypatch):
    PanicException = type("PanicException", (BaseException,), {})

    def panic(*_, **__):
        raise PanicException("index out of bounds")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", panic)
    with pytest.raises(ValueError, match="cannot read the tokenizer.*index out of bounds"):
        open_checkpoint(folder).tokenizer()


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAPz5pE0="}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "(x+x+)+y"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
    ],
    ids=["normalizer", "pattern"],
)
def test_a_panic_while_a_prompt_is_tokenized_is_an_error_that_names_the_tokenizer(folder, changes):
    edit_json(folder / "tokenizer.json", **changes)
    with LLM(str(folder), **OPTIONS) as llm:
        with pytest.raises(ValueError, match=f"prompts.0. cannot be tokenized: the tokenizer of '{folder}'"):
            llm.generate(["x" * 27], SamplingParams(0, 2), use_tqdm=False)
        assert llm.generate([[1]], SamplingParams(0, 2, True), use_tqdm=False)


def test_a_panic_while_a_text_is_made_is_an_error_that_names_the_tokenizer(folder):
    edit_json(folder / "tokenizer.json", decoder={"type": "Strip", "content": "b", "start": 0, "stop": 5})
    with LLM(str(folder), **OPTIONS) as llm:
        token_id = llm.tokenizer.convert_tokens_to_ids("b")
        params = SamplingParams(0, 2, True, allowed_token_ids=[token_id])
        with pytest.raises(ValueError, match=f"{folder}: the tokenizer cannot decode"):
            llm.decode([token_id])
        with pytest.raises(ValueError, match=f"{folder}: the tokenizer cannot decode"):
            llm.generate([[1]], params, use_tqdm=False)
        with pytest.raises(ValueError, match=f"{folder}: the tokenizer cannot decode"):
            list(llm.stream([1], params))
        params = SamplingParams(0, 2, True, detokenize=False)
        assert llm.generate([[1]], params, use_tqdm=False)


def test_a_vocabulary_that_would_take_minutes_to_sort_is_refused():
    tokens = [f"{i:0200}" for i in range(30_000)]
    metadata = {"model": "llama", "tokens": tokens, "scores": [0.0] * len(tokens)}
    with pytest.raises(ValueError, match="characters"):
        tokenizer_from_gguf({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})


# Chat templates


@pytest.fixture(scope="module")
def llm(sources):
    with LLM(str(sources["one file"]), **OPTIONS) as llm:
        yield llm


CHAT = [{"role": "user", "content": "hi"}]


def assert_harmless(llm: LLM, template: str) -> None:
    """It is refused by a ValueError or makes some text, in little time; afterwards the engine works."""
    start = time.perf_counter()
    try:
        llm.prompts.render_chats(CHAT, chat_template=template, **READ)
    except ValueError as error:
        assert "conversation 0" in str(error)
    assert time.perf_counter() - start < 5
    assert llm.generate([[1]], SamplingParams(0, 2, True), use_tqdm=False)[0]["token_ids"]


READ = dict(add_generation_prompt=True, continue_final_message=False, tools=None)


def test_a_chat_that_is_too_long_to_tokenize_is_refused(llm, monkeypatch):
    monkeypatch.setattr("nanovllm.extensions.checkpoints.library_errors.MAX_TEXT", 1000)
    with pytest.raises(ValueError, match="conversation 0: it makes a text of 1001 characters; at most 1000"):
        llm.prompts.render_chats(CHAT, chat_template="{{ 'x' * 1001 }}", **READ)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "{% for m in messages * 2 %}{{ (m.role == 'user') == (loop.index0 % 2 == 0) }}{% endfor %}",
            "TrueFalse",
        ),
        ("{{ {'a': 1}|tojson(indent=4) }}", '{\n    "a": 1\n}'),
        ("{{ 'a\nb'|indent }}{{ 'a\nb'|indent(2, true) }}", "a\n    b  a\n  b"),
        ("{{ 'a' ~ 1 ~ none ~ nothing }}{{ '-' * 3 }}{{ 2 * 3 + 1 }}", "a1None---7"),
        ("{{ (messages * 2)|map(attribute='role')|join(', ') }}", "user, user"),
        ("{{ '+'.join((messages * 2)|map(attribute='role')) }}", "user+user"),
        ("{{ '%02d of %s' % (7, 2024) }}{{ '%.1f%%'|format(1) }}", "07 of 20241.0%"),
        ("{{ '{:>3}'.format(1) }}{{ '{{}}'.format() }}", "  1{}"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) ~ f('a')|upper }}", "<1><A>"),
        ("{{ 'a</think>b'.split('</think>')[-1].strip().replace('b', 'cc')|trim }}", "cc"),
        ("{% generation %}{{ messages|length }}{% endgeneration %}{{ 1.25|round(1) }}", "11.2"),
        ("{{ messages[0] }}", "{'role': 'user', 'content': 'hi'}"),
    ],
)
def test_what_real_templates_do_is_allowed(llm, template, text):
    assert (
        llm.decode(llm.prompts.render_chats(CHAT, chat_template=template, **READ)[0]["prompt_token_ids"])
        == text
    )


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('__cla' + 'ss__') }}",
    "{{ messages.append.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch executed') }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{{ raise_exception.__globals__['os'] }}",
    "{{ strftime_now.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ ['{0.__class__}']|map('format', '')|list }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch executed') }}",
    "{{ messages.clear() }}",
    "{% do messages.append(1) %}",
])  # fmt: skip
def test_an_attribute_walk_leads_nowhere(llm, template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chat = [dict(message) for message in CHAT]
    try:
        text = llm.decode(
            llm.prompts.render_chats(chat, chat_template=template, **READ)[0]["prompt_token_ids"]
        )
    except ValueError as error:
        text = ""
        assert "conversation 0" in str(error)
    assert not any(found in text for found in ("<class", "<module", "<built-in", "root:"))
    assert chat == CHAT and not list(tmp_path.iterdir())


@pytest.mark.parametrize("template", [
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if 1 %}" * 500,
    "{{ 'x' * 10 }}" * 10_000,
    "{{ 'x' * 999999999999999999 }}",
    "{{ 1 / 0 }}",
    "{{ '\\ud800' }}",
    "\0",
    "{{",
], ids=lambda template: template[:20])  # fmt: skip
def test_a_senseless_template_is_an_error_or_a_text(llm, template):
    assert_harmless(llm, template)
