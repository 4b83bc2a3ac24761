// The test bed of the scenarios: one ring and its ends, reset before every execution.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../rings.hpp"
#include "explorer.hpp"
#include "kernel.hpp"

namespace memlane::weak {

using broadcast::ChunkDescriptor;
using broadcast::ChunkKind;
using broadcast::RingGeometry;
using broadcast::RingReader;
using broadcast::RingWriter;
using core::Status;
using testing::keep_waiting;

inline constexpr os::Deadline kNever = os::Deadline::never();

inline void require(bool holds, const char* otherwise) {
    if (!holds) Explorer::instance().fail(otherwise, "as the scenario saw it");
}

// A ring of one or two readers with all its ends in this process. clean() restores its initial state.
struct Bed {
    explicit Bed(std::uint64_t chunks, std::uint64_t readers = 1, std::uint64_t features = 0)
        : geometry{readers, 64, chunks}, segment(testing::new_segment(geometry, features)) {
        reader_segment = segment->join_same_mapping(1);
        if (readers > 1) second_segment = segment->join_same_mapping(2);
        const std::byte* base = segment->mapping()->base();
        untouched.assign(base, base + segment->bytes());
    }

    void clean(unsigned cores = 4) {
        reader.reset();
        second.reset();
        writer.reset();
        std::memcpy(segment->mapping()->base(), untouched.data(), untouched.size());
        restart_clock();
        set_cores(cores);
    }
    void make_writer() { writer.emplace(segment, geometry, 64); }
    void make_reader() {
        reader.emplace(reader_segment, geometry, 0, 0, 64);
        if (second_segment) second.emplace(second_segment, geometry, 1, 0, 64);
    }

    void start(unsigned cores = 4) {
        clean(cores);
        make_writer();
        make_reader();
    }

    // Spinning only repeats a check. An end that has spun twice in vain skips the spins of its next three waits; the
    // scenarios are explored from there.
    void tire(RingReader& end) {
        for (int i = 0; i < 3; ++i)
            CHECK(end.begin(os::Deadline::after(1), keep_waiting).status == Status::timed_out);
    }
    void tire(RingWriter& end) {
        for (int i = 0; i < 3; ++i)
            CHECK(end.begin(sizeof(std::uint64_t), os::Deadline::after(1), keep_waiting).status == Status::timed_out);
    }
    // Tires both ends. The writer has to wait for its only chunk, so the ring carries a message before the scenario.
    void start_tired(unsigned cores = 4) {
        start(cores);
        tire(*reader);
        fill_at_once(0);
        tire(*writer);
        testing::must(reader->begin_nowait()).finish(sizeof(std::uint64_t));
    }
    void fill_at_once(std::uint64_t value) { testing::put(testing::must(writer->begin_nowait(sizeof value)), value); }

    void send(std::uint64_t value) {
        auto claim = writer->begin(sizeof value, kNever, keep_waiting);
        require(claim.status == Status::ok, "wait without a result");
        testing::put(std::move(*claim.loan), value);
    }

    static std::uint64_t read(const RingReader::Sample& sample) {
        const std::optional<ChunkDescriptor> descriptor = sample.descriptor();
        require(descriptor && descriptor->length == sizeof(std::uint64_t), "torn read of a message");
        std::uint64_t value = 0;
        require(sample.copy_out(*descriptor, 0, sizeof value, &value), "torn read of a message");
        return value;
    }
    void receive(std::uint64_t expected) {
        auto sample = reader->begin(kNever, keep_waiting);
        require(sample.status == Status::ok, "wait without a result");
        take(*sample.loan, expected);
    }
    static void take(RingReader::Sample& sample, std::uint64_t expected) {
        const std::uint64_t value = read(sample);
        require(value >= expected, "repeated message");
        require(value <= expected, "skipped message");
        sample.finish(sizeof value);
    }

    std::string name_of(const void* address) const;
    Scenario scenario(const std::string& name, std::vector<std::function<void()>> threads,
                      std::function<void()> prepare) const {
        Scenario made;
        made.name = name;
        made.prepare = std::move(prepare);
        made.threads = std::move(threads);
        made.watched = {{segment->mapping()->base(), segment->bytes()}};
        made.name_of = [this](const void* address) { return name_of(address); };
        return made;
    }

    RingGeometry geometry;
    std::shared_ptr<core::Segment> segment;
    std::shared_ptr<core::Segment> reader_segment;
    std::shared_ptr<core::Segment> second_segment;
    std::vector<std::byte> untouched;
    std::optional<RingWriter> writer;
    std::optional<RingReader> reader;
    std::optional<RingReader> second;
};

inline std::string Bed::name_of(const void* address) const {
    const auto* at = static_cast<const std::byte*>(address);
    const auto* base = segment->mapping()->base();
    if (at < base || at >= base + segment->bytes()) return "reader's own memory";
    const broadcast::Ring ring(*segment, geometry);
    const core::Participants participants(*segment);
    for (std::uint64_t c = 0; c < geometry.max_chunks; ++c) {
        const std::string number = "[" + std::to_string(c) + "]";
        if (at >= ring.data(c) && at < ring.data(c) + geometry.max_chunk_bytes) return "data" + number;
        if (at == reinterpret_cast<std::byte*>(&ring.written(c))) return "written" + number;
        if (at == reinterpret_cast<std::byte*>(&ring.consumed_by(c, 0))) return "consumed" + number;
        const auto* descriptor = reinterpret_cast<const std::byte*>(&ring.descriptor(c));
        if (at >= descriptor && at < descriptor + sizeof(ChunkDescriptor)) return "descriptor" + number;
    }
    if (address == &ring.waits().latest) return "`latest`";
    if (address == &ring.waits().published) return "word of `published`";
    if (address == &ring.waits().consumed) return "word of `consumed`";
    if (address == &ring.waits().writer_parked) return "writer's `parked`";
    if (address == &ring.parked_readers()[0]) return "reader's `parked`";
    if (address == &segment->header().membership) return "word of `membership`";
    for (const std::size_t i : {0u, 1u}) {
        const auto* slot = reinterpret_cast<const std::byte*>(&participants.slot(i));
        const std::string whose = i == 0 ? "writer's " : "reader's ";
        if (at == slot) return whose + "state";
        if (at > slot && at < slot + sizeof(core::ParticipantSlot))
            return whose + "slot + " + std::to_string(at - slot);
    }
    return "segment + " + std::to_string(at - base);
}

}  // namespace memlane::weak
