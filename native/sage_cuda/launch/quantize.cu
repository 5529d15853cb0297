#include "../quantize/kv_stats.cuh"
#include "../quantize/quantize_qk.cuh"
#include "../quantize/quantize_v.cuh"
#include "../src/launch.h"
#include "launch.cuh"

namespace sage {

template <int D>
static cudaError_t quantize(const QuantParams & p, cudaStream_t stream) {
    const unsigned kv = unsigned(p.batch) * p.kv_heads, q = unsigned(p.batch) * p.heads;
    cudaError_t e = launch(kv_stats<D>, p, 2 * kv * p.stat_tiles, STAT_THREADS, 0, stream);
    if (e == cudaSuccess) {
        e = launch(kv_stats_finish<D>, p, kv, D * 8, 0, stream);
    }
    if (e == cudaSuccess) {
        e = launch(quantize_qk<D>, p, q * p.q_tiles + kv * p.k_tiles, QUANT_THREADS, 0, stream);
    }
    if (e == cudaSuccess) {
        e = launch(p.v_max == 0.f ? quantize_v_f16<D> : quantize_v_f8<D>, p, kv * p.k_tiles, QUANT_THREADS, 0, stream);
    }
    return e;
}

cudaError_t launch_quantize(const QuantParams & p, int d, cudaStream_t stream) {
    return d == 64 ? quantize<64>(p, stream) : quantize<128>(p, stream);
}

}  // namespace sage
