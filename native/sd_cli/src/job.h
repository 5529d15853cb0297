// The job that this process is running, and what is known of the last one of a thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "sdsage.h"
#include "sdsage_seam.hpp"

namespace sdsage {

struct Latents {
    std::vector<float> data;
    std::vector<int64_t> shape;
};

// How often something was computed in a part of the model: attention by a kernel, or what a lever takes.
struct Count {
    const char * module;  // static
    std::string by;
    std::string why;  // why not in the way that was asked for
    int64_t calls;
};

// Outcome of the last job of a thread.
struct Outcome {
    sdsage_status_t status = SDSAGE_OK;
    std::string error;
    int step               = 0;
    sdsage_expert_t expert = SDSAGE_EXPERT_ONLY;
    std::vector<Latents> latents;
    std::vector<Count> attention, levers;
    int tile = 0;  // decoding at once failed, and it was done in tiles of this many latent pixels
};

// What a thread set for its next job.
struct Request {
    bool keep                        = false;    // the final latents
    const sdsage_answer_t * recorded = nullptr;  // answers of the model, in the order of its calls
    int recorded_count               = 0;
    bool copies_ahead                = true;  // a second expert while the first one computes
    bool decodes_only                = false;
    std::string version;  // of the latents that a context decodes
};

Outcome & last_outcome();  // of this thread
Request & next_request();  // of this thread

// One native job. The constructor waits until no other job runs; the destructor files the outcome.
class Job {
  public:
    Job();
    ~Job();
    Job(const Job &)             = delete;
    Job & operator=(const Job &) = delete;

    // Call when the body returned: `ok` is its own verdict. True if the job did not fail otherwise either.
    bool finish(bool ok);
    void finish_exception(const std::string & what);
};

void request_cancel();
void set_event_callback(sdsage_event_cb_t cb, void * data);
void set_answer_callback(sdsage_answer_cb_t cb, void * data);
void set_latents_callback(sdsage_latents_cb_t cb, void * data);

}  // namespace sdsage
