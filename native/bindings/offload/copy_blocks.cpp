// copy_blocks for Python, on the host and to or from a GPU: arrays of blocks, and the caller's array of pairs.
//
// A small move takes one native call and keeps the GIL. One that costs as much as copying 64 KiB releases it,
// also to read and check the pairs. Changing the pairs meanwhile does no harm: they are read once.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/python/buffer.hpp"
#include "bindings/python/failures.hpp"
#include "bindings/python/gil.hpp"
#include "bindings/python/systems.hpp"
#include "offload/copy_device.hpp"
#include "offload/copy_move.hpp"
#include "os/process.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// One side of a move, as memory. The Python side has checked types and shapes.
class BlockArray {
public:
    static BlockArray of_buffer(nb::handle object) {
        HeldBuffer buffer(object, PyBUF_STRIDES);
        const auto dimensions = static_cast<std::size_t>(buffer->ndim);
        const std::vector<std::int64_t> shape(buffer->shape, buffer->shape + dimensions);
        const std::vector<std::int64_t> strides(buffer->strides, buffer->strides + dimensions);
        void* const base = buffer->buf;
        const std::int64_t itemsize = buffer->itemsize;
        return {base, shape, strides, itemsize, std::move(buffer)};
    }

    static BlockArray at(std::uintptr_t address, const std::vector<std::int64_t>& shape,
                         const std::vector<std::int64_t>& strides, std::int64_t itemsize) {
        return {reinterpret_cast<void*>(address), shape, strides, itemsize, std::nullopt};
    }

    const offload::Blocks& blocks() const noexcept { return blocks_; }

private:
    BlockArray(void* base, const std::vector<std::int64_t>& shape, const std::vector<std::int64_t>& strides,
               std::int64_t itemsize, std::optional<HeldBuffer> buffer)
        : buffer_(std::move(buffer)) {
        if (shape.empty() || shape.size() != strides.size()) throw nb::value_error("an array needs a block axis");
        auto blocks = offload::blocks_of(base, shape, strides, itemsize);
        if (!blocks)
            raise_error(Error::InvalidArgument,
                        nb::str("each block of an array of shape {} has more than {} pieces; make it contiguous first")
                            .attr("format")(shape, offload::kMostExtents));
        blocks_ = std::move(*blocks);
    }

    std::optional<HeldBuffer> buffer_;
    offload::Blocks blocks_;
};

// The exception is made in Python, where the texts are.
[[noreturn]] void raise_refusal(const char* what, const BlockArray& from, const BlockArray& to, std::size_t pair = 0,
                                nb::handle id = nb::none()) {
    set_raised(installed(Function::move_refusal)(what, pair, id, from.blocks().count, to.blocks().count));
    throw nb::python_error();
}

// In the order of offload::Fault.
constexpr const char* kFaults[] = {"none", "no_such_source", "no_such_target", "target_twice", "overlap", "tangled"};

// The caller's pairs, of one of four integer types; the Python side converts others.
class PairArray {
public:
    explicit PairArray(nb::handle object) : buffer_(object, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) {
        const std::string_view format = buffer_->format == nullptr ? "B" : buffer_->format;
        is_signed_ = format == "i" || format == "l" || format == "q";
        const bool is_integer = is_signed_ || format == "I" || format == "L" || format == "Q";
        if (!is_integer || buffer_->ndim != 2 || buffer_->shape[1] != 2)
            throw nb::type_error("pairs must have shape (n, 2)");
    }

    bool is_signed() const noexcept { return is_signed_; }
    std::size_t count() const noexcept { return static_cast<std::size_t>(buffer_->shape[0]); }

    // May be called without the GIL.
    offload::Reading check(const BlockArray& from, const BlockArray& to) const {
        if (buffer_->itemsize == 4) return is_signed_ ? check_as<std::int32_t>(from, to) : check_as<std::uint32_t>(from, to);
        return is_signed_ ? check_as<std::int64_t>(from, to) : check_as<std::uint64_t>(from, to);
    }

private:
    template <class Int>
    offload::Reading check_as(const BlockArray& from, const BlockArray& to) const {
        return offload::check_pairs(static_cast<const Int*>(buffer_->buf), count(), from.blocks(), to.blocks());
    }

    HeldBuffer buffer_;
    bool is_signed_;
};

void require_movable(const BlockArray& from, const BlockArray& to) {
    if (from.blocks().block_bytes != to.blocks().block_bytes) throw nb::value_error("blocks differ in size");
    if (!to.blocks().apart) raise_refusal("self_overlap", from, to);
}

void raise_if_found(const offload::Finding& finding, const PairArray& pairs, const BlockArray& from, const BlockArray& to) {
    if (finding.fault == offload::Fault::none) return;
    const nb::object id =
        pairs.is_signed() ? nb::cast(static_cast<std::int64_t>(finding.id)) : nb::cast(finding.id);
    raise_refusal(kFaults[static_cast<int>(finding.fault)], from, to, finding.pair, id);
}

