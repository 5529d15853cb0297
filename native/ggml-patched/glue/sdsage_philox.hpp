// Normal random numbers from Philox 4x32-10: the same numbers for the same seed on every device.
//
// The generator is that of J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11): ten rounds turn a
// counter of 4 words and a key of 2 words into 4 random words. Counter and Box-Muller transform are used as cuRAND documents
// them: element i of draw d has the counter (d, 0, i, 0), the seed is the key, and two words make one normal number.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "rng.hpp"

namespace sdsage {

using Words4 = std::array<uint32_t, 4>;
using Words2 = std::array<uint32_t, 2>;

inline Words4 philox4x32_10(Words4 counter, Words2 key) {
    constexpr uint64_t M0 = 0xD2511F53, M1 = 0xCD9E8D57;  // multipliers and Weyl increments of the paper
    constexpr uint32_t W0 = 0x9E3779B9, W1 = 0xBB67AE85;
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = M0 * counter[0], p1 = M1 * counter[2];
        counter = { static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(p1),
                    static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(p0) };
        key[0] += W0;
        key[1] += W1;
    }
    return counter;
}

// Box-Muller: two words to one standard normal number. The half steps keep the logarithm's argument above 0. What is float
// and what double decides the last bit, and pictures of a seed should not change with it.
inline float normal_of(uint32_t a, uint32_t b) {
    constexpr float step = 2.3283064e-10f;  // 2^-32
    constexpr float turn = 2.3283064e-10f * 6.2831855f;
    const float u        = static_cast<float>(a) * step + step / 2;
    const float v        = static_cast<float>(b) * turn + turn / 2;
    const float radius   = static_cast<float>(std::sqrt(-2.0 * std::log(static_cast<double>(u))));
    return static_cast<float>(static_cast<double>(radius) * std::sin(static_cast<double>(v)));
}

}  // namespace sdsage

// Upstream's name: stable-diffusion.cpp makes it for --rng cuda.
class PhiloxRNG : public RNG {
  public:
    explicit PhiloxRNG(uint64_t seed = 0) { manual_seed(seed); }

    void manual_seed(uint64_t seed) override {
        key  = { static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32) };
        draw = 0;
    }

    // n numbers; the next call gives others.
    std::vector<float> randn(uint32_t n) override {
        std::vector<float> numbers(n);
        for (uint32_t i = 0; i < n; i++) {
            const auto words = sdsage::philox4x32_10({ draw, 0, i, 0 }, key);
            numbers[i]       = sdsage::normal_of(words[0], words[1]);
        }
        draw++;
        return numbers;
    }

  private:
    sdsage::Words2 key{};
    uint32_t draw = 0;
};
