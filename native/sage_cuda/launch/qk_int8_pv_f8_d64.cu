#include "../kernels/qk_int8_pv_f8.cuh"
#include "launch_attn.cuh"

cudaError_t sage::launch_qk_int8_pv_f8_d64(const AttnParams & p, cudaStream_t stream) { return launch_attn<PvF8<64, false>>(p, stream); }
