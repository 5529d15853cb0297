// Parameters that wait in the host's memory (--offload-to-cpu) and are copied to the device that computes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ggml-backend.h"
#include "ggml.h"

namespace sdsage {

struct CopyLane;

// The copies of one runner. Threads put pieces of the parameters into a ring of pinned memory, from which the device fetches them:
// as fast as from parameters that are all pinned, but nothing is taken from the system and loading does not wait for pinning.
class ParamCopy {
  public:
    using Pairs = std::vector<std::pair<ggml_tensor *, ggml_tensor *>>;

    ParamCopy() = default;
    ~ParamCopy();
    ParamCopy(const ParamCopy &)             = delete;
    ParamCopy & operator=(const ParamCopy &) = delete;

    // Starts to copy the data of each first tensor to its second, beside what the device computes. Both stay as they are until
    // finish() returns; then all data is there.
    void begin(const Pairs & pairs, ggml_backend_t to, const std::string & runner);
    void finish();
    void stop();  // what was not copied yet will not be: nobody wants it

    // Frees parameters that were copied. Of the host's memory that takes as long as copying it, so the caller does not wait.
    void free(ggml_backend_buffer_t params, bool on_host);

    static Pairs pairs_of(ggml_context * from, ggml_context * to);

  private:
    struct Piece {
        const char * from;
        ggml_tensor * to;
        size_t offset, size;
    };
    void work(int worker);
    void join();
    void copy_plainly(const Pairs & pairs, const char * why);

    std::shared_ptr<CopyLane> lane_;  // kept, so that it is there for the next copy
    std::vector<Piece> pieces_;
    std::atomic<size_t> next_{ 0 };
    std::vector<std::thread> workers_;
    std::thread freeing_;
    std::string runner_;
    size_t bytes_ = 0;
    std::chrono::steady_clock::time_point start_;
    std::atomic<int64_t> taken_us_{ 0 };
};

// Whether parameters can lie on the device beside all that is there now.
bool has_room(ggml_backend_t backend, size_t bytes);

}  // namespace sdsage
