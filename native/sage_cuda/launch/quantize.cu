#include "../quantize/kv_stats.cuh"
#include "../quantize/quantize_v.cuh"
#include "../src/launch.h"
#include "launch.cuh"

namespace sage {

template <int D>
static cudaError_t quantize_all(const QuantParams & p, cudaStream_t stream, bool early) {
    const unsigned kv = unsigned(p.batch) * p.kv_heads, q = unsigned(p.batch) * p.heads;
    cudaError_t e = launch(kv_stats<D>, p, 2 * kv * p.stat_tiles, STAT_THREADS, 0, stream);
    if (e == cudaSuccess) {
        e = launch(kv_stats_finish<D>, p, kv, D * 8, 0, stream, early);
    }
    if (e == cudaSuccess) {
        e = launch(p.v_max == 0.f ? quantize<D, false> : quantize<D, true>, p, 2 * kv * p.k_tiles + q * p.q_tiles, QUANT_THREADS, 0, stream,
                   early);
    }
    return e;
}

cudaError_t launch_quantize(const QuantParams & p, int d, cudaStream_t stream, bool early) {
    return d == 64 ? quantize_all<64>(p, stream, early) : quantize_all<128>(p, stream, early);
}

}  // namespace sage
