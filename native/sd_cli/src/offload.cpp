// See sdsage_offload.hpp.
#include "sdsage_offload.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <system_error>

#include "util.h"

namespace sdsage {

namespace {

constexpr size_t PIECE   = 4 << 20;          // bytes: 0.1 ms on a fast bus, long enough to hide what starting a copy costs
constexpr int WORKERS    = 8;                // each copies 8 to 12 GB/s in memory; PCIe 5.0 with 16 lanes takes 55
constexpr int SLOTS      = 2;                // of a worker: one is filled while the other one is fetched
constexpr size_t RESERVE = size_t(1) << 30;  // bytes of the device for what a library may still ask for

using Clock = std::chrono::steady_clock;

}  // namespace

struct CopyLane {
    ggml_backend_t backend       = nullptr;  // a second one of the device: its stream does not wait for what is computed
    ggml_backend_buffer_t pinned = nullptr;
    std::mutex issuing;
    std::mutex slots[WORKERS];  // of two runners that copy at once the second waits for the slots of the first

    ~CopyLane() {
        if (pinned != nullptr) {
            ggml_backend_buffer_free(pinned);
        }
        if (backend != nullptr) {
            ggml_backend_free(backend);
        }
    }
};

namespace {

// The lane to a device, or why there is none.
std::shared_ptr<CopyLane> lane_to(ggml_backend_dev_t dev, const char ** why) {
    static std::mutex mutex;
    static std::map<ggml_backend_dev_t, std::weak_ptr<CopyLane>> lanes;
    std::lock_guard<std::mutex> lock(mutex);
    if (auto lane = lanes[dev].lock()) {
        return lane;
    }
    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(dev, &props);
    // Others may have these abilities as well, but were not tried.
    if (std::strncmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), "CUDA", 4) != 0) {
        *why = "this backend is not CUDA";
        return nullptr;
    }
    ggml_backend_buffer_type_t type = ggml_backend_dev_host_buffer_type(dev);
    if (!props.caps.async || !props.caps.events || !props.caps.host_buffer || type == nullptr) {
        *why = "it is switched off (GGML_CUDA_NO_PINNED), or this build has none";
        return nullptr;
    }
    auto lane    = std::make_shared<CopyLane>();
    lane->pinned = ggml_backend_buft_alloc_buffer(type, WORKERS * SLOTS * PIECE);
    if (lane->pinned == nullptr || ggml_backend_buffer_get_type(lane->pinned) != type) {  // ggml falls back to ordinary memory
        *why = "the system has none to give";
        return nullptr;
    }
    lane->backend = ggml_backend_dev_init(dev, nullptr);
    if (lane->backend == nullptr) {
        *why = "the device gives no second stream";
        return nullptr;
    }
    lanes[dev] = lane;
    return lane;
}

}  // namespace

ParamCopy::~ParamCopy() {
    stop();
    if (freeing_.joinable()) {
        freeing_.join();
    }
}

ParamCopy::Pairs ParamCopy::pairs_of(ggml_context * from, ggml_context * to) {
    Pairs pairs;
    ggml_tensor * b = ggml_get_first_tensor(to);
    for (ggml_tensor * a = ggml_get_first_tensor(from); a != nullptr && b != nullptr; a = ggml_get_next_tensor(from, a)) {
        pairs.emplace_back(a, b);
        b = ggml_get_next_tensor(to, b);
    }
    return pairs;
}

void ParamCopy::begin(const Pairs & pairs, ggml_backend_t to, const std::string & runner) {
    finish();
    runner_ = runner;
    bytes_  = 0;
    pieces_.clear();
    next_     = 0;
    taken_us_ = 0;
    start_    = Clock::now();
    for (const auto & [from, target] : pairs) {
        const size_t size = ggml_nbytes(from);
        for (size_t at = 0; at < size; at += PIECE) {
            pieces_.push_back({ static_cast<const char *>(from->data) + at, target, at, std::min(PIECE, size - at) });
        }
        bytes_ += size;
    }
    const char * why = nullptr;
    if (lane_ == nullptr) {
        lane_ = lane_to(ggml_backend_get_device(to), &why);
    }
    if (lane_ == nullptr) {
        copy_plainly(pairs, why);
        return;
    }
    const int cores   = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    const int workers = std::min({ WORKERS, cores, static_cast<int>(pieces_.size()) });
    workers_.reserve(workers);
    try {
        for (int i = 0; i < workers; i++) {
            workers_.emplace_back([this, i] { work(i); });
        }
    } catch (const std::system_error &) {  // the system gives no more threads: those that there are do it
        if (workers_.empty()) {
            work(0);
        }
    }
}

