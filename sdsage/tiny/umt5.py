"""umt5 encoder, two layers deep. The vocabulary is compiled into the engine, so its table has the real 256384 rows."""

from sdsage.tiny.layers import Layers
from sdsage.tiny.tensors import DType, Tensor, Uniform

DIM = 64
HEADS = 2
FFN = 128
LAYERS = 2
VOCABULARY = 256384
BUCKETS = 32  # of relative positions


def umt5() -> list[Tensor]:
    """Tensors under the names of llama.cpp, as in the files that people use."""
    net = Layers(DType.Q8_0)
    net.add("token_embd.weight", (VOCABULARY, DIM), Uniform(1.0), DType.Q8_0)
    for i in range(LAYERS):
        block = f"enc.blk.{i}."
        # T5 does not divide the logits by sqrt(head size): q is small instead
        net.linear(f"{block}attn_q", DIM, DIM, gain=(DIM // HEADS) ** -0.5, bias=None)
        for part in "kvo":
            net.linear(f"{block}attn_{part}", DIM, DIM, bias=None)
        net.add(f"{block}attn_rel_b.weight", (BUCKETS, HEADS), Uniform(0.5))
        net.norm(f"{block}attn_norm.weight", DIM)
        net.linear(f"{block}ffn_gate", DIM, FFN, bias=None)
        net.linear(f"{block}ffn_up", DIM, FFN, bias=None)
        net.linear(f"{block}ffn_down", FFN, DIM, bias=None)
        net.norm(f"{block}ffn_norm.weight", DIM)
    net.norm("enc.output_norm.weight", DIM)
    return net.tensors
