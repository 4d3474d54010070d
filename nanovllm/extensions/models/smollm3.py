"""SmolLM3: Llama, of whose layers some, by default every fourth, rotate nothing (NoPE, arXiv:2501.18795)."""

from nanovllm.extensions.models.decoder import DecoderConfig
from nanovllm.extensions.models.gguf import GGUFModel
from nanovllm.extensions.models.llama import LlamaForCausalLM
from nanovllm.layers.rotary_embedding import get_rope
from nanovllm.utils.validation import check, integer


class SmolLM3ForCausalLM(LlamaForCausalLM):
    model_type = "smollm3"
    needs_layer_types = True
    defaults = LlamaForCausalLM.defaults | {
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
    }
    gguf = GGUFModel("smollm3", "smollm3", gguf_rotates_neighbours=True)

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        given, layers = config.raw, self.model.layers
        every = integer(1)(given.get("no_rope_layer_interval", 4), "no_rope_layer_interval")
        rotates = given.get("no_rope_layers") or [(i + 1) % every for i in range(len(layers))]
        is_good = isinstance(rotates, list) and len(rotates) >= len(layers)
        check(is_good, f"no_rope_layers must be a list of {len(layers)}", rotates)
        angles = {"rope_theta": 1.0, "inverse_frequencies": [0.0] * (config.head_dim // 2)}
        still = get_rope(config.head_dim, config.max_model_len, angles)
        for layer, is_rotated in zip(layers, rotates, strict=False):
            if not is_rotated:
                layer.self_attn.rotary_emb = still
