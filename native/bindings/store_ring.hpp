// The shared memory of a byte ring as Python holds it: made, attached, looked at as memoryviews.
#pragma once

#include <nanobind/nanobind.h>

#include <cerrno>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "bindings/failures.hpp"
#include "bindings/gil.hpp"
#include "bindings/segment_id.hpp"
#include "bindings/shared_buffer.hpp"
#include "core/sweep.hpp"
#include "store/byte_ring.hpp"
#include "store/ring_space.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

// What the calls of a ring's writer have in common: one at a time; and one that raised is mended before anything else.
struct Writing {
    bool is_on = false;
    bool is_broken = false;
};

// The block around such a call. In C++, because a signal handler may raise between any two steps of Python, and what was
// taken just before would never be given back.
class WriterCall {
public:
    WriterCall(std::shared_ptr<Writing> writing, std::string call, nb::object mend)
        : writing_(std::move(writing)), call_(std::move(call)), mend_(std::move(mend)) {}
    WriterCall(const WriterCall&) = delete;
    WriterCall& operator=(const WriterCall&) = delete;
    WriterCall(WriterCall&& other) noexcept = default;
    ~WriterCall() {
        if (is_mine_) *writing_ = {false, true};
    }

    void enter() {
        if (writing_->is_on)
            raise_error("ConcurrentUse", "another call of the writer is under way; " + call_ + " changed nothing");
        writing_->is_on = is_mine_ = true;
        if (!writing_->is_broken) return;
        try {
            mend();
        } catch (...) {
            leave();
            throw;
        }
    }

    // `kind`: of the error, or None.
    void exit(nb::handle kind, nb::handle /*error*/, nb::handle /*traceback*/) {
        if (!is_mine_) return;
        writing_->is_broken = !kind.is_none();
        try {
            if (writing_->is_broken) mend();
        } catch (...) {
            leave();
            throw;
        }
        leave();
    }

private:
    void mend() {
        mend_();
        writing_->is_broken = false;
    }
    void leave() noexcept { writing_->is_on = is_mine_ = false; }

    std::shared_ptr<Writing> writing_;
    std::string call_;
    nb::object mend_;
    bool is_mine_ = false;
};

// Offsets come from Python, which knows them to lie in the ring.
class ByteRingSegment {
public:
    static ByteRingSegment create(std::uint64_t bytes, const nb::bytes& id, const std::string& name) {
        const core::SegmentId segment_id = to_id(id);
        check_memory_for(bytes);
        const WithoutGil no_gil;
        core::sweep_dead_segments();
        if (!core::free_name(name)) throw core::SegmentExists(name);
        try {
            const std::uint64_t first = store::RingSpace::first_piece(bytes);
            return {core::Segment::create(store::plan_of(bytes), segment_id, name, {{0, first}}, std::nullopt, bytes - first),
                    bytes, first};
        } catch (const std::system_error& error) {
            if (error.code().value() == EEXIST) throw core::SegmentExists(name);
            throw;
        }
    }

    static ByteRingSegment attach(std::uint64_t bytes, const std::string& name) {
        const WithoutGil no_gil;
        return {core::Segment::attach(name, store::plan_of(bytes), std::nullopt, std::nullopt), bytes, 0};
    }

    core::Segment& segment() const noexcept { return *segment_; }
    std::uint64_t ring_bytes() const noexcept { return bytes_; }

    // Raises unless it may be used: not closed, not a parent's.
    void check() const {
        if (!segment_->is_own()) raise_failure(nb::none(), "wrong_process");
        if (!segment_->is_open()) raise_error("Closed", "this ring is closed");
    }

    nb::object whole() const {
        check();
        const auto& mapping = segment_->mapping();
        return view_of(nb::cast(SharedBuffer(mapping, 0, mapping->bytes())));
    }
    nb::object view(std::uint64_t offset, std::uint64_t bytes) const {
        check();
        return view_of(nb::cast(SharedBuffer(segment_->mapping(), offset, bytes)));
    }
    nb::tuple read_header(std::uint64_t offset) const {
        check();
        if (!space_->has(offset, sizeof(store::ChunkHeader))) return nb::make_tuple(0, 0);
        const store::ChunkHeader header = store::read_header(segment_->mapping()->base() + offset);
        const std::uint64_t size = header.size < 0 ? 0 : static_cast<std::uint64_t>(header.size);
        const bool has_space = size <= bytes_ - offset && space_->has(offset, size);
        return nb::make_tuple(header.id, has_space ? header.size : 0);
    }
    // Takes the space of the chunk, too.
    void write_header(std::uint64_t offset, std::int32_t id, std::int32_t size) const {
        check();
        const std::uint64_t end = offset + static_cast<std::uint64_t>(size);
        if (!space_->is_taken(end)) {
            {
                const WithoutGil no_gil;
                space_->take(end);
            }
            check();
        }
        store::write_header(segment_->mapping()->base() + offset, {id, size});
    }

    WriterCall writing(std::string call, nb::object mend) const { return {writing_, std::move(call), std::move(mend)}; }

    void close() const { segment_->close(); }
    void abandon() const noexcept { segment_->abandon(); }

private:
    ByteRingSegment(std::shared_ptr<core::Segment> segment, std::uint64_t bytes, std::uint64_t reserved)
        : segment_(std::move(segment)),
          bytes_(bytes),
          space_(std::make_shared<store::RingSpace>(*segment_, bytes, reserved)) {}

    std::shared_ptr<core::Segment> segment_;
    std::uint64_t bytes_;
    std::shared_ptr<store::RingSpace> space_;
    std::shared_ptr<Writing> writing_ = std::make_shared<Writing>();
};

}  // namespace memlane::bindings
