// Prints the sizes that the engine takes from the headers of model files, without allocating a weight.
//
//   probe_sizes wan|umt5|t5|vae FILE [EXPECTED_VERSION]
//
// Every tensor of the built network is compared with the file: the last line is "N tensors match" or names the first that
// does not. The program also compiles against the tree without edits: that is how the stock constants are compared.
#include <cstdio>
#include <cstring>
#include <map>
#include <string>

#include "ggml_extend.hpp"
#include "model.h"
#include "t5.hpp"
#include "util.h"
#include "wan.hpp"

namespace {

int compare(const std::map<std::string, ggml_tensor *> & built, const String2TensorStorage & file) {
    int same = 0;
    for (const auto & [name, tensor] : built) {
        auto it = file.find(name);
        if (it == file.end()) {
            std::printf("missing %s\n", name.c_str());
            return 1;
        }
        for (int i = 0; i < 4; i++) {
            if (it->second.ne[i] != tensor->ne[i]) {
                std::printf("differs %s ne[%d]: file %lld, network %lld\n", name.c_str(), i, (long long)it->second.ne[i],
                            (long long)tensor->ne[i]);
                return 1;
            }
        }
        same++;
    }
    std::printf("%d tensors match\n", same);
    return 0;
}

void on_log(sd_log_level_t level, const char * text, void *) {
    if (level == SD_LOG_ERROR) {
        std::fputs(text, stderr);
    }
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 3) {
        return 2;
    }
    sd_set_log_callback(on_log, nullptr);
    const std::string kind = argv[1];
    const char * prefix    = kind == "wan" ? "model.diffusion_model." : kind == "vae" ? "vae." : "text_encoders.t5xxl.transformer.";
    ModelLoader loader;
    if (!loader.init_from_file(argv[2], prefix)) {
        return 1;
    }
    loader.convert_tensors_name();
    auto & map             = loader.get_tensor_storage_map();
    ggml_backend_t backend = ggml_backend_cpu_init();
    std::map<std::string, ggml_tensor *> built;

    if (kind == "wan") {
        const SDVersion version = loader.get_sd_version();
        WAN::WanRunner runner(backend, false, map, "model.diffusion_model", version);
        const auto & p = runner.wan_params;
        std::printf(
            "version %d desc %s type %s in %lld dim %lld ffn %lld freq %d text %lld out %lld heads %lld layers %d vace %d vace_in %lld\n",
            (int)version, runner.desc.c_str(), p.model_type.c_str(), (long long)p.in_dim, (long long)p.dim, (long long)p.ffn_dim,
            p.freq_dim, (long long)p.text_dim, (long long)p.out_dim, (long long)p.num_heads, p.num_layers, p.vace_layers,
            (long long)p.vace_in_dim);
        runner.get_param_tensors(built, "model.diffusion_model");
        return compare(built, map);
    }
    if (kind == "vae") {
        // a VAE alone does not say which Wan it belongs to: 48 latent channels are the 2.2
        auto it                 = map.find("first_stage_model.decoder.conv1.weight");
        auto bias               = map.find("first_stage_model.decoder.conv1.bias");
        const bool wan22        = it != map.end() && bias != map.end() && it->second.ne[3] / bias->second.ne[0] == 48;
        const SDVersion version = wan22 ? VERSION_WAN2_2_TI2V : VERSION_WAN2;
        WAN::WanVAERunner runner(backend, false, map, "first_stage_model", false, version);
        std::printf("dim %lld dec_dim %lld z %lld\n", (long long)runner.ae.dim, (long long)runner.ae.dec_dim, (long long)runner.ae.z_dim);
        runner.get_param_tensors(built, "first_stage_model");
        return compare(built, map);
    }
    T5Runner runner(backend, false, map, "text_encoders.t5xxl.transformer", kind == "umt5");
    const auto & p = runner.params;
    std::printf("layers %lld dim %lld ff %lld heads %lld vocab %lld\n", (long long)p.num_layers, (long long)p.model_dim,
                (long long)p.ff_dim, (long long)p.num_heads, (long long)p.vocab_size);
    runner.get_param_tensors(built, "text_encoders.t5xxl.transformer");
    return compare(built, map);
}
