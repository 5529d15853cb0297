// Levers of the engine beside what the graphs need (sdsage_levers.hpp): what is said about them, what a test library replaces.
#pragma once

#include "sdsage_levers.hpp"
#include "sdsage_seam.hpp"

namespace sdsage {

// What is wrong with these settings on this device, empty if nothing is. `levers`: bits of a runner's setting.
std::string levers_problem(const char * text, bool fast_linear, ggml_backend_dev_t dev, unsigned * levers);

// The names of those that `text` asks for and this device has, joined by commas.
std::string levers_on(const char * text, ggml_backend_dev_t dev);

// Files what levers computed in a graph.
void count_levers(ggml_cgraph * graph, Part part);

// The CPU backend pulls levers from now on, by `compute`; nullptr: no more.
void set_cpu_levers(const LeverBackend * backend, ggml_custom_op_t compute);

}  // namespace sdsage