void ParamCopy::join() {
    for (std::thread & worker : workers_) {
        worker.join();
    }
    workers_.clear();
}

void ParamCopy::stop() {
    next_ = pieces_.size();
    join();
}

void ParamCopy::copy_plainly(const Pairs & pairs, const char * why) {
    static std::atomic<int> copies{ 0 };
    for (const auto & [from, to] : pairs) {
        ggml_backend_tensor_copy(from, to);
    }
    const double seconds   = std::chrono::duration<double>(Clock::now() - start_).count();
    const int count        = ++copies;
    const std::string text = sd_format("%s: %.0f MB copied without pinned memory, at %.1f GB/s: %s (copy %d of this kind)", runner_.c_str(),
                                       bytes_ / 1048576.0, bytes_ / 1e9 / seconds, why, count);
    if (count == 1) {
        LOG_WARN("%s", text.c_str());
    } else {
        LOG_DEBUG("%s", text.c_str());
    }
}

void ParamCopy::work(int worker) {
    std::lock_guard<std::mutex> mine(lane_->slots[worker]);
    ggml_backend_dev_t dev = ggml_backend_get_device(lane_->backend);
    ggml_backend_event_t fetched[SLOTS];
    for (auto & event : fetched) {
        event = ggml_backend_event_new(dev);  // this makes the device the current one of this thread, too
    }
    char * memory = static_cast<char *>(ggml_backend_buffer_get_base(lane_->pinned)) + worker * SLOTS * PIECE;
    for (int turn = 0;; turn++) {
        const size_t i = next_.fetch_add(1);
        if (i >= pieces_.size()) {
            break;
        }
        const Piece & piece = pieces_[i];
        const int slot      = turn % SLOTS;
        if (turn >= SLOTS) {
            ggml_backend_event_synchronize(fetched[slot]);
        }
        std::memcpy(memory + slot * PIECE, piece.from, piece.size);
        std::lock_guard<std::mutex> lock(lane_->issuing);
        ggml_backend_tensor_set_async(lane_->backend, piece.to, memory + slot * PIECE, piece.offset, piece.size);
        ggml_backend_event_record(fetched[slot], lane_->backend);
    }
    for (auto & event : fetched) {
        ggml_backend_event_synchronize(event);  // at once where it was never recorded
        ggml_backend_event_free(event);
    }
    const int64_t us = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start_).count();
    for (int64_t seen = taken_us_; seen < us && !taken_us_.compare_exchange_weak(seen, us);) {
    }
}

void ParamCopy::finish() {
    if (workers_.empty()) {
        return;
    }
    const auto asked     = Clock::now();
    const size_t threads = workers_.size();
    join();
    LOG_DEBUG("%s: %.0f MB copied through pinned memory at %.1f GB/s by %zu threads, %.0f ms were waited for", runner_.c_str(),
              bytes_ / 1048576.0, bytes_ / 1e3 / std::max<int64_t>(1, taken_us_), threads,
              std::chrono::duration<double, std::milli>(Clock::now() - asked).count());
}

void ParamCopy::free(ggml_backend_buffer_t params, bool on_host) {
    finish();
    if (!on_host) {
        ggml_backend_buffer_free(params);
        return;
    }
    if (freeing_.joinable()) {
        freeing_.join();
    }
    freeing_ = std::thread([params] { ggml_backend_buffer_free(params); });
}

bool has_room(ggml_backend_t backend, size_t bytes) {
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(ggml_backend_get_device(backend), &free, &total);
    return free >= bytes + RESERVE;
}

}  // namespace sdsage
