// GPU time by kernel of any CUDA program that loads this library through CUDA_INJECTION64_PATH.
//
//   g++ -O2 -std=c++17 -shared -fPIC kernel_times.cpp -I CUDA/include -o libkernel_times.so /path/libcupti.so.13
//   CUDA_INJECTION64_PATH=libkernel_times.so KERNEL_TIMES=out.tsv program
//
// Writes one line per kernel or copy when the program ends: begin and end in ns of CLOCK_REALTIME, and the name. The times
// split by phase with any log that has time stamps.
#include <cuda.h>
#include <cupti.h>
#include <cxxabi.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

namespace {

#if CUPTI_API_VERSION >= 130000
using Kernel = CUpti_ActivityKernel10;
using Copy   = CUpti_ActivityMemcpy6;
#else
using Kernel = CUpti_ActivityKernel9;
using Copy   = CUpti_ActivityMemcpy5;
#endif

struct Span {
    uint64_t begin, end;
    std::string name;
};

std::mutex lock;
std::vector<Span> spans;
size_t dropped = 0;

std::string readable(const char * name) {
    int failed = 0;
    char * text = abi::__cxa_demangle(name, nullptr, nullptr, &failed);
    std::string result = failed == 0 ? text : name;
    std::free(text);
    result = result.rfind("void ", 0) == 0 ? result.substr(5) : result;
    // without the parameters: the first parenthesis outside of < >
    int depth = 0;
    for (size_t i = 0; i < result.size(); i++) {
        depth += result[i] == '<' ? 1 : result[i] == '>' ? -1 : 0;
        if (result[i] == '(' && depth == 0 && i > 0 && result.compare(i, 10, "(anonymous") != 0) {
            return result.substr(0, i);
        }
    }
    return result;
}

void CUPTIAPI give_buffer(uint8_t ** buffer, size_t * size, size_t * records) {
    *size    = 8u << 20;
    *buffer  = static_cast<uint8_t *>(std::aligned_alloc(8, *size));
    *records = 0;
}

void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t * buffer, size_t, size_t valid) {
    std::lock_guard<std::mutex> hold(lock);
    CUpti_Activity * record = nullptr;
    while (valid > 0 && cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            const auto * k = reinterpret_cast<const Kernel *>(record);
            spans.push_back({ k->start, k->end, readable(k->name) });
        } else if (record->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            const auto * c = reinterpret_cast<const Copy *>(record);
            spans.push_back({ c->start, c->end, "memcpy" });
        }
    }
    size_t more = 0;
    cuptiActivityGetNumDroppedRecords(context, stream, &more);
    dropped += more;
    std::free(buffer);
}

void report() {
    cuptiActivityFlushAll(1);
    std::lock_guard<std::mutex> hold(lock);
    const char * path = std::getenv("KERNEL_TIMES");
    std::FILE * file  = std::fopen(path ? path : "kernel_times.tsv", "w");
    if (file == nullptr) {
        return;
    }
    for (const Span & s : spans) {
        std::fprintf(file, "%llu\t%llu\t%s\n", (unsigned long long)s.begin, (unsigned long long)s.end, s.name.c_str());
    }
    std::fclose(file);
    if (dropped > 0) {
        std::fprintf(stderr, "kernel_times: %zu records were dropped\n", dropped);
    }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjection(void) {
    const bool ok = cuptiActivityRegisterCallbacks(give_buffer, take_buffer) == CUPTI_SUCCESS &&
                    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) == CUPTI_SUCCESS &&
                    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY) == CUPTI_SUCCESS;
    if (!ok) {
        std::fprintf(stderr, "kernel_times: CUPTI does not collect\n");
    }
    std::atexit(report);
    return 1;
}
