// Every launch: enough for api.cu, and nothing of the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/params.cuh"
#include "sage_cuda.h"

namespace sage {

// `early`: launches may overlap, which takes compute capability 9.0
cudaError_t launch_quantize(const QuantParams & p, int d, cudaStream_t stream, bool early);
cudaError_t launch_qk_int8_pv_f16_d64(const AttnParams & p, cudaStream_t stream);
cudaError_t launch_qk_int8_pv_f16_d128(const AttnParams & p, cudaStream_t stream);
cudaError_t launch_qk_int8_pv_f16_sm90_d64(const AttnParams & p, cudaStream_t stream);
cudaError_t launch_qk_int8_pv_f16_sm90_d128(const AttnParams & p, cudaStream_t stream);
cudaError_t launch_qk_int8_pv_f8_sm90_d64(const AttnParams & p, cudaStream_t stream);
cudaError_t launch_qk_int8_pv_f8_sm90_d128(const AttnParams & p, cudaStream_t stream);
cudaError_t launch_qk_int8_pv_f8_d64(const AttnParams & p, cudaStream_t stream);
cudaError_t launch_qk_int8_pv_f8_d128(const AttnParams & p, cudaStream_t stream);
cudaError_t launch_qk_int8_pv_f8pp_d64(const AttnParams & p, cudaStream_t stream);
cudaError_t launch_qk_int8_pv_f8pp_d128(const AttnParams & p, cudaStream_t stream);

// sage_attn_run, or a part of it, for timing
enum Parts { QUANTIZE = 1, ATTEND = 2 };
sage_status run_parts(const sage_attn_desc * desc, void * workspace, size_t workspace_size, void * stream, int parts);

}  // namespace sage
