// Whether this build's code fits where it runs: the GPU's architecture, and the ggml that was loaded with it.
#pragma once

#include <cstddef>
#include <string>

#include "attention.h"

namespace sdsage {

// Whether code for these architectures, as CMake names them ("86-real 90a-real 80-virtual", separated by spaces), runs on a GPU of
// this compute capability (90 for 9.0). True for an empty list: nothing is known.
bool has_code_for(const std::string & architectures, int compute_capability);

// "" where ggml's own kernels run on `device` ("cuda:0 (NVIDIA H200)"), else what is wrong and how to build again.
std::string why_no_code(const std::string & device, int compute_capability, const std::string & architectures);

// "" where sizeof(ggml_tensor) in ggml is the engine's.
std::string why_ggml_differs(size_t in_ggml, size_t in_engine);

// SageInfo::why in the words of a build, whose ggml is "patched", "upstream" or "system": its option for architectures, and what
// it was built without.
std::string sage_problem(const SageInfo & info, const std::string & ggml);

// ---- of this process

const std::string & ggml_problem();              // found when the library was loaded; "" if none
std::string device_problem(ggml_backend_dev_t);  // why no context can be made there; "" if one can
SageInfo chosen_sage(sage_kernel kernel);        // of chosen_device()

}  // namespace sdsage
