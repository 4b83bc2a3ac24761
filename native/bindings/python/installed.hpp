// What memlane's Python modules install here when they are imported: the error classes, and functions that describe a
// failure, log a wait, or know the machine. Native code imports nothing by name, so it depends only on layers below it.
//
// Protected by the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <utility>

namespace memlane::bindings {

namespace nb = nanobind;

// The classes that native code raises or recognises. `install_errors` refuses a table that lacks one of them.
#define MEMLANE_ERRORS(X) \
    X(MemlaneError) X(InvalidArgument) X(InvalidType) X(Closed) X(WrongProcess) X(ConcurrentUse) X(RankTaken) X(ViewInUse) \
    X(CorruptMessage) X(LayoutMismatch) X(SegmentMissing) X(SegmentExists) X(SegmentRefused) X(ShmExhausted) \
    X(TierInUse) X(Unsupported)

// Each is installed by the module that defines it.
#define MEMLANE_FUNCTIONS(X) \
    X(foreign_segment)  /* (path, owner, remedy) -> the error for another user's file */ \
    X(system_fault)     /* (errno, text) -> the error for a failed system call */ \
    X(failure)          /* (end, what, slot, timeout) -> the error of a call on an end */ \
    X(exhausted)        /* (end, need, free, errno) -> the error of a writer that lacks space */ \
    X(move_refusal)     /* (what, pair, block, sources, targets) -> the error for a refused pair of blocks */ \
    X(integer)          /* (name, value) -> an int, or raises */ \
    X(raised_by_handler) /* (traceback) -> whether a signal handler raised the error */ \
    X(seconds_of)       /* (timeout) -> seconds, or raises */ \
    X(check_memory)     /* (bytes): raises if the machine lacks them */ \
    X(memory_refusal)   /* (bytes, spare=) -> the same error, or None */ \
    X(warning_interval) /* () -> seconds until a wait is logged */ \
    X(report)           /* (end, wait, seconds): logs a wait */ \
    X(report_deserted)  /* (end, ns): logs that no reader is left since then */ \
    X(warn)             /* (text): logs a warning */

#define MEMLANE_MEMBER(name) name,
#define MEMLANE_TEXT(name) #name,
enum class Error : std::size_t { MEMLANE_ERRORS(MEMLANE_MEMBER) count };
enum class Function : std::size_t { MEMLANE_FUNCTIONS(MEMLANE_MEMBER) count };

class Installed {
public:
    // Never destroyed: static destructors run after the interpreter, and must not drop references to its objects.
    static Installed& instance() {
        static auto* const installed = new Installed;
        return *installed;
    }

    // The class; null if none was installed.
    nb::handle find(Error error) const noexcept { return errors_[static_cast<std::size_t>(error)]; }

    // Raises if no such function was installed.
    nb::handle get(Function function) const {
        const auto at = static_cast<std::size_t>(function);
        if (!functions_[at].is_valid()) {
            const nb::handle base = find(Error::MemlaneError);
            PyErr_Format(base.is_valid() ? base.ptr() : PyExc_RuntimeError,
                         "memlane._native has no function `%s`: import memlane's own modules, not memlane._native alone",
                         kFunctions[at]);
            throw nb::python_error();
        }
        return functions_[at];
    }

    // For an error whose class was not installed.
    [[noreturn]] void raise_classless(Error error, const nb::tuple& args) const {
        PyErr_Format(PyExc_RuntimeError,
                     "%s%S (memlane._native has no classes of errors: import memlane's own modules, not memlane._native alone)",
                     kErrors[static_cast<std::size_t>(error)], args.ptr());
        throw nb::python_error();
    }

    // Changes nothing if a class is missing.
    void install_errors(const nb::dict& table) {
        decltype(errors_) classes;
        for (std::size_t i = 0; i < classes.size(); ++i) {
            classes[i] = nb::borrow(PyDict_GetItemString(table.ptr(), kErrors[i]));
            if (!classes[i].is_valid() || !PyExceptionClass_Check(classes[i].ptr())) {
                PyErr_Format(PyExc_ValueError, "the table of errors has no class %s", kErrors[i]);
                throw nb::python_error();
            }
        }
        errors_ = std::move(classes);
    }

    // Changes nothing if one of them is unknown here, or cannot be called.
    void install(const nb::kwargs& functions) {
        auto changed = functions_;
        for (const auto [name, function] : functions) {
            std::size_t at = 0;
            while (at < kFunctions.size() && PyUnicode_CompareWithASCIIString(name.ptr(), kFunctions[at]) != 0) ++at;
            if (at == kFunctions.size() || !PyCallable_Check(function.ptr())) {
                PyErr_Format(PyExc_ValueError, "%R cannot be installed as %S", function.ptr(), name.ptr());
                throw nb::python_error();
            }
            changed[at] = nb::borrow(function);
        }
        functions_ = std::move(changed);
    }

private:
    static constexpr std::array<const char*, static_cast<std::size_t>(Error::count)> kErrors{MEMLANE_ERRORS(MEMLANE_TEXT)};
    static constexpr std::array<const char*, static_cast<std::size_t>(Function::count)> kFunctions{
        MEMLANE_FUNCTIONS(MEMLANE_TEXT)};

    std::array<nb::object, kErrors.size()> errors_;
    std::array<nb::object, kFunctions.size()> functions_;
};
#undef MEMLANE_ERRORS
#undef MEMLANE_FUNCTIONS
#undef MEMLANE_MEMBER
#undef MEMLANE_TEXT

inline nb::handle installed(Function function) { return Installed::instance().get(function); }

inline void bind_installed(nb::module_& m) {
    using namespace nb::literals;
    m.def("install_errors", [](const nb::dict& classes) { Installed::instance().install_errors(classes); }, "classes"_a,
          nb::sig("def install_errors(classes: dict[str, typing.Any]) -> None"),
          "Gives native code memlane's error classes, by name; ValueError if one is missing.");
    m.def("install", [](const nb::kwargs& functions) { Installed::instance().install(functions); }, "functions"_a,
          nb::sig("def install(**functions: collections.abc.Callable[..., typing.Any]) -> None"),
          "Gives native code functions that it calls: they describe failures or log waits, say.");
}

}  // namespace memlane::bindings
