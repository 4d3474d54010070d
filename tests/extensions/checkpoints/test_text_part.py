"""Checkpoints of models that also read images: their text part answers as in transformers' whole model."""

import json
import pickle
from pathlib import Path

import pytest
import torch
import transformers
from forked_ranks import forked_ranks  # noqa: F401
from open_checkpoints import open_checkpoint
from safetensors.torch import load_file, save_file
from transformers_checkpoints import make

from nanovllm import LLM, SamplingParams
from nanovllm.extensions.checkpoints.text_part import text_name
from tiny_checkpoints import EXACT, assert_greedy, load_reference, make_tokenizer, one_thread  # noqa: F401

TEXT = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
)
SIGLIP = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28)
QWEN_VISION = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64)
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
LLAMA4 = dict(intermediate_size_mlp=48, num_local_experts=4, attention_chunk_size=24, floor_scale=16)
# Settings of the text part, and of what reads images.
WHOLES = {
    "Gemma3": (dict(sliding_window=24, layer_types=["sliding_attention"] * 2 + ["full_attention"]), SIGLIP),
    "Llama4": (LLAMA4, SIGLIP | dict(vision_output_dim=64, projector_input_dim=32, projector_output_dim=64)),
    "Mistral3": (dict(model_type="mistral", sliding_window=None), SIGLIP | dict(model_type="pixtral")),
    "Mistral3 with a Ministral3": (dict(model_type="ministral3"), SIGLIP | dict(model_type="pixtral")),
    "Qwen2VL": (dict(rope_parameters=MROPE), dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2)),
    "Qwen2_5_VL": (dict(rope_parameters=MROPE), QWEN_VISION),
    "Qwen3VL": (
        dict(rope_parameters=MROPE | {"mrope_interleaved": True}),
        QWEN_VISION | dict(deepstack_visual_indexes=[0]),
    ),
    "Qwen3VLMoe": (
        dict(rope_parameters=MROPE | {"mrope_interleaved": True}) | MOE,
        QWEN_VISION | dict(deepstack_visual_indexes=[0]),
    ),
}
# How names begin in older files, where they begin otherwise.
OLDER = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
OLDER_QWEN = {"model.language_model.": "model.", "model.visual.": "visual."}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7] * 11, [9, 8]]


