// Rotary embeddings that were asked for before: a model's graph is built for every step, and for a video its table of sines and cosines
// took longer than everything else that the CPU does between two steps.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <tuple>
#include <vector>

namespace sdsage {

// The table for these positions: the last one that was made if nothing is different, else `make()`.
template <class Make>
std::vector<float> known_embedding(const std::vector<std::vector<float>> & ids, int batch, const std::vector<float> & thetas,
                                   const std::vector<int> & dims, const std::vector<std::vector<int>> & wraps, int layout, Make make) {
    using Key = std::tuple<std::vector<std::vector<float>>, int, std::vector<float>, std::vector<int>, std::vector<std::vector<int>>, int>;
    static std::mutex lock;
    static Key key;
    static std::vector<float> table;
    std::lock_guard<std::mutex> hold(lock);
    if (table.empty() || std::tie(ids, batch, thetas, dims, wraps, layout) != key) {
        table = make();
        key   = Key(ids, batch, thetas, dims, wraps, layout);
    }
    return table;
}

// Whether a value is not the one that was asked about before.
template <class Value>
class Changed {
  public:
    bool to(const Value & value) {
        const bool changed = !known_ || value != value_;
        known_             = true;
        value_             = value;
        return changed;
    }

  private:
    bool known_ = false;
    Value value_{};
};

}  // namespace sdsage
