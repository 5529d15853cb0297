// A device of ggml's type "GPU" whose memory is the host's and whose arithmetic is that of ggml's CPU backend: what the engine does
// for GPUs alone, here without one. Copies that are asynchronous run in a thread of their own, late. For tests only.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "ggml-backend-impl.h"
#include "sdsage_test.h"

namespace {

bool pins             = true;
size_t size_of_device = 0;
std::atomic<size_t> used{ 0 }, peak{ 0 };
std::atomic<int> late_copies{ 0 };

ggml_backend_dev_t cpu() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

// ---- what runs beside the caller

class Stream {
  public:
    Stream() : thread_([this] { run(); }) {}
    ~Stream() {
        push([this] { ended_ = true; });
        thread_.join();
    }
    void push(std::function<void()> task) {
        std::lock_guard<std::mutex> lock(mutex_);
        tasks_.push_back(std::move(task));
        more_.notify_all();
    }

  private:
    void run() {
        while (!ended_) {
            std::unique_lock<std::mutex> lock(mutex_);
            more_.wait(lock, [this] { return !tasks_.empty(); });
            auto task = std::move(tasks_.front());
            tasks_.pop_front();
            lock.unlock();
            task();
        }
    }
    std::mutex mutex_;
    std::condition_variable more_;
    std::deque<std::function<void()>> tasks_;
    bool ended_ = false;
    std::thread thread_;
};

struct Event {
    std::mutex mutex;
    std::condition_variable changed;
    int recorded = 0, reached = 0;
};

// ---- memory

void free_device(ggml_backend_buffer_t buffer) {
    used -= buffer->size;
    std::free(buffer->context);
}

void * base_of(ggml_backend_buffer_t buffer) { return buffer->context; }

void memset_tensor(ggml_backend_buffer_t, ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
    std::memset(static_cast<char *>(t->data) + offset, value, size);
}

void set_tensor(ggml_backend_buffer_t, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    std::memcpy(static_cast<char *>(t->data) + offset, data, size);
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    std::memcpy(data, static_cast<const char *>(t->data) + offset, size);
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) { std::memset(buffer->context, value, buffer->size); }

ggml_backend_buffer_t alloc_device(ggml_backend_buffer_type_t type, size_t size) {
    if (used + size > size_of_device) {
        return nullptr;
    }
    const size_t now = used += size;
    for (size_t seen = peak; seen < now && !peak.compare_exchange_weak(seen, now);) {
    }
    void * memory = std::aligned_alloc(128, (size + 127) / 128 * 128);
    std::memset(memory, 0xff, size);  // NaN
    const ggml_backend_buffer_i iface = { free_device, base_of, nullptr, memset_tensor, set_tensor, get_tensor, nullptr, clear, nullptr };
    return ggml_backend_buffer_init(type, iface, memory, size);
}

void free_pinned(ggml_backend_buffer_t buffer) { std::free(buffer->context); }

ggml_backend_buffer_t alloc_pinned(ggml_backend_buffer_type_t type, size_t size) {
    if (!pins) {  // as ggml's CUDA backend
        return ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    }
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(std::aligned_alloc(128, (size + 127) / 128 * 128), size);
    buffer->buft                 = type;
    buffer->iface.free_buffer    = free_pinned;
    return buffer;
}

size_t alignment(ggml_backend_buffer_type_t) { return 128; }

bool is_host(ggml_backend_buffer_type_t) { return true; }

extern ggml_backend_device device;

ggml_backend_buffer_type_t device_type(ggml_backend_dev_t) {
    static ggml_backend_buffer_type type = {
        { [](ggml_backend_buffer_type_t) { return "Test"; }, alloc_device, alignment, nullptr, nullptr, nullptr }, &device, nullptr
    };
    return &type;
}

ggml_backend_buffer_type_t pinned_type(ggml_backend_dev_t) {
    static ggml_backend_buffer_type type = {
        { [](ggml_backend_buffer_type_t) { return "Test_Host"; }, alloc_pinned, alignment, nullptr, nullptr, is_host }, &device, nullptr
    };
    return &type;
}

// ---- backend

struct Context {
    ggml_backend_t cpu;
    Stream stream;
};

Context & context_of(ggml_backend_t backend) { return *static_cast<Context *>(backend->context); }

void free_backend(ggml_backend_t backend) {
    ggml_backend_free(context_of(backend).cpu);
    delete static_cast<Context *>(backend->context);
    delete backend;
}

void set_async(ggml_backend_t backend, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    char * to = static_cast<char *>(t->data) + offset;
    context_of(backend).stream.push([=] {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        std::memcpy(to, data, size);
        late_copies++;
    });
}

void record(ggml_backend_t backend, ggml_backend_event_t event) {
    auto * e = static_cast<Event *>(event->context);
    std::lock_guard<std::mutex> lock(e->mutex);
    e->recorded++;
    context_of(backend).stream.push([e] {
        std::lock_guard<std::mutex> lock(e->mutex);
        e->reached++;
        e->changed.notify_all();
    });
}

void wait_for(ggml_backend_dev_t, ggml_backend_event_t event) {
    auto * e = static_cast<Event *>(event->context);
    std::unique_lock<std::mutex> lock(e->mutex);
    e->changed.wait(lock, [e] { return e->reached == e->recorded; });
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph * graph) { return ggml_backend_graph_compute(context_of(backend).cpu, graph); }

void synchronize(ggml_backend_t backend) {
    Event event;
    ggml_backend_event e{ &device, &event };
    record(backend, &e);
    wait_for(&device, &e);
}

ggml_backend_t init(ggml_backend_dev_t dev, const char *) {
    static ggml_guid guid  = { 't', 'e', 's', 't' };
    ggml_backend_i iface   = {};
    iface.get_name         = [](ggml_backend_t) { return "Test"; };
    iface.free             = free_backend;
    iface.set_tensor_async = set_async;
    iface.synchronize      = synchronize;
    iface.graph_compute    = compute;
    iface.event_record     = record;
    return new ggml_backend{ &guid, iface, dev, new Context{ ggml_backend_dev_init(cpu(), nullptr), {} } };
}

// ---- device

void get_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *total = size_of_device;
    *free  = size_of_device - used;
}