def make_whole(folder: Path, kind: str, is_tied: bool = False) -> Path:
    text, vision = WHOLES[kind]
    kind = kind.partition(" ")[0]
    config = getattr(transformers, kind + "Config")(
        text_config=TEXT | text, vision_config=vision, tie_word_embeddings=is_tied
    )
    torch.manual_seed(3)
    model = getattr(transformers, kind + "ForConditionalGeneration")(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() >= 2:
                param.normal_(std=0.2)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def rename_tensors(folder: Path, begins: dict[str, str]) -> None:
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        for begin, other in begins.items():
            if name.startswith(begin):
                name = other + name.removeprefix(begin)
                break
        tensors[name] = tensor
    save_file(tensors, file, {"format": "pt"})


def answers(folder: Path, **options) -> list[list[int]]:
    with pytest.warns(UserWarning, match="the text part is read, and no images"):
        llm = LLM(str(folder), **EXACT | options)
    with llm:
        return [each["token_ids"] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize(
    "kind, is_tied",
    [*((kind, False) for kind in WHOLES), *((kind, True) for kind in ("Gemma3", "Mistral3", "Qwen2VL"))],
)
def test_the_text_part_answers_as_the_whole(tmp_path, kind, is_tied):
    folder = make_whole(tmp_path, kind, is_tied)
    whole = getattr(transformers, kind.partition(" ")[0] + "ForConditionalGeneration")
    reference = whole.from_pretrained(folder, dtype=torch.float32)
    if kind == "Llama4":  # without images transformers 5.24 cannot compute the whole of it
        reference = reference.language_model
    found = answers(folder)
    for prompt, token_ids in zip(PROMPTS, found, strict=True):
        assert_greedy(reference, prompt, token_ids)
    names = {*load_file(folder / "model.safetensors")}
    is_old = any(name.startswith(("language_model.", "visual.")) for name in names)
    older = OLDER_QWEN if kind.startswith("Qwen") else OLDER
    rename_tensors(folder, {new: old for old, new in older.items()} if is_old else older)
    assert names != {*load_file(folder / "model.safetensors")}
    assert answers(folder) == found


def test_ranks_take_their_parts_of_experts_that_stand_in_one_tensor(tmp_path):
    folder = make_whole(tmp_path, "Qwen3VLMoe")
    assert answers(folder, tensor_parallel_size=2) == answers(folder)


def test_experts_may_have_their_outputs_first(tmp_path):
    folder = make_whole(tmp_path, "Qwen3VLMoe")
    expected, file = answers(folder), folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            tensors[name] = tensor.mT.contiguous()
    save_file(tensors, file, {"format": "pt"})
    assert answers(folder) == expected


@pytest.mark.parametrize("begin", ["model.language_model.", "language_model.model."])
def test_an_adapter_may_have_names_of_the_whole(tmp_path, begin):
    folder, lora = make_whole(tmp_path / "base", "Gemma3"), tmp_path / "lora"
    name, a, b = "layers.0.self_attn.q_proj", torch.randn(4, 64), torch.randn(64, 4)
    tower = "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"
    factors = {f"base_model.model.{begin}{name}.lora_{each}.weight": x for each, x in (("A", a), ("B", b))}
    factors |= {f"base_model.model.{tower}.lora_{each}.weight": torch.randn(32, 32) for each in "AB"}
    lora.mkdir()
    save_file(factors, lora / "adapter_model.safetensors")
    (lora / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    plain, found = answers(folder), answers(folder, lora=str(lora))
    tensors = load_file(folder / "model.safetensors")
    [merged] = [each for each in tensors if each.endswith(name + ".weight") and "vision" not in each]
    tensors[merged] += b @ a
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert found == answers(folder) != plain


def test_what_reads_images_is_not_read(tmp_path):
    folder = make_whole(tmp_path, "Qwen3VL")
    file = folder / "model.safetensors"
    tensors = {
        name: torch.full_like(x, torch.nan) if "visual" in name else x for name, x in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    assert answers(folder) and any(x.isnan().any() for x in tensors.values())
    tensors["model.language_model.extra.weight"] = torch.ones(2)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match="model.extra.weight has no place"):
        answers(folder)


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="needs transformers 5")
def test_of_a_gemma_3n_neither_images_nor_sounds_are_read(tmp_path):
    """
    Named as published. Files also have projections of keys and values for layers that read another layer's.
    """
    text = make("gemma3n_text", tmp_path / "text")
    fields, stored = json.loads((text / "config.json").read_text()), load_file(text / "model.safetensors")
    rename_tensors(text, {"model.": "model.language_model."})
    tensors = load_file(text / "model.safetensors")
    shared = "model.layers.{}.self_attn.{}.weight".format
    for name in "k_proj", "v_proj", "k_norm":
        assert shared(2, name) not in stored
        tensors["model.language_model." + shared(2, name)[6:]] = stored[shared(0, name)]
    for name in "vision_tower.timm_model.x", "audio_tower.x", "embed_audio.x", "embed_vision.x":
        tensors["model." + name] = torch.full((2, 2), torch.nan)
    folder = tmp_path / "whole"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    whole = dict(architectures=["Gemma3nForConditionalGeneration"], model_type="gemma3n", text_config=fields)
    whole |= dict(vision_config={"hidden_size": 2048}, audio_config={"hidden_size": 1536})
    (folder / "config.json").write_text(json.dumps(whole))
    save_file(stored, text / "model.safetensors", {"format": "pt"})
    reference = load_reference(text)
    for prompt, token_ids in zip(PROMPTS, answers(folder), strict=True):
        assert_greedy(reference, prompt, token_ids)
    assert "audio_config" not in opened(folder, whole).config


def opened(folder: Path, config: dict, **options):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="no images"):
        return open_checkpoint(folder, "dummy", **options)


def test_fields_at_the_top_are_those_of_the_text(tmp_path):
    config = TEXT | dict(
        architectures=["Qwen2_5_VLForConditionalGeneration"],
        model_type="qwen2_5_vl",
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        rope_theta=1e6,
        vision_config={"hidden_size": 1280},
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
        eos_token_id=7,
    )
    checkpoint = opened(tmp_path, config)
    found = pickle.loads(pickle.dumps(checkpoint)).hf_config()
    assert found.architectures == ["Qwen2ForCausalLM"] and found.hidden_size == 64
    assert found.rope_parameters["rope_theta"] == 1e6 and found.dtype == "bfloat16"
    assert found.tie_word_embeddings and 7 in checkpoint.named_eos()


def test_fields_of_the_text_may_be_overridden_where_the_file_has_them(tmp_path):
    config = dict(architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3", text_config=TEXT)
    for overrides in {"max_position_embeddings": 99}, {"text_config": {"max_position_embeddings": 99}}:
        found = opened(tmp_path, config, hf_overrides=overrides).hf_config()
        assert found.context_limit == 99 and found.hidden_size == 64
    with pytest.raises(ValueError, match="hf_overrides: text_config must be an object, got 5"):
        opened(tmp_path, config, hf_overrides={"text_config": 5})


@pytest.mark.parametrize("is_newer", [False, True])
def test_fields_that_files_of_gemma3_leave_out_have_its_values(tmp_path, is_newer):
    """The published config.json of the model of 4b, as of 2025-03."""
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eos_token_id": [1, 106],
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    if is_newer:
        linear = config["text_config"].pop("rope_scaling") | {"rope_theta": 1e6}
        rope = {"full_attention": linear, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
        config["text_config"]["rope_parameters"] = rope
    found = opened(tmp_path, config).hf_config()
    sizes = found.num_attention_heads, found.num_key_value_heads, found.head_dim, found.vocab_size
    assert sizes == (8, 4, 256, 262208) and found.context_limit == 131072 and found.tie_word_embeddings
    assert found.windows[:6] == (1024,) * 5 + (0,) and found.query_pre_attn_scalar == 256


def test_layers_that_are_not_quantised_are_known_by_the_names_of_the_text(tmp_path):
    excepted = ["model.visual.blocks.0.attn", "lm_head", "re:.*visual.*"]
    excepted += ["language_model.model.layers.1.mlp.up_proj", r"re:model\.language_model\.layers\.2\..*"]
    quantisation = {
        "quant_method": "fp8",
        "modules_to_not_convert": excepted,
        "weight_block_size": [128, 128],
    }
    whole = dict(architectures=["Qwen3VLForConditionalGeneration"], text_config=TEXT)
    checkpoint = opened(tmp_path, whole | {"quantization_config": quantisation})
    assert checkpoint.config["quantization_config"] == quantisation | {
        "modules_to_not_convert": [
            "lm_head",
            "re:.*visual.*",
            "model.layers.1.mlp.up_proj",
            r"re:model\.layers\.2\..*",
        ]
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (7, "config.json: text_config must be an object, got 7"),
        ({"model_type": "mistral4"}, "model_type of text_config must be one of .*, got 'mistral4'"),
        ({"model_type": ["a"]}, "model_type of text_config must be"),
        ({**TEXT, "num_hidden_layers": -1}, "num_hidden_layers"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*no images")
def test_a_text_part_that_makes_no_sense_is_refused(tmp_path, text, problem):
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=problem):
        open_checkpoint(tmp_path, "dummy").hf_config()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.language_model.layers.0.x", "model.layers.0.x"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("visual.merger.weight", None),
        ("model.visual.merger.weight", None),
        ("vision_tower.x", None),
        ("model.vision_tower.x", None),
        ("model.multi_modal_projector.x", None),
        ("model.audio_tower.x", None),
        ("model.embed_vision.x", None),
    ],
)
def test_names_of_the_text_part(name, expected):
    assert text_name(name) == expected


def test_an_image_in_a_conversation_is_refused_by_name(tmp_path):
    folder = make_whole(tmp_path, "Qwen3VL")
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "a.png"}}]
    with pytest.warns(UserWarning, match="no images"):
        llm = LLM(str(folder), **EXACT)
    with llm:
        [result] = llm.chat([{"role": "user", "content": parts[:1]}], GREEDY, use_tqdm=False)
        assert result.prompt == "What is this?"
        with pytest.raises(ValueError, match="conversation 0: .*text alone, got .*image_url"):
            llm.chat([{"role": "user", "content": parts}], use_tqdm=False)
