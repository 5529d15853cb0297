#include "job.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "util.h"

namespace sdsage {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

struct StageState {
    Stage stage;
    Expert expert;
    int steps;
    int step      = 0;        // step that is being computed
    bool replayed = false;    // an answer of this step was a recorded one: its time says nothing
    Clock::time_point begun;  // of the stage
    Clock::time_point step_begun;
};

// State of the job that holds `turn`. Only `cancel`, `error` and `failed` are touched by other threads.
struct State {
    std::vector<StageState> stages;  // nested: a hires pass decodes inside, say
    std::atomic<bool> cancel{ false };
    std::atomic<bool> failed{ false };
    sdsage_status_t status = SDSAGE_OK;
    int steps_before       = 0;  // of the sampling stages that are over: steps count over both experts
    int bad_step           = 0;
    Expert bad_expert      = Expert::only;
    Request request;
    int calls = 0;  // of the diffusion models, in all stages
    int tile  = 0;
    std::vector<Latents> latents;
    std::vector<Count> attention, levers;
    std::mutex error_lock;
    std::vector<std::string> errors;
};

std::mutex turn;          // held by the running job
std::mutex current_lock;  // guards `current`
State * current = nullptr;
std::atomic<sdsage_event_cb_t> event_cb{ nullptr };
std::atomic<void *> event_data{ nullptr };
std::atomic<sdsage_answer_cb_t> answer_cb{ nullptr };
std::atomic<void *> answer_data{ nullptr };
std::atomic<sdsage_latents_cb_t> latents_cb{ nullptr };
std::atomic<void *> latents_data{ nullptr };

sdsage_expert_t to_c(Expert e) { return static_cast<sdsage_expert_t>(e); }

void send(sdsage_event_kind_t kind, const StageState & s, int step, double seconds) {
    if (auto cb = event_cb.load()) {
        const sdsage_event_t e = { kind, static_cast<sdsage_stage_t>(s.stage), to_c(s.expert), step, s.steps, seconds };
        cb(&e, event_data.load());
    }
}

const char * expert_name(Expert e) {
    return e == Expert::high_noise ? "the high-noise expert" : e == Expert::low_noise ? "the low-noise expert" : "the model";
}

const char * module_name(Expert e) { return e == Expert::high_noise ? "high-noise" : e == Expert::low_noise ? "low-noise" : "diffusion"; }

// "fp8 240, flash 2 (its mask is not one number per key)"
std::string text_of(const std::vector<Count> & counts, const char * module) {
    std::string text;
    for (const Count & a : counts) {
        if (std::strcmp(a.module, module) == 0) {
            text += (text.empty() ? "" : ", ") + a.by + " " + std::to_string(a.calls) + (a.why.empty() ? "" : " (" + a.why + ")");
        }
    }
    return text;
}

void stop_non_finite(StageState & s, int step) {
    current->status     = SDSAGE_NON_FINITE;
    current->bad_step   = current->steps_before + step;
    current->bad_expert = s.expert;
    fail("latents are not finite after step " + std::to_string(current->bad_step) + " in " + expert_name(s.expert) +
         " (attention: " + text_of(current->attention, module_name(s.expert)) +
         "); a weight type with more range, another attention or a lower cfg-scale may help");
}

// A step is over when the next one begins or the stage ends: samplers of higher order evaluate a step more than once.
void close_step(StageState & s) {
    if (s.step > 0) {
        send(s.replayed ? SDSAGE_EVENT_REPLAYED : SDSAGE_EVENT_STEP, s, s.step, s.replayed ? 0.0 : since(s.step_begun));
        s.step     = 0;
        s.replayed = false;
    }
}

std::string joined(const std::vector<std::string> & lines) {
    constexpr size_t shown = 3;
    std::string text;
    for (size_t i = 0; i < lines.size() && i < shown; i++) {
        text += (i ? "; " : "") + lines[i];
    }
    if (lines.size() > shown) {
        text += "; and " + std::to_string(lines.size() - shown) + " more errors";
    }
    return text;
}

}  // namespace

Outcome & last_outcome() {
    static thread_local Outcome outcome;
    return outcome;
}

Request & next_request() {
    static thread_local Request request;
    return request;
}

Job::Job() {
    turn.lock();
    std::lock_guard<std::mutex> lock(current_lock);
    current          = new State;
    current->request = std::exchange(next_request(), {});
    last_outcome()   = {};
}

