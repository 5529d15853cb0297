/* What the test library has beside libsdsage: the arithmetic of SageAttention and of the levers on the CPU, a GPU that is
 * none, and a look at the graphs that ran. */
#ifndef SDSAGE_TEST_H
#define SDSAGE_TEST_H

#include "sdsage.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The CPU backend computes SageAttention from now on, and answers as a GPU of this compute capability (90 for 9.0) in a build
 * with kernels for these architectures ("80 90a") by this toolkit (13000). Compute capability 0: off again. */
SD_API void sdsage_test_sage_cpu(int compute_capability, int toolkit, const char * architectures);
/* The kernels give zeros, as a broken card would. */
SD_API void sdsage_test_break_sage(bool broken);
/* Ops that produce and take what SageAttention's nodes read and write, in the graphs since the last call: lines of
 * "q MUL_MAT 12". Views are looked through. Static until the next call. */
SD_API const char * sdsage_test_neighbours(void);

/* The CPU backend computes the engine's levers from now on. `fault` makes one of them wrong: 1 forgets the bias of linear layers, 2 the
 * shift of norms, 3 turns the rotary embedding the other way, 4 forgets the bias of convolutions,
 * 5 doubles the scale of every other token in FP8, 8 forgets gates, 9 makes the scale of norms 1 % larger; 0 none. 6 has no FP8 for
 * 512 inputs, 7 none at all. */
SD_API void sdsage_test_levers_cpu(bool on, int fault);
/* Linear layers and convolutions whose result has `from` bytes or more ask for this much scratch memory from now on, and
 * write to it; -1: for as much as on CUDA. */
SD_API void sdsage_test_lever_scratch(int64_t bytes, int64_t from);
/* The last number of what a linear layer makes of another one's result plus a residual, with levers or without. */
SD_API float sdsage_test_lever_chain(bool pulled);
/* Bytes that the graph of the last such call reserved. */
SD_API int64_t sdsage_test_lever_reserved(void);
/* What they computed since the last call: lines of "linear bias gelu in BF16: 12". Static until the next call. */
SD_API const char * sdsage_test_levers(void);

/* There is a GPU from now on: its memory, of so many bytes, is the host's, and the CPU computes for it. `can_pin`: the host has pinned
 * memory for it. Call it before anything asks for devices. */
SD_API void sdsage_test_gpu(bool can_pin, uint64_t memory);
/* Bytes of it in use now, or at most since the last call of sdsage_test_gpu. */
SD_API uint64_t sdsage_test_gpu_used(bool at_most);
/* Copies to it that ran beside the caller since then. */
SD_API int sdsage_test_gpu_copies(void);

#ifdef __cplusplus
}
#endif

#endif
