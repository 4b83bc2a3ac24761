// What still refers to shared memory when the block of a zero-copy read ends.
//
// The memory itself is safe whatever is said here: it is given back only when its last export goes, which is counted
// (shared_buffer.hpp). Here is found out whether the end of the block is an error, and whose.
//
// `with ... as name` leaves `name` behind, so that one reference is nobody's fault. It is told from all others by
// counting: every object of the block's value that leads to the memory must have as many references as the value itself
// holds on it, and no more. What an object holds is asked of its type, as the garbage collector does it: no Python code
// runs, but torch's and that of arrays of objects.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/foreign_memory.hpp"
#include "bindings/shared_buffer.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class Survey {
public:
    // `box` has the value as its only element; the caller has no other reference to it.
    Survey(const nb::list& box, const ViewLease& lease) : lease_(lease), torch_(loaded_torch()) {
        parts_.reserve(kFew);
        pending_.reserve(kFew);
        edges_.reserve(kFew);
        index_.reserve(kFew);
        PyObject* const value = PyList_GET_ITEM(box.ptr(), 0);
        const bool is_named = Py_REFCNT(value) > 1;  // besides: the box's
        add(nb::borrow(value), kNobody);
        while (!pending_.empty()) {
            const std::uint32_t at = pending_.back();
            pending_.pop_back();
            look_into(at);
        }
        Part& root = parts_.front();
        if (is_named)
            ++root.held;
        else if (PyTuple_Check(root.object.ptr()) || PyList_Check(root.object.ptr()))
            name_members();  // ... as (one, other)
    }

    // The type of something that leads to the memory, and that anything else refers to; None if there is no such thing.
    nb::object result() {
        find_leading();
        for (const Part& part : parts_) {
            if (!part.leads) continue;
            if (Py_REFCNT(part.object.ptr()) > part.held + 1)  // besides: that of parts_
                return nb::borrow(part.object.type()).attr("__name__");
            if (is_tensor(part.object) && is_storage_shared(part.object))
                return nb::str("storage of a tensor");
        }
        return nb::none();
    }

