#include "conv.cuh"

#include <algorithm>
#include <climits>
#include <iterator>

#include "conv_ptx.cuh"

namespace sdsage {

constexpr int BK       = 32;  // channels in a step
constexpr int ROW      = BK * sizeof(__half);
constexpr int ROW_16B  = ROW / 16;
constexpr int SLACK    = 8;  // pixels behind the packed pictures: columns that are not written read into them
constexpr int PACK_PIX = 64;

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ---------------------------------------------------------------------------------------------------------------- packing

// packed[d, h, w, channel] f16 = pad(concat(cache, x)), channels filled up to a multiple of BK with zeros.
struct PackPictures {
    Conv conv;
    __half * packed;
    int in_w, in_h, pixels, channels;
};

static __global__ void __launch_bounds__(256) pack_pictures(const __grid_constant__ PackPictures p) {
    __shared__ float tile[BK][PACK_PIX + 1];
    const Conv & conv         = p.conv;
    const int64_t first_pixel = static_cast<int64_t>(blockIdx.x) * PACK_PIX;
    const int first_channel   = blockIdx.y * BK;

    const int column    = threadIdx.x % PACK_PIX;
    const float * from  = nullptr;
    int64_t channel     = 0;
    const int64_t pixel = first_pixel + column;
    if (pixel < p.pixels) {
        const uint32_t row = static_cast<uint32_t>(pixel) / p.in_w;
        const int w        = static_cast<int>(static_cast<uint32_t>(pixel) - row * p.in_w) - conv.left;
        const int d        = static_cast<int>(row / p.in_h) - conv.front;
        const int h        = static_cast<int>(row % p.in_h) - conv.top;
        if (w >= 0 && w < conv.width * conv.upscale && h >= 0 && h < conv.height * conv.upscale && d >= 0 &&
            d < conv.cache_frames + conv.frames) {
            const bool cached = d < conv.cache_frames;
            from              = cached ? conv.cache + d * conv.cache_frame : conv.x + (d - conv.cache_frames) * conv.x_frame;
            from += static_cast<int64_t>(h / conv.upscale) * conv.width + w / conv.upscale;
            channel = cached ? conv.cache_channel : conv.x_channel;
        }
    }
#pragma unroll
    for (int i = 0; i < BK / 4; i++) {
        const int c     = threadIdx.x / PACK_PIX + 4 * i;
        tile[c][column] = from != nullptr && first_channel + c < conv.ic ? from[(first_channel + c) * channel] : 0.f;
    }
    __syncthreads();

    const int to = threadIdx.x / ROW_16B, c = threadIdx.x % ROW_16B * 8;
    if (first_pixel + to < p.pixels) {
        __half2 values[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            values[i] = __floats2half2_rn(tile[c + 2 * i][to], tile[c + 2 * i + 1][to]);
        }
        *reinterpret_cast<uint4 *>(p.packed + (first_pixel + to) * p.channels + first_channel + c) = *reinterpret_cast<uint4 *>(values);
    }
}

// packed[n tile][kd kh kw / taps][ic / BK][tap][oc in tile][BK] f16: what a step of the GEMM reads is one piece.
static __global__ void pack_weight(const __half * weight, __half * packed, int ic, int oc, int kernel, int channels, int bn, int taps) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x, o = blockIdx.y;
    if (c >= channels) {
        return;
    }
    const __half * from = weight + (static_cast<int64_t>(o) * ic + c) * kernel;
    const int chunks    = channels / BK;
    __half * tile       = packed + static_cast<int64_t>(o / bn) * bn * channels * kernel;
    for (int tap = 0; tap < kernel; tap++) {
        const int64_t step                                             = static_cast<int64_t>(tap / taps) * chunks + c / BK;
        tile[((step * taps + tap % taps) * bn + o % bn) * BK + c % BK] = o < oc && c < ic ? from[tap] : __half(0.f);
    }
}

// ------------------------------------------------------------------------------------------------------------------- GEMM

