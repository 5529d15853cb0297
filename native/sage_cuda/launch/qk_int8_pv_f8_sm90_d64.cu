#include "../kernels/qk_int8_pv_f8_sm90.cuh"
#include "launch_sm90.cuh"

cudaError_t sage::launch_qk_int8_pv_f8_sm90_d64(const AttnParams & p, cudaStream_t stream) { return launch_sm90<PvF8Sm90<64>>(p, stream); }
