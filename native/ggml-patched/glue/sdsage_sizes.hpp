// Network sizes read from the tensors of the file, so that a model of any width loads.
// Stock files resolve to upstream's own constants (tests/test_stock_sizes.py).
// Upstream gives ggml shapes: ne[0] is the fastest dimension; a 5-d patch embedding has its last two merged in ne[3].
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace sdsage {

// Length of dimension `i` of a tensor in the file; 0 if the file has no such tensor.
template <class Map>
int64_t file_ne(const Map & map, const std::string & name, int i) {
    auto it = map.find(name);
    return it == map.end() ? 0 : it->second.ne[i];
}

template <class Map, class Int>
void read_ne(Int & size, const Map & map, const std::string & name, int i) {
    if (int64_t n = file_ne(map, name, i)) {
        size = static_cast<Int>(n);
    }
}

// Number of consecutive layers `first<i>last`, counted from 0.
template <class Map>
int count_layers(const Map & map, const std::string & first, const std::string & last) {
    int n = 0;
    while (map.find(first + std::to_string(n) + last) != map.end()) {
        n++;
    }
    return n;
}

// Input channels of a Wan model (16 T2V, 36 I2V, 48 TI2V) from the merged dimension in_channels * dim.
// Without a bias there is nothing to divide by: the widths of the stock 14B and 5B stand in.
template <class Map>
int64_t wan_in_channels(const Map & map, int64_t merged) {
    const int64_t dim = file_ne(map, "model.diffusion_model.patch_embedding.bias", 0);
    if (dim > 0) {
        return merged / dim;
    }
    return merged == 36 * 5120 ? 36 : merged == 48 * 3072 ? 48 : 16;
}

// Upstream keys behaviour on the name of the stock model: a file with another number of layers behaves as its kind.
template <class Params>
const char * wan_desc(const Params & p, bool is_i2v, bool is_ti2v) {
    if (is_ti2v) {
        return "Wan2.2-TI2V-5B";
    }
    if (is_i2v) {
        return "Wan2.2-I2V-14B";
    }
    if (p.model_type == "i2v") {
        return p.flf_pos_embed_token_number > 0 ? "Wan2.1-FLF2V-14B" : "Wan2.1-I2V-14B";
    }
    return p.vace_layers > 0 ? "Wan2.x-VACE-14B" : "Wan2.x-T2V-14B";
}

template <class Params, class Map>
void wan_sizes(Params & p, const Map & map, const std::string & prefix) {
    const int64_t dim = file_ne(map, prefix + ".patch_embedding.bias", 0);
    if (dim == 0) {
        return;  // not a Wan file; loading names the missing tensors
    }
    if (dim % p.axes_dim_sum != 0) {
        throw std::runtime_error("Wan model of width " + std::to_string(dim) + ": the width must be a multiple of the head size " +
                                 std::to_string(p.axes_dim_sum));
    }
    p.dim       = dim;
    p.num_heads = dim / p.axes_dim_sum;
    p.in_dim    = file_ne(map, prefix + ".patch_embedding.weight", 3) / dim;
    read_ne(p.text_dim, map, prefix + ".text_embedding.0.weight", 0);
    read_ne(p.freq_dim, map, prefix + ".time_embedding.0.weight", 0);
    read_ne(p.ffn_dim, map, prefix + ".blocks.0.ffn.0.bias", 0);
    if (int64_t out = file_ne(map, prefix + ".head.head.bias", 0)) {
        p.out_dim = out / 4;  // a patch is 1 x 2 x 2
    }
    if (int64_t merged = file_ne(map, prefix + ".vace_patch_embedding.weight", 3)) {
        p.vace_in_dim = merged / dim;
    }
}

// Base widths of the Wan VAE; 0 keeps upstream's.
template <class Map>
int64_t wan_vae_dim(const Map & map, const std::string & prefix) {
    return file_ne(map, prefix + ".encoder.conv1.bias", 0);
}

template <class Map>
int64_t wan_vae_dec_dim(const Map & map, const std::string & prefix) {
    return file_ne(map, prefix + ".decoder.conv1.bias", 0) / 4;  // the decoder starts at four times its base width
}

template <class Params, class Map>
void t5_sizes(Params & p, const Map & map, const std::string & prefix) {
    const std::string block = prefix + ".encoder.block.";
    read_ne(p.model_dim, map, prefix + ".shared.weight", 0);
    read_ne(p.vocab_size, map, prefix + ".shared.weight", 1);
    read_ne(p.ff_dim, map, block + "0.layer.1.DenseReluDense.wi_0.weight", 1);
    read_ne(p.num_heads, map, block + "0.layer.0.SelfAttention.relative_attention_bias.weight", 0);
    if (int n = count_layers(map, block, ".layer.0.layer_norm.weight")) {
        p.num_layers = n;
    }
}

template <class Map>
void unet_sizes(int & channels, int & time_dim, const Map & map) {
    read_ne(channels, map, "model.diffusion_model.time_embed.0.weight", 0);
    read_ne(time_dim, map, "model.diffusion_model.time_embed.0.weight", 1);
}

// CLIP text model; heads are 64 wide in every CLIP.
struct ClipSizes {
    int32_t hidden = 0, intermediate = 0, layers = 0;

    ClipSizes() = default;
    template <class Map>
    ClipSizes(const Map & map, const std::string & prefix) {
        read_ne(hidden, map, prefix + ".embeddings.token_embedding.weight", 0);
        read_ne(intermediate, map, prefix + ".encoder.layers.0.mlp.fc1.bias", 0);
        layers = count_layers(map, prefix + ".encoder.layers.", ".layer_norm1.weight");
    }

    template <class Model>
    void apply(Model & m) const {
        if (hidden == 0 || hidden == m.hidden_size) {
            return;  // a stock width: upstream also knows files that leave out the last layer
        }
        m.hidden_size       = hidden;
        m.n_head            = hidden / 64;
        m.intermediate_size = intermediate;
        m.n_layer           = layers;
    }
};

}  // namespace sdsage
