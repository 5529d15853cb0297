// What libsdsage knows about attention beside what the graphs need (sdsage_attention.hpp).
#pragma once

#include <string>

#include "sdsage_attention.hpp"

namespace sdsage {

std::string device_name(ggml_backend_dev_t dev);  // "cuda:0"; devices.cpp
ggml_backend_dev_t chosen_device();               // where a context of this thread goes: sdsage_set_device, else upstream's choice

struct SageInfo {
    std::string name;  // of the device: "cuda:0 (NVIDIA H200)"
    sage_device device;
    sage_attn_choice choice;  // for head_dim 128
    std::string why;          // SageAttention can't run there, with the reason; empty if it can
};

SageInfo sage_info(ggml_backend_dev_t dev, sage_kernel kernel);

// For the test library: kernels for the CPU backend, and somebody who looks at every graph that was computed.
using GraphProbe = void (*)(ggml_cgraph * graph);
void set_cpu_sage(const SageBackend * backend, ggml_custom_op_t compute);
void set_graph_probe(GraphProbe probe);

}  // namespace sdsage
