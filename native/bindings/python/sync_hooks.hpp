// memlane._native.sync_hooks, in test builds only: counts the sync points that this process passes, or kills it at one.
//
// A process names the stage it is in; passages are counted by stage and point. A death is the kernel's SIGKILL,
// raised by the process itself right before the step, so nothing of it runs afterwards. Just before that it writes the
// time (CLOCK_MONOTONIC, ns, 8 bytes) to a descriptor: the proof that it died there and of nothing else.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <csignal>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/sync.hpp"
#include "os/clock.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class SyncHooks {
public:
    using Passage = std::tuple<std::string, std::string, std::uint64_t>;  // stage, point, how often

    static SyncHooks& instance() {
        static auto* const hooks = new SyncHooks;  // never destroyed: points are passed until the very end
        return *hooks;
    }

    void begin(std::string stage) {
        const std::lock_guard guard(mutex_);
        stage_ = std::move(stage);
        core::sync_hook.store([](const char* point) { instance().pass(point); });
    }
    void die_at(std::string stage, std::string point, std::uint64_t passage, int report) {
        const std::lock_guard guard(mutex_);
        target_ = {std::move(stage), std::move(point), passage};
        report_ = report;
    }
    std::vector<Passage> passages() {
        const std::lock_guard guard(mutex_);
        return passages_;
    }

private:
    // Points are passed without the GIL, by any thread.
    void pass(const char* point) {
        const std::lock_guard guard(mutex_);
        const auto [at, is_first] = places_.try_emplace({stage_, point}, passages_.size());
        if (is_first) passages_.emplace_back(stage_, point, 0);
        Passage& here = passages_[at->second];
        ++std::get<2>(here);
        if (here != target_) return;
        const std::int64_t now = os::monotonic_now();
        while (::write(report_, &now, sizeof now) != sizeof now) {
        }
        ::raise(SIGKILL);
    }

    std::mutex mutex_;
    std::string stage_;
    Passage target_;
    int report_ = -1;
    std::vector<Passage> passages_;  // in the order in which they were first passed
    std::map<std::pair<std::string, std::string>, std::size_t> places_;
};

inline void bind_sync_hooks(nb::module_& m) {
    nb::module_ hooks = m.def_submodule("sync_hooks", "Test builds only: passages of sync points, and deaths at them.");
    hooks.def("begin", [](std::string stage) { SyncHooks::instance().begin(std::move(stage)); }, nb::arg("stage"));
    hooks.def(
        "die_at",
        [](std::string stage, std::string point, std::uint64_t passage, int report) {
            SyncHooks::instance().die_at(std::move(stage), std::move(point), passage, report);
        },
        nb::arg("stage"), nb::arg("point"), nb::arg("passage"), nb::arg("report"));
    hooks.def("passages", [] { return SyncHooks::instance().passages(); });
}

}  // namespace memlane::bindings
