// One attention alone, for checking and timing (sdsage_run_attention).
#pragma once

#include "attention.h"
#include "sdsage.h"

namespace sdsage {

bool run_attention(const sdsage_attention_problem_t & problem, sdsage_attention_method_t * methods, int count, int repeats);

// native/sage_cuda by itself: its pure chooser, and a run or a part of one (sage_cuda's run_parts: 1 quantizes, 2 attends).
struct SageLibrary {
    sage_status (*choose)(const sage_attn_desc * desc, const sage_device * device, sage_attn_choice * choice);
    sage_status (*run_parts)(const sage_attn_desc * desc, void * workspace, size_t size, void * stream, int parts);
    const char * (*last_error)();
};

// For the test library, whose kernels are on the CPU; nullptr: no more.
void set_cpu_sage_library(const SageLibrary * library);

}  // namespace sdsage
