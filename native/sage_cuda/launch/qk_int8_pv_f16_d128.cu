#include "../kernels/qk_int8_pv_f16.cuh"
#include "launch_attn.cuh"

cudaError_t sage::launch_qk_int8_pv_f16_d128(const AttnParams & p, cudaStream_t stream) { return launch_attn<PvF16<128>>(p, stream); }