private:
    static constexpr std::uint32_t kNobody = UINT32_MAX;
    static constexpr std::size_t kFew = 16;  // parts of most values

    struct Part {
        nb::object object;
        Py_ssize_t held;  // references to it that are known
        bool leads;       // to the memory
    };
    struct Edge {
        std::uint32_t parent;
        std::uint32_t child;
    };

    // What is looked for by name, once. Not while the module is made: an interruption of numpy's import would come out of
    // it as an ImportError.
    struct Known {
        nb::object array = nb::module_::import_("numpy").attr("ndarray");
        nb::object deque = nb::module_::import_("collections").attr("deque");
        // What a memoryview shares with its slices.
        nb::object managed_buffer = nb::borrow(referents(view_of(nb::bytes("", 0)))[0].type());
        nb::object is_storage_shared;  // of memlane._torch, once there are tensors

        nb::str base{"base"}, dtype{"dtype"}, hasobject{"hasobject"}, flat{"flat"}, array_struct{"__array_struct__"};
        nb::str is_nested{"is_nested"}, data_ptr{"data_ptr"};
    };
    // Under the GIL, not by a static's guard: the search may let go of the GIL, and another thread would hold it and wait
    // for the guard.
    static Known& known() {
        static Known* found = nullptr;  // never destroyed: the interpreter may end first
        if (found == nullptr) {
            auto fresh = std::make_unique<Known>();
            if (found == nullptr) found = fresh.release();
        }
        return *found;
    }

    static std::vector<nb::object> referents(nb::handle object) {
        std::vector<nb::object> found;
        if (const auto traverse = Py_TYPE(object.ptr())->tp_traverse) {
            const visitproc visit = [](PyObject* one, void* to) {
                static_cast<std::vector<nb::object>*>(to)->push_back(nb::borrow(one));
                return 0;
            };
            traverse(object.ptr(), visit, &found);
        }
        return found;
    }

    static bool is_a(nb::handle object, nb::handle type) noexcept {
        return PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(type.ptr())) != 0;
    }
    static bool is_lent(nb::handle object) noexcept {
        return nb::isinstance<SharedBuffer>(object) || nb::isinstance<ForeignMemory>(object);
    }

    // Of exactly these types: lead nowhere, and are most of what a message holds.
    static bool is_leaf(nb::handle object) noexcept {
        const PyTypeObject* type = Py_TYPE(object.ptr());
        return type == &PyUnicode_Type || type == &PyLong_Type || type == &PyFloat_Type || object.is_none() ||
               type == &PyBool_Type || type == &PyBytes_Type || type == &PyByteArray_Type || type == &PyComplex_Type;
    }

    void add(nb::object object, std::uint32_t parent) {
        const auto [found, is_new] = index_.try_emplace(object.ptr(), static_cast<std::uint32_t>(parts_.size()));
        const std::uint32_t at = found->second;
        if (is_new) {
            parts_.push_back({std::move(object), 0, false});
            pending_.push_back(at);
        }
        ++parts_[at].held;
        if (parent != kNobody) edges_.push_back({parent, at});
    }

    void look_into(std::uint32_t at) {
        const nb::object part = parts_[at].object;
        if (is_a(part, known().array)) {
            // Slices refer to the array that the memory came with, not to the one they were taken of.
            add_part(part.attr(known().base), at);
            if (nb::cast<bool>(part.attr(known().dtype).attr(known().hasobject)))
                for (const nb::handle element : part.attr(known().flat)) add_part(nb::borrow(element), at);
            return;
        }
        PyObject* const p = part.ptr();
        const bool is_container = PyDict_Check(p) || PyList_Check(p) || PyTuple_Check(p) || PyAnySet_Check(p) ||
                                  PyMemoryView_Check(p) || is_a(part, known().deque);
        const bool is_of_python_class = PyType_HasFeature(Py_TYPE(p), Py_TPFLAGS_HEAPTYPE) != 0;
        if (!is_container && (!is_of_python_class || is_tensor(part))) return;
        for (nb::object& one : referents(part)) add_part(std::move(one), at);
    }

    void add_part(nb::object object, std::uint32_t parent) {
        if (!is_leaf(object) && !PyType_Check(object.ptr())) add(std::move(object), parent);
    }

    void name_members() {
        std::vector<std::uint32_t> members;
        for (const Edge& edge : edges_)
            if (edge.parent == 0 && std::find(members.begin(), members.end(), edge.child) == members.end())
                members.push_back(edge.child);
        for (const std::uint32_t at : members) ++parts_[at].held;
    }

    void find_leading() {
        for (Part& part : parts_) part.leads = is_alias(part.object);
        // Parents mostly stand before their children, so that the second round rarely finds anything.
        for (bool changed = true; changed;) {
            changed = false;
            for (auto edge = edges_.rbegin(); edge != edges_.rend(); ++edge)
                if (parts_[edge->child].leads && !parts_[edge->parent].leads) changed = parts_[edge->parent].leads = true;
        }
    }

    bool is_alias(nb::handle part) const {
        if (is_a(part, known().array)) return lease_.covers(address_of_array(part));
        if (PyMemoryView_Check(part.ptr())) {
            for (const nb::object& one : referents(part))
                if (shows_lent(one)) return true;
            return false;
        }
        if (shows_lent(part)) return true;
        return is_tensor(part) && lease_.covers(address_of_tensor(part));
    }

    static bool shows_lent(nb::handle part) {
        if (!part.type().is(known().managed_buffer)) return false;
        for (const nb::object& one : referents(part))
            if (is_lent(one)) return true;
        return false;
    }

    // By numpy's array interface for C: https://numpy.org/doc/stable/reference/arrays.interface.html
    static std::uintptr_t address_of_array(nb::handle array) {
        struct Interface {
            int two, nd;
            char typekind;
            int itemsize, flags;
            Py_ssize_t *shape, *strides;
            void* data;
        };
        const nb::object capsule = array.attr(known().array_struct);
        const auto* const shown = static_cast<const Interface*>(PyCapsule_GetPointer(capsule.ptr(), nullptr));
        if (shown == nullptr) throw nb::python_error();
        return reinterpret_cast<std::uintptr_t>(shown->data);
    }

    // 0 for one that has no memory of its own (a sparse one), or shares that of others by its nature (a nested one).
    static std::uintptr_t address_of_tensor(nb::handle tensor) {
        try {
            if (nb::cast<bool>(tensor.attr(known().is_nested))) return 0;
            return nb::cast<std::uintptr_t>(tensor.attr(known().data_ptr)());
        } catch (const nb::python_error&) {
            return 0;
        }
    }

    bool is_tensor(nb::handle part) const noexcept { return torch_.is_valid() && is_a(part, torch_); }

    static bool is_storage_shared(nb::handle tensor) {
        nb::object& ask = known().is_storage_shared;
        if (!ask.is_valid()) ask = nb::module_::import_("memlane._torch").attr("is_storage_shared");
        return nb::cast<bool>(ask(tensor));
    }

    // torch.Tensor, if this process has imported it.
    static nb::object loaded_torch() {
        PyObject* const torch = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
        return torch == nullptr ? nb::object() : nb::getattr(torch, "Tensor", nb::object());
    }

    const ViewLease& lease_;
    const nb::object torch_;
    std::vector<Part> parts_;
    std::vector<std::uint32_t> pending_;
    std::vector<Edge> edges_;
    std::unordered_map<PyObject*, std::uint32_t> index_;
};

inline void bind_survivors(nb::module_& m) {
    using namespace nb::literals;
    m.def(
        "survivor", [](const nb::list& box, const ViewLease& lease) { return Survey(box, lease).result(); }, "box"_a, "lease"_a,
        nb::sig("def survivor(box: list[object], lease: ViewLease) -> str | None"),
        "The type of what leads to the lease's memory and is used beyond its block; None if nothing is.");
}

}  // namespace memlane::bindings
