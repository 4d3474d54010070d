"""SmolLM3: Llama, of whose layers some, by default every fourth, rotate nothing (NoPE, arXiv:2501.18795)."""

from nanovllm.extensions.models.decoder import DecoderConfig
from nanovllm.extensions.models.gguf import GGUFModel
from nanovllm.extensions.models.llama import LlamaForCausalLM
from nanovllm.extensions.models.rope import Fields, rotating_layers
from nanovllm.layers.rotary_embedding import get_rope


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

    @staticmethod
    def read_facts(values: Fields) -> Fields:
        return {"rotates": rotating_layers(values)}

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        angles = {"rope_theta": 1.0, "inverse_frequencies": [0.0] * (config.head_dim // 2)}
        still = get_rope(config.head_dim, config.max_model_len, angles)
        for layer, rotates in zip(self.model.layers, config.facts["rotates"], strict=False):
            if not rotates:
                layer.self_attn.rotary_emb = still
