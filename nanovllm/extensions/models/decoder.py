"""The decoder of Qwen3's relatives: the core's, of which parts are replaced as the configuration says."""

from nanovllm.extensions.experts.moe import MixtureOfExperts
from nanovllm.extensions.models.attention_rule import AttentionRule
from nanovllm.extensions.models.config import DecoderConfig, Fields
from nanovllm.extensions.models.gguf import GGUFModel
from nanovllm.layers.rotary_embedding import get_rope
from nanovllm.models.qwen3 import Qwen3ForCausalLM, Qwen3MLP


class Decoder(Qwen3ForCausalLM):
    """
    A subclass has the name that its model has among `architectures` in config.json, and all other facts of
    that model as attributes. Layers that attend to a window may have a rotation of their own (Gemma 3). Where
    a file says something in another way than others, `read_facts` makes of its fields those that it means.
    """

    model_type = ""  # in config.json
    # Fields that a file may leave out, as far as they are not those of all models; which there are says what
    # files of this model may ask for at all.
    defaults: Fields = {}
    has_qk_norm = True
    has_output_bias = True  # if queries, keys and values have biases
    mixture_class = MixtureOfExperts
    has_chunks = False  # in place of windows, see AttentionRule
    needs_layer_types = False  # for windows, since without them versions of transformers differ
    # Parts of tensors' names in checkpoints, and what they are called here, where these differ.
    renamed_parts: dict[str, str] = {}
    gguf: GGUFModel | None = None  # if GGUF files of it can be read

    def __init__(self, config: DecoderConfig):
        super().__init__(config)
        local, local_rope = config.local_rope_parameters, None
        if local != config.rope_parameters:
            local_rope = get_rope(config.head_dim, config.max_model_len, local)
        scale = config.query_pre_attn_scalar**-0.5
        experts, hidden_size = config.experts, config.hidden_size
        for i, layer in enumerate(self.model.layers):
            attention = layer.self_attn
            attention.attn.variant.scale = scale
            if config.windows[i]:
                attention.attn.variant = AttentionRule(scale, config.window(i), in_chunks=self.has_chunks)
                attention.rotary_emb = local_rope or attention.rotary_emb
            if not (self.has_qk_norm and config.use_qk_norm):
                attention.q_norm = attention.k_norm = None
            if not self.has_output_bias:
                attention.o_proj.bias = None
            if experts is not None and experts.replaces_mlp(i):
                layer.mlp = self.mixture_class(hidden_size, experts)
            elif config.mlp_bias:
                layer.mlp = Qwen3MLP(hidden_size, config.intermediate_size, bias=True)