// TAPS is the kernel's width where one piece of a row serves all its columns, else 1.
template <int BM_, int BN_, int WARPS_M_, int WARPS_N_, int STAGES_, int TAPS_>
struct Tile {
    static constexpr int BM = BM_, BN = BN_, WARPS_N = WARPS_N_, STAGES = STAGES_, TAPS = TAPS_;
    static constexpr int THREADS = 32 * WARPS_M_ * WARPS_N_;
    static constexpr int WM = BM / WARPS_M_, WN = BN / WARPS_N_;  // of a warp
    static constexpr int MI = WM / 16, NI = WN / 8;
    static constexpr int ROWS_A = BM + TAPS - 1, ROWS_B = BN * TAPS;
    static constexpr int BYTES_A = (BM + (TAPS > 1 ? 8 : 0)) * ROW, STAGE = BYTES_A + ROWS_B * ROW;
    static constexpr int SMEM     = STAGE * STAGES;
    static constexpr int BLOCKS   = THREADS <= 128 && SMEM <= 113 * 1024 ? 2 : 1;  // of an SM with 228 KiB
    static constexpr int ROW_STEP = THREADS / ROW_16B;                             // rows that the threads copy at a time
    static constexpr int COPIES_A = (ROWS_A + ROW_STEP - 1) / ROW_STEP, COPIES_B = (ROWS_B + ROW_STEP - 1) / ROW_STEP;
    static_assert(ROW_STEP % 8 == 0, "a thread's rows share one swizzle");
    static_assert(WM % 16 == 0 && WN % 16 == 0, "ldmatrix brings 16 rows");
    static_assert(TAPS <= 9, "the rows behind BM fit in 8");
};

struct Gemm {
    const uint4 * a;  // packed pictures
    const uint4 * b;  // packed weights
    const float * bias;
    float * y;
    int64_t y_channel, y_frame, frame_16b;  // frame_16b: from one output frame's first packed picture to the next one's
    int in_w, in_h, pixel_16b, chunks;
    int kd, kh, kw_groups;
    int sw, sh;
    int out_w, out_h, oc;
    int columns;  // of a row of positions: out_w, or in_w where the taps of a row share a piece
    int m_tiles, n_tiles;
};

// 16-byte pieces of 8 neighbouring rows fall into 8 different groups of banks, wherever the 8 rows begin.
__device__ __forceinline__ uint32_t swizzle(int row, int piece) { return row * ROW + ((piece ^ (row >> 1 & 3)) << 4); }

