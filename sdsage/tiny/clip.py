"""CLIP-L text encoder, two layers deep, with the real vocabulary of 49408 tokens."""

from sdsage.tiny.layers import Layers
from sdsage.tiny.tensors import DType, Tensor, Uniform

DIM = 64  # one head: heads are 64 wide in every CLIP
FFN = 4 * DIM
LAYERS = 2
VOCABULARY = 49408
TOKENS = 77


def clip_l() -> list[Tensor]:
    """Tensors under the names of the files that people use."""
    net = Layers(DType.F16)
    net.add("text_model.embeddings.token_embedding.weight", (VOCABULARY, DIM), Uniform(1.0), DType.F16)
    net.add("text_model.embeddings.position_embedding.weight", (TOKENS, DIM), Uniform(0.5), DType.F16)
    for i in range(LAYERS):
        layer = f"text_model.encoder.layers.{i}."
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            net.linear(f"{layer}self_attn.{part}", DIM, DIM)
        net.linear(f"{layer}mlp.fc1", DIM, FFN)
        net.linear(f"{layer}mlp.fc2", FFN, DIM)
        for part in ("layer_norm1", "layer_norm2"):
            net.norm(f"{layer}{part}.weight", DIM)
            net.bias(f"{layer}{part}", DIM)
    net.norm("text_model.final_layer_norm.weight", DIM)
    net.bias("text_model.final_layer_norm", DIM)
    return net.tensors
