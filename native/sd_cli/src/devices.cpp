// Devices by the names that users give: "cpu", "cuda:1", "vulkan:0" for ggml's "CPU", "CUDA1", "Vulkan0".
#include <cctype>
#include <cstring>
#include <string>
#include <vector>

#include "attention.h"
#include "coverage.h"
#include "ggml-backend.h"
#include "ggml_extend_backend.hpp"
#include "sdsage.h"
#include "util.h"

std::string sdsage::device_name(ggml_backend_dev_t dev) {
    std::string name = ggml_backend_dev_name(dev);
    for (char & c : name) {
        c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
    const size_t digits = name.find_last_not_of("0123456789") + 1;
    return digits < name.size() ? name.substr(0, digits) + ":" + name.substr(digits) : name;
}

namespace {

struct Known {
    ggml_backend_dev_t dev;
    std::string name;
};

const std::vector<Known> & known_devices() {
    static const std::vector<Known> all = [] {
        ggml_backend_load_all_once();
        std::vector<Known> found;
        for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
            ggml_backend_dev_t dev = ggml_backend_dev_get(i);
            found.push_back({ dev, sdsage::device_name(dev) });
        }
        return found;
    }();
    return all;
}

ggml_backend_dev_t & requested() {
    static thread_local ggml_backend_dev_t dev = nullptr;
    return dev;
}

const char * kind_name(ggml_backend_dev_t dev) {
    switch (ggml_backend_dev_type(dev)) {
        case GGML_BACKEND_DEVICE_TYPE_CPU:
            return "cpu";
        case GGML_BACKEND_DEVICE_TYPE_GPU:
            return "gpu";
        case GGML_BACKEND_DEVICE_TYPE_IGPU:
            return "igpu";
        default:
            return "accel";
    }
}

}  // namespace

ggml_backend_dev_t sdsage::chosen_device() {
    known_devices();
    for (ggml_backend_dev_t dev :
         { requested(), ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU), ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_IGPU) }) {
        if (dev != nullptr) {
            return dev;
        }
    }
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

// Called by upstream's sd_get_default_backend (edits, group "device").
ggml_backend_t sdsage_requested_backend() {
    if (requested() == nullptr) {
        return nullptr;
    }
    LOG_INFO("device %s, as asked for", sdsage::device_name(requested()).c_str());
    return ggml_backend_dev_init(requested(), nullptr);
}

extern "C" {

int sdsage_device_count(void) { return static_cast<int>(known_devices().size()); }

bool sdsage_get_device(int index, sdsage_device_t * device) {
    if (index < 0 || index >= sdsage_device_count() || device == nullptr) {
        return false;
    }
    const Known & k = known_devices()[static_cast<size_t>(index)];
    *device         = { k.name.c_str(), kind_name(k.dev), ggml_backend_dev_description(k.dev), 0, 0 };
    ggml_backend_dev_memory(k.dev, &device->memory_free, &device->memory_total);
    return true;
}

bool sdsage_set_device(const char * name) {
    if (name == nullptr) {
        requested() = nullptr;
        return true;
    }
    for (const Known & k : known_devices()) {
        if (k.name == name || k.name == std::string(name) + ":0") {
            requested() = k.dev;
            return true;
        }
    }
    return false;
}

void sdsage_get_sage(enum sd_sage_kernel_t kernel, sdsage_sage_t * sage) {
    static thread_local sdsage::SageInfo info;
    info           = sdsage::chosen_sage(static_cast<sage_kernel>(kernel));
    const auto & c = info.choice;
    *sage          = { info.why.empty(),
                       c.emulated != 0,
                       info.name.c_str(),
              info.why.empty() ? sdsage::sage_kernel_text(c.kernel) : "",
                       info.why.c_str(),
              c.why_not_better ? c.why_not_better : "",
              info.device.architectures ? info.device.architectures : "",
                       info.device.compute_capability,
                       info.device.toolkit };
}

}  // extern "C"