// y[oc, position] = bias[oc] + sum over steps of A[position, k] B[oc, k]     one block per (frame, BM positions, BN channels)
//   A rows lie in the packed pictures: that of a position and a tap begins pixel(position) + tap pixels in
template <class T>
__global__ void __launch_bounds__(T::THREADS, T::BLOCKS) conv_gemm(const __grid_constant__ Gemm p) {
#if __CUDA_ARCH__ >= 800
    extern __shared__ __align__(128) char shared[];
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int n_tile = blockIdx.x % p.n_tiles, m_index = blockIdx.x / p.n_tiles;
    const int frame = m_index / p.m_tiles, m0 = m_index % p.m_tiles * T::BM;
    const int positions = p.out_h * p.columns;

    // Copying: thread t brings piece t % 4 of rows t / 4, t / 4 + ROW_STEP, ...
    const int copy_row = thread / ROW_16B, copy_piece = thread % ROW_16B;
    const uint32_t smem    = ptx::shared_address(shared);
    const uint32_t copy_to = smem + swizzle(copy_row, copy_piece);
    int from_a[T::COPIES_A];
#pragma unroll
    for (int i = 0; i < T::COPIES_A; i++) {
        const int m = min(m0 + copy_row + i * T::ROW_STEP, positions + T::TAPS - 2);
        const int h = m / p.columns, w = m - h * p.columns;
        from_a[i] = (h * p.sh * p.in_w + w * p.sw) * p.pixel_16b + copy_piece;
    }
    const int steps = p.kd * p.kh * p.kw_groups * p.chunks;
    const uint4 * a = p.a + frame * p.frame_16b;
    const uint4 * b = p.b + static_cast<int64_t>(n_tile) * steps * (T::ROWS_B * ROW_16B) + thread;
    int chunk = 0, kw = 0, kh = 0, copied = 0;

    const auto copy_step = [&] {
        if (copied < steps) {
            const uint32_t to = copy_to + copied % T::STAGES * T::STAGE;
#pragma unroll
            for (int i = 0; i < T::COPIES_A; i++) {
                if ((i + 1) * T::ROW_STEP <= T::ROWS_A || copy_row + i * T::ROW_STEP < T::ROWS_A) {
                    ptx::copy16(to + i * T::ROW_STEP * ROW, a + from_a[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < T::COPIES_B; i++) {
                if ((i + 1) * T::ROW_STEP <= T::ROWS_B || copy_row + i * T::ROW_STEP < T::ROWS_B) {
                    ptx::copy16(to + T::BYTES_A + i * T::ROW_STEP * ROW, b + i * T::THREADS);
                }
            }
            // On to the next channels, then column, row and frame of the kernel.
            b += T::ROWS_B * ROW_16B;
            a += ROW_16B;
            if (++chunk == p.chunks) {
                chunk = 0;  // `a` has moved by one pixel
                if (++kw == p.kw_groups) {
                    kw = 0;
                    a += static_cast<int64_t>(p.in_w - p.kw_groups) * p.pixel_16b;
                    if (++kh == p.kh) {
                        kh = 0;
                        a += static_cast<int64_t>(p.in_h - p.kh) * p.in_w * p.pixel_16b;
                    }
                }
            }
        }
        copied++;
        ptx::copy_commit();
    };
#pragma unroll
    for (int i = 0; i < T::STAGES - 1; i++) {
        copy_step();
    }

    const int warp_m = warp / T::WARPS_N * T::WM, warp_n = warp % T::WARPS_N * T::WN;
    const int row_a = warp_m + lane % 16, piece_a = lane / 16;
    const int row_b = warp_n + lane % 8 + lane / 16 * 8, piece_b = lane / 8 % 2;
    float sum[T::MI][T::NI][4] = {};
    int stage                  = 0;
    for (int step = 0; step < steps; step++) {
        ptx::copy_wait<T::STAGES - 2>();
        __syncthreads();  // also: everybody is done with the stage that is written next
        copy_step();
        const uint32_t stage_a = smem + stage, stage_b = stage_a + T::BYTES_A;
        stage = stage + T::STAGE == T::SMEM ? 0 : stage + T::STAGE;
#pragma unroll
        for (int tap = 0; tap < T::TAPS; tap++) {
#pragma unroll
            for (int k = 0; k < BK / 16; k++) {
                uint32_t fa[T::MI][4], fb[T::NI / 2][4];
#pragma unroll
                for (int i = 0; i < T::MI; i++) {
                    ptx::load_matrices(fa[i], stage_a + i * 16 * ROW + swizzle(row_a + tap, 2 * k + piece_a));
                }
#pragma unroll
                for (int j = 0; j < T::NI / 2; j++) {
                    ptx::load_matrices(fb[j], stage_b + (tap * T::BN + j * 16) * ROW + swizzle(row_b, 2 * k + piece_b));
                }
#pragma unroll
                for (int i = 0; i < T::MI; i++) {
#pragma unroll
                    for (int j = 0; j < T::NI; j++) {
                        ptx::mma(sum[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1]);
                    }
                }
            }
        }
    }

    // + bias; a warp's store is 8 positions of 4 channels
    float * y = p.y + frame * p.y_frame;
    float bias[T::NI][2];
    const int oc0 = n_tile * T::BN + warp_n + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < T::NI; j++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            bias[j][e] = p.bias != nullptr && oc0 + j * 8 + e < p.oc ? p.bias[oc0 + j * 8 + e] : 0.f;
        }
    }
#pragma unroll
    for (int i = 0; i < T::MI; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int m = m0 + warp_m + i * 16 + half * 8 + lane / 4;
            const int h = m / p.columns, w = m - h * p.columns;
            if (h >= p.out_h || w >= p.out_w) {
                continue;
            }
            float * to = y + static_cast<int64_t>(h) * p.out_w + w;
#pragma unroll
            for (int j = 0; j < T::NI; j++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int oc = oc0 + j * 8 + e;
                    if (oc < p.oc) {
                        to[oc * p.y_channel] = sum[i][j][half * 2 + e] + bias[j][e];
                    }
                }
            }
        }
    }
#endif
}

// ---------------------------------------------------------------------------------------------------------------- choosing

struct Variant {
    int bm, bn, threads, smem[2];
    void (*kernel[2])(Gemm);  // a kernel's column a step; the three columns of a kernel row a step
};