// The cost of the move, in bytes of copying.
std::uint64_t cost_of(const PairArray& pairs, const BlockArray& from) {
    return pairs.count() * std::max(from.blocks().block_bytes, offload::kPairBytes);
}

// Returns the bytes moved, and how many threads could not be started. 0 `threads`: as many as are worthwhile.
std::pair<std::uint64_t, unsigned> copy_blocks(const BlockArray& from, const BlockArray& to, nb::handle pairs,
                                               unsigned threads) {
    require_movable(from, to);
    const PairArray array(pairs);
    offload::Finding finding;
    std::uint64_t bytes = 0;
    unsigned missing = 0;
    const pid_t owner = ::getpid();
    // Signal handlers run Python code, which may fork: the child has no helpers, so their work is missing there.
    const auto look = [&] {
        const WithGil gil;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (::getpid() != owner) raise_refusal("forked", from, to);
    };
    copying(cost_of(array, from), [&] {
        offload::Reading reading = array.check(from, to);
        finding = reading.finding;
        if (finding.fault != offload::Fault::none) return;
        offload::Move move(from.blocks(), to.blocks(), std::move(reading));
        bytes = move.bytes();
        missing = move.run(threads != 0 ? threads : move.threads(os::usable_cores()), look);
    });
    raise_if_found(finding, array, from, to);
    return {bytes, missing};
}

// Functions of a CUDA runtime, by address; 0 if it lacks one.
class CudaCopies {
public:
    CudaCopies(std::uintptr_t copy, std::uintptr_t copy_2d, std::uintptr_t batch, bool tells_index) {
        cuda_.copy = reinterpret_cast<offload::CudaRuntime::Copy>(copy);
        cuda_.copy_2d = reinterpret_cast<offload::CudaRuntime::Copy2D>(copy_2d);
        if (tells_index)
            cuda_.batch_12 = reinterpret_cast<offload::CudaRuntime::Batch12>(batch);
        else
            cuda_.batch_13 = reinterpret_cast<offload::CudaRuntime::Batch13>(batch);
    }

    // Returns the bytes, the number of copies queued, the ways they took, and CUDA's error.
    std::tuple<std::uint64_t, std::size_t, std::string, int> queue(const BlockArray& from, const BlockArray& to, nb::handle pairs,
                                                                   bool to_device, std::uintptr_t stream,
                                                                   const offload::Registered& begins) const {
        require_movable(from, to);
        const PairArray array(pairs);
        offload::Finding finding;
        std::uint64_t bytes = 0;
        offload::Queued queued;
        {
            const WithoutGil no_gil;  // a full queue of the driver blocks its caller
            const offload::Reading reading = array.check(from, to);
            finding = reading.finding;
            if (finding.fault == offload::Fault::none && from.blocks().block_bytes != 0) {
                bytes = reading.pairs.size() * from.blocks().block_bytes;
                const auto direction = to_device ? offload::Direction::to_device : offload::Direction::to_host;
                auto copies = offload::device_copies(from.blocks(), to.blocks(), reading.pairs, direction, begins);
                queued = offload::queue_copies(cuda_, std::move(copies), direction, reinterpret_cast<void*>(stream));
            }
        }
        raise_if_found(finding, array, from, to);
        return {bytes, queued.copies, queued.ways.names(), queued.error};
    }

private:
    offload::CudaRuntime cuda_;
};

}  // namespace

void bind_copy_blocks(nb::module_& m) {
    nb::class_<BlockArray>(m, "BlockArray", "Memory divided into blocks by its first axis.")
        .def_static("of_buffer", &BlockArray::of_buffer, "buffer"_a,
                    "Wraps an object with the buffer protocol, and keeps it alive.")
        .def_static("at", &BlockArray::at, "address"_a, "shape"_a, "strides"_a, "itemsize"_a,
                    "Wraps memory that the caller keeps alive; strides in bytes.")
        .def_prop_ro("block_bytes", [](const BlockArray& self) { return self.blocks().block_bytes; })
        .def_prop_ro("count", [](const BlockArray& self) { return self.blocks().count; });
    m.def("copy_blocks", &copy_blocks, "src"_a, "dst"_a, "pairs"_a, "threads"_a,
          "Returns the bytes moved and the number of threads that failed to start; 0 threads: automatic.");
    nb::class_<CudaCopies>(m, "CudaCopies", "Asynchronous copies with the functions of a CUDA runtime.")
        .def(nb::init<std::uintptr_t, std::uintptr_t, std::uintptr_t, bool>(), "copy"_a, "copy_2d"_a, "batch"_a,
             "tells_index"_a,
             "Function addresses; `batch` 0: none. `tells_index`: it reports which copy was refused.")
        .def("queue", &CudaCopies::queue, "src"_a, "dst"_a, "pairs"_a, "to_device"_a, "stream"_a, "begins"_a,
             "Returns bytes, number of copies, ways and CUDA's error. No copy crosses one of `begins`.");
}

}  // namespace memlane::bindings
