// Levers of the engine: what a test library replaces.
#pragma once

#include "sdsage_levers.hpp"

namespace sdsage {

// The CPU backend pulls levers from now on, by `compute`; nullptr: no more.
void set_cpu_levers(const LeverBackend * backend, ggml_custom_op_t compute);

}  // namespace sdsage