template <int BM, int BN, int WARPS_M, int WARPS_N, int STAGES>
constexpr Variant variant() {
    using One   = Tile<BM, BN, WARPS_M, WARPS_N, STAGES + 2, 1>;
    using Three = Tile<BM, BN, WARPS_M, WARPS_N, STAGES, 3>;
    return { BM, BN, One::THREADS, { One::SMEM, Three::SMEM }, { conv_gemm<One>, conv_gemm<Three> } };
}

enum { NARROW, MIDDLE, WIDE, TALL_MIDDLE, TALL_WIDE };
static const Variant variants[CONV_TILES] = {
    variant<128, 16, 4, 1, 4>(),   // the last convolution: 3 channels
    variant<128, 96, 2, 2, 3>(),   // 96 divides the channels of Wan's VAE
    variant<128, 128, 2, 2, 3>(),  // 98 KiB: the most that an sm_86 or sm_89 gives a block
    variant<256, 96, 4, 2, 4>(),   // 138 KiB
    variant<256, 128, 4, 2, 4>(),  // 162 KiB
};

struct Plan {
    int taps, channels, n_tiles, pixels;
    size_t bytes_a, bytes_b;
};

static Plan plan_for(const Conv & conv, const Variant & v) {
    Plan plan;
    plan.taps     = conv.kw == 3 && conv.sw == 1 && conv.sh == 1 ? 3 : 1;
    plan.channels = static_cast<int>(round_up(conv.ic, BK));
    plan.n_tiles  = (conv.oc + v.bn - 1) / v.bn;
    plan.pixels   = conv.in_w() * conv.in_h() * conv.in_d();
    plan.bytes_a  = round_up((static_cast<int64_t>(plan.pixels) + SLACK) * plan.channels * 2, CONV_ALIGN);
    plan.bytes_b  = static_cast<size_t>(plan.n_tiles) * v.bn * plan.channels * conv.kw * conv.kh * conv.kd * 2;
    return plan;
}

static const Variant & choose(const Conv & conv, int tile) {
    if (tile != CONV_TILE_AUTO) {
        return variants[tile];
    }
    if (conv.oc <= 16) {
        return variants[NARROW];
    }
    return variants[conv.oc % 128 == 0 ? WIDE : MIDDLE];
}

bool conv_supported(const Conv & conv) {
    const int positive[] = { conv.width, conv.height, conv.frames, conv.ic, conv.oc, conv.kw, conv.kh, conv.kd, conv.sw, conv.sh, conv.sd };
    const int padding[]  = { conv.left, conv.right, conv.top, conv.bottom, conv.front, conv.back, conv.cache_frames };
    if (std::any_of(std::begin(positive), std::end(positive), [](int n) { return n < 1; }) ||
        std::any_of(std::begin(padding), std::end(padding), [](int n) { return n < 0; }) || (conv.upscale != 1 && conv.upscale != 2) ||
        conv.in_w() < conv.kw || conv.in_h() < conv.kh || conv.in_d() < conv.kd || conv.oc > 32768) {
        return false;
    }
    // Indices of pixels, and of 16 bytes within a frame, are ints.
    const int64_t frame = static_cast<int64_t>(conv.in_w()) * conv.in_h();
    return frame * conv.in_d() <= INT_MAX - PACK_PIX && (frame + SLACK) * (round_up(conv.ic, BK) / 8) <= INT_MAX;
}

size_t conv_scratch(const Conv & conv) {
    size_t most = 0;
    for (const Variant & v : variants) {
        const Plan plan = plan_for(conv, v);
        most            = std::max(most, plan.bytes_a + plan.bytes_b);
    }
    return most;
}