Job::~Job() {
    std::lock_guard<std::mutex> lock(current_lock);
    Outcome & o = last_outcome();
    o.status    = current->status;
    o.error     = joined(current->errors);
    o.step      = current->bad_step;
    o.expert    = to_c(current->bad_expert);
    o.latents   = std::move(current->latents);
    o.attention = std::move(current->attention);
    o.levers    = std::move(current->levers);
    o.tile      = current->tile;
    delete current;
    current = nullptr;
    turn.unlock();
}

bool Job::finish(bool ok) {
    for (Expert e : { Expert::high_noise, Expert::low_noise, Expert::only }) {
        const std::string attention = text_of(current->attention, module_name(e)), levers = text_of(current->levers, module_name(e));
        if (!attention.empty()) {
            LOG_INFO("attention in %s: %s", expert_name(e), attention.c_str());
        }
        if (!levers.empty()) {
            LOG_INFO("levers in %s: %s", expert_name(e), levers.c_str());
        }
    }
    std::lock_guard<std::mutex> lock(current->error_lock);
    if (ok && !current->failed) {
        current->errors.clear();  // the log had them; they stopped nothing
        return true;
    }
    if (current->status == SDSAGE_OK) {
        const bool cancelled = current->cancel;
        current->status      = cancelled ? SDSAGE_CANCELLED : SDSAGE_FAILED;
        if (cancelled) {
            current->errors = { "cancelled" };
        } else if (current->errors.empty()) {
            current->errors = { "the engine gave no reason" };
        }
    }
    return false;
}

void Job::finish_exception(const std::string & what) {
    current->status = SDSAGE_EXCEPTION;
    std::lock_guard<std::mutex> lock(current->error_lock);
    current->errors.insert(current->errors.begin(), what);
}

void request_cancel() {
    std::lock_guard<std::mutex> lock(current_lock);
    if (current != nullptr) {
        current->cancel = true;
    }
}

void set_event_callback(sdsage_event_cb_t cb, void * data) {
    event_data = data;
    event_cb   = cb;
}

void set_answer_callback(sdsage_answer_cb_t cb, void * data) {
    answer_data = data;
    answer_cb   = cb;
}

void set_latents_callback(sdsage_latents_cb_t cb, void * data) {
    latents_data = data;
    latents_cb   = cb;
}

// ---- what the pipeline calls (sdsage_seam.hpp); nothing of it runs outside a job but note_log

void stage_begin(Stage stage, Expert expert, int steps) {
    current->stages.push_back({ stage, expert, steps, 0, false, Clock::now(), Clock::now() });
    send(SDSAGE_EVENT_BEGIN, current->stages.back(), 0, 0.0);
}

void stage_end() {
    StageState & s = current->stages.back();
    close_step(s);
    if (s.stage == Stage::sample) {
        current->steps_before += s.steps;
    }
    send(SDSAGE_EVENT_END, s, 0, since(s.begun));
    current->stages.pop_back();
}

bool step_begin(int step, bool finite) {
    StageState & s = current->stages.back();
    const int n    = std::abs(step);  // upstream counts the second evaluation of a step negatively
    if (!finite) {
        stop_non_finite(s, n > 1 ? n - 1 : 1);
        return false;
    }
    if (current->cancel || current->failed) {
        s.step = 0;
        return false;
    }
    if (n != s.step) {
        close_step(s);
        s.step       = n;
        s.step_begun = Clock::now();
    }
    return true;
}

bool step_end(int step, bool finite) {
    StageState & s = current->stages.back();
    if (!finite) {
        stop_non_finite(s, std::abs(step));
        s.step = 0;
        return false;
    }
    return !current->cancel;
}

void fail(const std::string & why) {
    std::lock_guard<std::mutex> lock(current->error_lock);
    current->failed = true;
    current->errors.insert(current->errors.begin(), why);
}

void reject(const std::string & why) {
    current->status = SDSAGE_BAD_REQUEST;
    fail(why);
}

void sage_unavailable(const std::string & why) {
    current->status = SDSAGE_SAGE_UNAVAILABLE;
    fail(why);
}

bool cancelled() { return current != nullptr && current->cancel; }

bool failed() { return current->failed; }

bool stop_graph(void *) { return cancelled() && !current->stages.empty() && current->stages.back().stage == Stage::decode; }

