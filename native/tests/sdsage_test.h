/* What the test library has beside libsdsage: SageAttention's arithmetic on the CPU, and a look at the graphs that ran. */
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

#ifdef __cplusplus
}
#endif

#endif