cudaError_t conv_run(const Conv & conv, void * scratch, cudaStream_t stream, int tile) {
    if (!conv_supported(conv)) {
        return cudaErrorInvalidValue;
    }
    const Variant & v = choose(conv, tile);
    const Plan plan   = plan_for(conv, v);
    __half * a        = static_cast<__half *>(scratch);
    __half * b        = reinterpret_cast<__half *>(static_cast<char *>(scratch) + plan.bytes_a);

    const PackPictures pack = { conv, a, conv.in_w(), conv.in_h(), plan.pixels, plan.channels };
    pack_pictures<<<dim3((plan.pixels + PACK_PIX - 1) / PACK_PIX, plan.channels / BK), 256, 0, stream>>>(pack);
    pack_weight<<<dim3((plan.channels + 127) / 128, plan.n_tiles * v.bn), 128, 0, stream>>>(
        conv.weight, b, conv.ic, conv.oc, conv.kw * conv.kh * conv.kd, plan.channels, v.bn, plan.taps);

    Gemm gemm      = {};
    gemm.a         = reinterpret_cast<const uint4 *>(a);
    gemm.b         = reinterpret_cast<const uint4 *>(b);
    gemm.bias      = conv.bias;
    gemm.y         = conv.y;
    gemm.y_channel = conv.y_channel;
    gemm.y_frame   = conv.y_frame;
    gemm.in_w      = conv.in_w();
    gemm.in_h      = conv.in_h();
    gemm.pixel_16b = plan.channels / 8;
    gemm.frame_16b = static_cast<int64_t>(conv.sd) * gemm.in_w * gemm.in_h * gemm.pixel_16b;
    gemm.chunks    = plan.channels / BK;
    gemm.kd        = conv.kd;
    gemm.kh        = conv.kh;
    gemm.kw_groups = conv.kw / plan.taps;
    gemm.sw        = conv.sw;
    gemm.sh        = conv.sh;
    gemm.out_w     = conv.out_w();
    gemm.out_h     = conv.out_h();
    gemm.oc        = conv.oc;
    gemm.columns   = plan.taps > 1 ? gemm.in_w : gemm.out_w;
    gemm.m_tiles   = (gemm.out_h * gemm.columns + v.bm - 1) / v.bm;
    gemm.n_tiles   = plan.n_tiles;

    const int64_t blocks = static_cast<int64_t>(gemm.m_tiles) * gemm.n_tiles * conv.out_d();
    if (blocks > INT_MAX) {
        return cudaErrorInvalidConfiguration;
    }
    const int which         = plan.taps > 1;
    const cudaError_t error = cudaFuncSetAttribute(v.kernel[which], cudaFuncAttributeMaxDynamicSharedMemorySize, v.smem[which]);
    if (error != cudaSuccess) {
        return error;
    }
    v.kernel[which]<<<static_cast<unsigned>(blocks), v.threads, v.smem[which], stream>>>(gemm);
    return cudaGetLastError();
}

// -------------------------------------------------------------------------------------------------------------------- norm

constexpr int NORM_WARPS = 16;  // share the channels of 32 pixels

template <int N>
static __global__ void __launch_bounds__(32 * NORM_WARPS)
    channel_norm_kernel(const float * x, const float * gamma, float * y, int64_t pixels, int channels, float eps, bool silu) {
    __shared__ float sums[NORM_WARPS][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t pixel = static_cast<int64_t>(blockIdx.x) * 32 + lane;
    float value[N];
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int c = warp + i * NORM_WARPS;
        value[i]    = pixel < pixels && c < channels ? x[c * pixels + pixel] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        sum += value[i] * value[i];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    sum = 0.f;
#pragma unroll
    for (int i = 0; i < NORM_WARPS; i++) {
        sum += sums[i][lane];
    }
    const float scale = rsqrtf(sum / channels + eps);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int c = warp + i * NORM_WARPS;
        if (pixel < pixels && c < channels) {
            const float normed    = value[i] * scale * gamma[c];
            y[c * pixels + pixel] = silu ? normed / (1.f + expf(-normed)) : normed;
        }
    }
}

cudaError_t channel_norm(const float * x, const float * gamma, float * y, int64_t pixels, int channels, float eps, bool silu,
                         cudaStream_t stream) {
    const int64_t blocks = (pixels + 31) / 32;
    if (pixels < 1 || channels < 1 || channels > CHANNEL_NORM_MAX || blocks > INT_MAX) {
        return cudaErrorInvalidValue;
    }
    const int each    = (channels + NORM_WARPS - 1) / NORM_WARPS;
    const auto kernel = each <= 6    ? channel_norm_kernel<6>
                        : each <= 12 ? channel_norm_kernel<12>
                        : each <= 24 ? channel_norm_kernel<24>
                        : each <= 40 ? channel_norm_kernel<40>
                                     : channel_norm_kernel<64>;
    kernel<<<static_cast<unsigned>(blocks), 32 * NORM_WARPS, 0, stream>>>(x, gamma, y, pixels, channels, eps, silu);
    return cudaGetLastError();
}

}  // namespace sdsage