void get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    *props      = {};
    props->name = props->description = "Test";
    props->type                      = GGML_BACKEND_DEVICE_TYPE_GPU;
    props->caps                      = { true, true, false, true };
    get_memory(dev, &props->memory_free, &props->memory_total);
}

ggml_backend_device_i device_interface() {
    ggml_backend_device_i iface = {};
    iface.get_name = iface.get_description = [](ggml_backend_dev_t) { return "Test0"; };
    iface.get_memory                       = get_memory;
    iface.get_type                         = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
    iface.get_props                        = get_props;
    iface.init_backend                     = init;
    iface.get_buffer_type                  = device_type;
    iface.get_host_buffer_type             = pinned_type;
    iface.supports_op   = [](ggml_backend_dev_t, const ggml_tensor * op) { return ggml_backend_dev_supports_op(cpu(), op); };
    iface.supports_buft = [](ggml_backend_dev_t dev, ggml_backend_buffer_type_t type) { return type == device_type(dev); };
    iface.event_new     = [](ggml_backend_dev_t dev) { return new ggml_backend_event{ dev, new Event }; };
    iface.event_free    = [](ggml_backend_dev_t, ggml_backend_event_t event) {
        delete static_cast<Event *>(event->context);
        delete event;
    };
    iface.event_synchronize = wait_for;
    return iface;
}

ggml_backend_reg registry  = { GGML_BACKEND_API_VERSION,
                               { [](ggml_backend_reg_t) { return "CUDA, a test's"; }, [](ggml_backend_reg_t) { return size_t(1); },
                                [](ggml_backend_reg_t, size_t) { return &device; }, nullptr },
                              nullptr };
ggml_backend_device device = { device_interface(), &registry, nullptr };

}  // namespace

extern "C" void sdsage_test_gpu(bool can_pin, uint64_t memory) {
    static bool registered = false;
    if (!registered) {
        ggml_backend_register(&registry);
        registered = true;
    }
    pins           = can_pin;
    size_of_device = memory;
    peak           = used.load();
    late_copies    = 0;
}

extern "C" uint64_t sdsage_test_gpu_used(bool at_most) { return at_most ? peak : used; }

extern "C" int sdsage_test_gpu_copies(void) { return late_copies; }
