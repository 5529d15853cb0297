// Threads that log at once: every line must arrive whole. Prints "N whole lines", or the first broken one.
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "util.h"

namespace {

constexpr int THREADS = 8, LINES = 2000;
std::mutex lock;
int whole = 0;
std::string broken;

void on_log(sd_log_level_t, const char * text, void *) {
    const std::string line(text);
    const size_t at     = line.find("thread ");
    const bool is_whole = at != std::string::npos && line.size() > 200 && line.back() == '\n' &&
                          line.find_first_not_of(line[at + 7], at + 8) == line.size() - 1;
    std::lock_guard<std::mutex> guard(lock);
    whole += is_whole;
    if (!is_whole && broken.empty()) {
        broken = line;
    }
}

}  // namespace

int main() {
    sd_set_log_callback(on_log, nullptr);
    std::vector<std::thread> threads;
    for (int i = 0; i < THREADS; i++) {
        threads.emplace_back([i] {
            const std::string mine(200 + i, static_cast<char>('a' + i));
            for (int n = 0; n < LINES; n++) {
                LOG_DEBUG("thread %s", mine.c_str());
            }
        });
    }
    for (std::thread & t : threads) {
        t.join();
    }
    if (whole != THREADS * LINES) {
        std::printf("broken: %s\n", broken.c_str());
        return 1;
    }
    std::printf("%d whole lines\n", whole);
    return 0;
}
