// memlane._native: registers the classes and functions of this folder, then those of the other folders of native/bindings.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/python/after_return.hpp"
#include "bindings/python/buffer.hpp"
#include "bindings/python/buffer_pool.hpp"
#include "bindings/python/byte_views.hpp"
#include "bindings/python/call_aside.hpp"
#include "bindings/python/call_guard.hpp"
#include "bindings/python/failures.hpp"
#include "bindings/python/folder_watch.hpp"
#include "bindings/python/gil.hpp"
#include "bindings/python/installed.hpp"
#include "bindings/python/systems.hpp"
#include "core/sweep.hpp"
#include "os/fork.hpp"
#if defined(MEMLANE_SYNC_HOOKS)
#include "bindings/python/sync_hooks.hpp"
#endif

// Python calls the PyInit__native below, which checks the interpreter first.
#define PyInit__native init_in_main_interpreter
NB_MODULE(_native, m) {
    namespace nb = nanobind;
    using namespace memlane;
    using namespace nanobind::literals;
    m.doc() = "The native core of memlane: shared memory, atomics, waiting, liveness.";
    // Objects alive when the interpreter ends are the user's (a queue in a global, a daemon thread): no leak to report.
    nb::set_leak_warnings(false);
    nb::register_exception_translator(bindings::translate);
    bindings::install_fork_handlers();
    bindings::bind_installed(m);
    bindings::bind_buffers(m);
    bindings::bind_buffer_pool(m);
    bindings::bind_byte_views(m);
    bindings::bind_call_guard(m);
    bindings::bind_after_return(m);
    bindings::bind_folder_watch(m);
    bindings::bind_messages(m);
    bindings::bind_ends(m);
    bindings::bind_broadcast(m);
    bindings::bind_store(m);
    bindings::bind_offload(m);
    bindings::bind_copy_blocks(m);
    bindings::bind_tiers(m);
    bindings::bind_disk(m);
    bindings::bind_remote_tiers(m);
#if defined(MEMLANE_SYNC_HOOKS)
    bindings::bind_sync_hooks(m);
#endif
    m.def("call_aside", &bindings::call_aside, "call"_a, "start"_a,
          nb::sig("def call_aside(call: collections.abc.Callable[[], object], "
                  "start: collections.abc.Callable[..., object]) -> bool"),
        "Calls it where no signal handler runs, and waits. False if there is no thread for that.");
    m.def("sweep_dead_segments", [] { return core::sweep_dead_segments(); }, nb::call_guard<bindings::WithoutGil>(),
        "Removes the segments of this user that no living process holds; returns their names.");
    m.def(
        "close_in_children",
        [](int fd, bool always) {
            os::ClosedInChildren& all = os::ClosedInChildren::all();
            const auto no_fork = all.hold();
            if (!always) return all.add(fd);
            all.add_any(fd);
            return os::ClosedInChildren::kAny;
        },
        "fd"_a, "always"_a = false,
        "Makes forked children close `fd`: while it is the same file, or `always`. Returns the inode.");
    m.def(
        "fork_generation",
        [] { return os::fork_generation().load(std::memory_order_relaxed); },
        "A number that differs in each forked child, also after forks by C code; makes no system call.");
    m.def(
        "keep_in_children",
        [](int fd, std::uint64_t inode) {
            const auto no_fork = os::ClosedInChildren::all().hold();
            os::ClosedInChildren::all().remove(fd, inode);
        },
        "fd"_a, "inode"_a, "Undoes close_in_children, once the descriptor is closed.");
}
#undef PyInit__native

// nanobind keeps its types once for the whole process, and starts anew with every interpreter: a second one
// would break the module in the first.
extern "C" NB_EXPORT PyObject* PyInit__native() {
    if (PyInterpreterState_Get() == PyInterpreterState_Main()) return init_in_main_interpreter();
    PyErr_SetString(PyExc_ImportError, "memlane runs in the main interpreter of a process only");
    return nullptr;
}
