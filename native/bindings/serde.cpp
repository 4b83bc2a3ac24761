// Memory for the serdes: an array's bytes where they lie, on the way out and on the way in, and private copies.
#include "bindings/serde.hpp"

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "bindings/buffer_pool.hpp"
#include "bindings/gil.hpp"
#include "bindings/shared_buffer.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// Memory that `owner` keeps alive, as a flat buffer.
class ForeignMemory {
public:
    ForeignMemory(nb::object owner, void* memory, std::size_t bytes, bool is_readonly)
        : owner_(std::move(owner)), memory_(memory), bytes_(bytes), is_readonly_(is_readonly) {}

    // The owner is a memoryview that nobody else has: it cannot be released, and is one more export of the object whose
    // memory `view` shows.
    static ForeignMemory of_view(nb::handle view) {
        if (!PyMemoryView_Check(view.ptr())) throw nb::type_error("only a memoryview shows memory");
        const Py_buffer* shown = PyMemoryView_GET_BUFFER(view.ptr());
        if (!PyBuffer_IsContiguous(shown, 'C')) throw nb::value_error("the memory has gaps");
        return {view_of(shown->obj == nullptr ? view : nb::handle(shown->obj)), shown->buf,
                static_cast<std::size_t>(shown->len), true};
    }

    ForeignMemory part(std::size_t start, std::size_t bytes, bool readonly) const {
        if (start > bytes_ || bytes > bytes_ - start) throw nb::index_error("the part goes beyond the memory");
        return {owner_, static_cast<std::byte*>(memory_) + start, bytes, readonly};
    }

    static int get_buffer(PyObject* self, Py_buffer* view, int flags) noexcept {
        const auto* foreign = nb::inst_ptr<ForeignMemory>(self);
        return PyBuffer_FillInfo(view, self, foreign->memory_, static_cast<Py_ssize_t>(foreign->bytes_),
                                 foreign->is_readonly_, flags);
    }

private:
    nb::object owner_;
    void* memory_;
    std::size_t bytes_;
    bool is_readonly_;
};

nb::object bytes_at(nb::object owner, std::uintptr_t address, std::size_t bytes) {
    return view_of(nb::cast(ForeignMemory(std::move(owner), reinterpret_cast<void*>(address), bytes, true)));
}

PooledBuffer pooled_copy(nb::handle view) {
    Py_buffer from;
    if (PyObject_GetBuffer(view.ptr(), &from, PyBUF_SIMPLE) != 0) throw nb::python_error();
    struct Released {
        Py_buffer& view;
        ~Released() { PyBuffer_Release(&view); }
    } const released{from};
    PooledBuffer copy(static_cast<std::size_t>(from.len));
    copying(copy.bytes(), [&] { return std::memcpy(copy.memory(), from.buf, copy.bytes()); });
    return copy;
}

}  // namespace

void bind_serde(nb::module_& m) {
    static PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(ForeignMemory::get_buffer)}, {0, nullptr}};
    nb::class_<ForeignMemory>(m, "ForeignMemory", nb::type_slots(slots), "Memory that another object keeps alive.")
        .def_static("of_view", &ForeignMemory::of_view, "view"_a, nb::sig("def of_view(view: memoryview) -> ForeignMemory"),
                    "What `view` shows, also after its release.")
        .def("part", &ForeignMemory::part, "start"_a, "nbytes"_a, "readonly"_a,
             "Some of it; writable for who knows no read-only memory (torch).");

    m.def("bytes_at", &bytes_at, "owner"_a, "address"_a, "nbytes"_a,
          nb::sig("def bytes_at(owner: object, address: int, nbytes: int) -> memoryview"),
          "So many bytes of the memory of `owner`, which keeps them there; read-only.");
    m.def("pooled_copy", &pooled_copy, "view"_a, nb::sig("def pooled_copy(view: memoryview) -> PooledBuffer"),
          "Its bytes in private, writable memory that is used again.");
}

}  // namespace memlane::bindings