bool note_log(int level, const char * text) {
    if (level != SD_LOG_ERROR) {
        return true;
    }
    std::string line(text);
    const size_t dash = line.find(" - ");  // upstream puts "file:line - " in front
    if (dash != std::string::npos && dash < 64) {
        line.erase(0, dash + 3);
    }
    while (!line.empty() && (line.back() == '\n' || line.back() == ' ')) {
        line.pop_back();
    }
    std::lock_guard<std::mutex> job(current_lock);
    if (current == nullptr) {  // a line outside every job has no owner
        return true;
    }
    std::lock_guard<std::mutex> lock(current->error_lock);
    current->errors.push_back(line);
    return !current->cancel;
}

Part part_of_stage() {
    switch (current == nullptr || current->stages.empty() ? Stage::decode : current->stages.back().stage) {
        case Stage::encode_text:
            return Part::text_encoder;
        case Stage::encode_image:
            return Part::image_encoder;
        default:  // also a preview among the steps, and the pictures of a hires pass
            return Part::vae;
    }
}

static const char * module_of(Part part) {
    switch (part) {
        case Part::text_encoder:
            return "text encoder";
        case Part::image_encoder:
            return "picture encoder";
        case Part::vae:
            return "VAE";
        case Part::control_net:
            return "ControlNet";
        case Part::diffusion:
            break;
    }
    const char * module = "diffusion";
    for (const StageState & s : current->stages) {
        module = s.stage == Stage::sample ? module_name(s.expert) : module;
    }
    return module;
}

static void note(std::vector<Count> State::* counts, Part part, const char * by, const char * why) {
    if (current == nullptr) {
        return;
    }
    const char * module = module_of(part);
    for (Count & a : current->*counts) {
        if (std::strcmp(a.module, module) == 0 && a.by == by && a.why == why) {
            a.calls++;
            return;
        }
    }
    (current->*counts).push_back({ module, by, why, 1 });
}

void note_attention(Part part, const char * kernel, const char * why) { note(&State::attention, part, kernel, why); }

void note_lever(Part part, const char * lever, const char * why) { note(&State::levers, part, lever, why); }

const float * recorded_answer(const std::vector<int64_t> & shape, float sigma, int step) {
    const int call    = current->calls++;
    const Request & r = current->request;
    if (call >= r.recorded_count) {
        return nullptr;
    }
    const sdsage_answer_t & a = r.recorded[call];
    const bool same_shape     = a.latents.n_dims == static_cast<int>(shape.size()) && std::equal(shape.begin(), shape.end(), a.latents.ne);
    if (!same_shape || a.sigma != sigma || a.step != step) {
        reject("the recorded answers do not belong to this job: call " + std::to_string(call + 1) + " of the model is at step " +
               std::to_string(step) + " with sigma " + std::to_string(sigma) + ", the recorded one at step " + std::to_string(a.step) +
               " with sigma " + std::to_string(a.sigma) + (same_shape ? "" : " and of another size"));
        return nullptr;
    }
    current->stages.back().replayed = true;
    return a.latents.data;
}

static sdsage_latents_t to_c(const float * data, const std::vector<int64_t> & shape) {
    sdsage_latents_t latents = {};
    latents.data             = const_cast<float *>(data);
    latents.n_dims           = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), latents.ne);
    return latents;
}

void give_answer(const float * data, const std::vector<int64_t> & shape, float sigma, int step) {
    if (auto cb = answer_cb.load()) {
        const sdsage_answer_t answer = { to_c(data, shape), sigma, step };
        cb(&answer, answer_data.load());
    }
}

void give_latents(const float * data, const std::vector<int64_t> & shape, int index) {
    if (auto cb = latents_cb.load()) {
        const sdsage_latents_t latents = to_c(data, shape);
        cb(&latents, index, latents_data.load());
    }
    if (current->request.keep) {
        int64_t n = 1;
        for (int64_t d : shape) {
            n *= d;
        }
        current->latents.push_back({ std::vector<float>(data, data + n), shape });
    }
}

bool retry_in_tiles(const std::string & why, int tile) {
    if (current->cancel || current->failed) {
        return false;
    }
    std::string reason = why;
    {
        std::lock_guard<std::mutex> lock(current->error_lock);
        for (const std::string & line : current->errors) {  // the first of several: what could not be allocated
            if (line.find("allocate") != std::string::npos) {
                reason = line;
                break;
            }
        }
    }
    LOG_WARN("decoding failed (%s): trying again in tiles of %dx%d latent pixels", reason.c_str(), tile, tile);
    current->tile = tile;
    return true;
}

bool copies_ahead() { return current->request.copies_ahead; }

bool decodes_only() { return current->request.decodes_only; }

const std::string & decoded_version() { return current->request.version; }

}  // namespace sdsage
