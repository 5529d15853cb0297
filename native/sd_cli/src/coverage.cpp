#include "coverage.h"

#include <cstdlib>
#include <cstring>
#include <sstream>

#include "ggml.h"
#include "sdsage_build_info.h"
#ifdef SDSAGE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace sdsage {
namespace {

std::string dotted(int compute_capability) {
    return std::to_string(compute_capability / 10) + "." + std::to_string(compute_capability % 10);
}

std::string rebuild(int compute_capability) {
    const std::string arch = std::to_string(compute_capability) + (compute_capability >= 90 ? "a" : "");
    return "build it again with its architecture, in a checkout: SDSAGE_CUDA=1 SDSAGE_CUDA_ARCHS=" + arch +
           " pip install --force-reinstall --no-deps . (with CMake: -DSDSAGE_CUDA_ARCHS=" + arch + ")";
}

// One name: "90a-real" is code for 9.0 alone, "100f" for 10.0 and later 10.x, "80-real" for 8.0 and later 8.x; "80-virtual" and
// "80" hold PTX, which the driver compiles for anything later.
bool runs_on(const std::string & name, int compute_capability) {
    char * end;
    const int arch    = static_cast<int>(std::strtol(name.c_str(), &end, 10));
    const char letter = *end == 'a' || *end == 'f' ? *end++ : ' ';
    if (letter == 'a') {
        return compute_capability == arch;
    }
    const bool any_later = std::strcmp(end, "-real") != 0 && letter != 'f';
    return compute_capability >= arch && (any_later || compute_capability / 10 == arch / 10);
}

#ifdef SDSAGE_HAS_CUDA
// 90 for 9.0; 0 if it can't be told. ggml's name of a device ends in CUDA's number.
int compute_capability_of(ggml_backend_dev_t dev) {
    const char * name = ggml_backend_dev_name(dev);
    const int ordinal = std::atoi(name + std::strcspn(name, "0123456789"));
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal) != cudaSuccess) {
        return 0;
    }
    return major * 10 + minor;
}
#endif

// sizeof(ggml_tensor) where ggml was compiled: what a tensor takes in a context, without the object in front of it.
size_t size_of_tensor_in_ggml() {
    alignas(64) static char memory[4096];
    ggml_context * ctx      = ggml_init({ sizeof(memory), memory, true });
    const char * tensor     = reinterpret_cast<const char *>(ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1));
    const size_t its_object = static_cast<size_t>(tensor - memory);
    ggml_free(ctx);
    return ggml_tensor_overhead() - its_object;
}

// From the moment the library is loaded.
const std::string problem_of_ggml = why_ggml_differs(size_of_tensor_in_ggml(), sizeof(ggml_tensor));

}  // namespace

bool has_code_for(const std::string & architectures, int compute_capability) {
    std::istringstream names(architectures);
    std::string name;
    bool any = false;
    while (names >> name) {
        any = true;
        if (runs_on(name, compute_capability)) {
            return true;
        }
    }
    return !any;
}

std::string why_no_code(const std::string & device, int compute_capability, const std::string & architectures) {
    if (compute_capability == 0 || has_code_for(architectures, compute_capability)) {
        return "";
    }
    return "this build can't run on " + device + ": the GPU has compute capability " + dotted(compute_capability) +
           ", and there is code for " + architectures + " only; " + rebuild(compute_capability) + ", or take another device";
}

std::string why_ggml_differs(size_t in_ggml, size_t in_engine) {
    if (in_ggml == in_engine) {
        return "";
    }
    return "the ggml that was loaded is not the one that this engine was built with: a tensor has " + std::to_string(in_ggml) +
           " bytes there and " + std::to_string(in_engine) +
           " here (GGML_MAX_NAME must be 128 in both); install the ggml of this engine's source, or build without SD_USE_SYSTEM_GGML";
}

const std::string & ggml_problem() { return problem_of_ggml; }

std::string device_problem(ggml_backend_dev_t dev) {
#ifdef SDSAGE_HAS_CUDA
    if (std::strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), "CUDA") == 0) {
        const std::string name = device_name(dev) + " (" + ggml_backend_dev_description(dev) + ")";
        return why_no_code(name, compute_capability_of(dev), SDSAGE_CODE_FOR);
    }
#endif
    (void)dev;
    return "";
}

std::string sage_problem(const SageInfo & info, const std::string & ggml) {
    if (ggml == "upstream") {
        return "SageAttention can't run on " + info.name +
               ": this build lacks it, as its ggml was left as upstream has it (SD_USE_UPSTREAM_GGML): build it without that";
    }
    if (info.why.empty() || info.device.architectures == nullptr || info.device.compute_capability < 80) {
        return info.why;
    }
    // the kernels write "86" for machine code and "compute_80" for PTX
    std::istringstream names(info.device.architectures);
    std::string name, list;
    while (names >> name) {
        list += (list.empty() ? "" : " ") + (name.rfind("compute_", 0) == 0 ? name.substr(8) + "-virtual" : name + "-real");
    }
    if (list.empty() || has_code_for(list, info.device.compute_capability)) {
        return info.why;
    }
    return "SageAttention can't run on " + info.name + ": the GPU has compute capability " + dotted(info.device.compute_capability) +
           ", and this build has kernels for " + info.device.architectures + " only; " + rebuild(info.device.compute_capability);
}

SageInfo chosen_sage(sage_kernel kernel) {
    SageInfo info = sage_info(chosen_device(), kernel);
    info.why      = sage_problem(info, SDSAGE_GGML);
    return info;
}

}  // namespace sdsage
