// Every pair of sync points of a ring's writer and reader, in both orders: every message arrives once, whole and in
// order (of the latest, the last one does), and no end is left asleep. A writer with its steps in a wrong order must fail in at least one of these.
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <regex>

#include "conductor.hpp"
#include "rings.hpp"

using namespace memlane;
using namespace memlane::testing;
using core::Status;

namespace {

#define RIGHT(condition)                        \
    do {                                        \
        if (!(condition)) broken(#condition);   \
    } while (false)

constexpr std::uint64_t kBytes = 64;
constexpr std::uint64_t kLargeBytes = 3 * core::kPage;

void fill(std::byte* to, std::uint64_t bytes, std::uint64_t number) {
    for (std::uint64_t i = 0; i < bytes; ++i) to[i] = static_cast<std::byte>(number * 7 + i);
}

struct Shape {
    std::uint64_t readers = 1;  // one thread uses their ends in turn
    std::uint64_t chunks = 1;
    std::uint64_t messages = 3;
    std::uint64_t stay = 3;            // messages that the readers take before they close
    std::optional<std::uint64_t> large = std::nullopt;  // the message that does not fit a chunk
    bool lends = false;                                 // no message fits; readers keep each while they take the next
    bool is_late = false;                               // nobody waits for the only reader before it has attached
    bool is_latest = false;                             // it keeps the latest of a message while it takes the next

    bool is_large(std::uint64_t i) const { return lends || large == i; }
    std::uint64_t bytes(std::uint64_t i) const { return is_large(i) ? kLargeBytes : kBytes; }
};

// Shared by both roles: the shape, and the segment once there is a handle.
struct Meeting {
    explicit Meeting(const Shape& s) : shape(s), geometry{s.readers, kBytes, s.chunks} {}
    const Shape shape;
    const RingGeometry geometry;
    std::shared_ptr<core::Segment> segment;  // the writer's
    std::atomic<bool> has_handle{false};
    std::atomic<bool> has_attached{false};
};

// Not of memlane's form: there are thousands, and other tests look for segments that memlane left behind.
std::string prefix_of(pid_t pid) { return "orders-" + std::to_string(pid) + "-"; }

void create(Meeting& m) {
    static std::uint64_t count = 0;
    const std::string name = prefix_of(::getpid()) + std::to_string(++count);
    const std::uint64_t features = (m.shape.is_late ? core::kLateReaders : 0) | (m.shape.is_latest ? core::kLatestOnly : 0);
    m.segment = core::Segment::create(broadcast::plan_of(m.geometry, 0, features), new_id(), name, {{0, m.geometry.total_bytes()}},
                                      RingWriter::kSlot);
}

void hand_over(Meeting& m) {
    m.has_handle = true;
    m.has_handle.notify_all();
}

void write_all(Meeting& m, const std::function<void(int)>& begin_round) {
    begin_round(0);
    create(m);
    RingWriter writer(m.segment, m.geometry, kBytes, m.shape.lends ? 1u << 20 : 0);
    hand_over(m);
    const auto never = os::Deadline::never();
    for (std::uint64_t i = 0; i < m.shape.messages; ++i) {
        begin_round(static_cast<int>(i) + 1);
        const bool is_large = m.shape.is_large(i);
        const std::uint64_t bytes = m.shape.bytes(i);
        if (writer.has_extents()) writer.tend(is_large);
        auto claim = writer.begin_nowait(is_large ? 0 : bytes);
        if (claim.status == Status::would_block) claim = writer.begin(is_large ? 0 : bytes, never, keep_waiting);
        RIGHT(claim.status == Status::ok);
        if (is_large) {
            std::vector<std::byte> text(bytes);
            fill(text.data(), bytes, i);
            const auto write = [&](broadcast::ExtentWriter& to) {
                SYNC_STEP(spill);
                return to.put(0, bytes, text.data());
            };
            RIGHT(claim.loan->spill(bytes, never, write, keep_waiting, m.shape.lends).status == Status::ok);
        } else {
            SYNC_STEP(fill);
            fill(claim.loan->chunk(), bytes, i);
        }
        claim.loan->publish(ChunkKind::object, bytes);
    }
    begin_round(static_cast<int>(m.shape.messages) + 1);
    writer.announce_close();
}

struct Attached {
    std::shared_ptr<core::Segment> segment;
    std::unique_ptr<RingReader> end;
    std::unique_ptr<broadcast::Lease> kept = nullptr;
};

std::vector<Attached> attach(Meeting& m) {
    m.has_handle.wait(false);
    std::vector<Attached> readers;
    for (std::uint64_t r = 0; r < m.geometry.n_reader; ++r) {
        auto segment = core::Segment::attach(m.segment->name(), broadcast::plan_of(m.geometry), std::nullopt, 1 + r);
        readers.push_back({segment, std::make_unique<RingReader>(segment, m.geometry, r)});
    }
    m.segment->remove_name();
    return readers;
}

core::Taken<RingReader::Sample> next_of(RingReader& reader) {
    auto sample = reader.begin_nowait();
    return sample.status == Status::would_block ? reader.begin(os::Deadline::never(), keep_waiting) : std::move(sample);
}

void read_all(Meeting& m, const std::function<void(int)>& begin_round) {
    begin_round(0);
    std::vector<Attached> readers = attach(m);
    for (std::uint64_t i = 0; i < std::min(m.shape.stay, m.shape.messages); ++i) {
        begin_round(static_cast<int>(i) + 1);
        const std::uint64_t bytes = m.shape.bytes(i);
        std::vector<std::byte> expected(bytes), received(bytes);
        fill(expected.data(), bytes, i);
        for (Attached& reader : readers) {
            auto next = next_of(*reader.end);
            RIGHT(next.status == Status::ok);
            RingReader::Sample& sample = *next.loan;
            const auto descriptor = sample.descriptor();
            if (descriptor) {
                RIGHT(descriptor->length == bytes);
                RIGHT(sample.copy_out(*descriptor, 0, bytes, received.data()));
            } else {  // filled by a writer of the documented part only
                std::memcpy(received.data(), sample.chunk(), bytes);
            }
            RIGHT(received == expected);
            auto lease = m.shape.lends ? sample.lease(*descriptor) : nullptr;
            RIGHT(!m.shape.lends || lease);
            sample.finish(bytes);
            if (reader.kept) {
                fill(expected.data(), bytes, i - 1);
                RIGHT(std::memcmp(reader.kept->memory(), expected.data(), bytes) == 0);
            }
            reader.kept = std::move(lease);
        }
    }
    begin_round(static_cast<int>(m.shape.stay) + 1);
    for (Attached& reader : readers) {
        if (m.shape.stay == m.shape.messages) RIGHT(next_of(*reader.end).status == Status::peer_closed);
        reader.end->own_leases();
        reader.end->announce_close();
    }
}

// Whatever is sent once the writer has counted this reader.
void read_late(Meeting& m, const std::function<void(int)>& begin_round) {
    begin_round(0);
    std::vector<Attached> readers = attach(m);
    RingReader& reader = *readers.front().end;
    for (int round = 1;; ++round) {
        begin_round(round);
        auto next = next_of(reader);
        if (next.status == Status::peer_closed) break;
        RIGHT(next.status == Status::ok);
        std::vector<std::byte> expected(kBytes);
        fill(expected.data(), kBytes, next.loan->position());
        RIGHT(std::memcmp(next.loan->chunk(), expected.data(), kBytes) == 0);
        next.loan->finish(kBytes);
        RIGHT(reader.position() <= m.shape.messages);
    }
    RIGHT(reader.messages() == 0 || reader.position() == m.shape.messages);
    reader.announce_close();
}

// Whatever is the latest when it looks, to the last message. Keeps each while it takes the next one.
void read_latest(Meeting& m, const std::function<void(int)>& begin_round) {
    begin_round(0);
    std::vector<Attached> readers = attach(m);
    RingReader& reader = *readers.front().end;
    std::vector<std::byte> expected(kBytes);
    std::optional<std::pair<std::uint64_t, const std::byte*>> kept;
    std::uint64_t hold = 0;
    for (int round = 1;; ++round) {
        begin_round(round);
        auto next = next_of(reader);
        if (next.status == Status::peer_closed) break;
        RIGHT(next.status == Status::ok);
        const std::uint64_t position = next.loan->position();
        const std::byte* const chunk = next.loan->chunk();
        RIGHT(!kept || position > kept->first);
        fill(expected.data(), kBytes, position);
        RIGHT(std::memcmp(chunk, expected.data(), kBytes) == 0);
        const std::uint64_t before = std::exchange(hold, reader.new_hold());
        next.loan->keep(hold, kBytes);
        if (kept) {
            fill(expected.data(), kBytes, kept->first);
            RIGHT(std::memcmp(kept->second, expected.data(), kBytes) == 0);
            reader.release_held(before);
        }
        kept.emplace(position, chunk);
    }
    RIGHT(kept && kept->first == m.shape.messages - 1);
    RIGHT(reader.messages() + reader.skipped() == m.shape.messages);
    reader.announce_close();
}

using WriteAll = std::function<void(Meeting&, const std::function<void(int)>&)>;

Conductor conduct(const std::string& name, const Shape& shape, const WriteAll& write = write_all) {
    return {name, {"writer", "reader"}, [shape, write] {
                const auto meeting = std::make_shared<Meeting>(shape);
                return Play{{[meeting, write](const auto& begin_round) { write(*meeting, begin_round); },
                             [meeting](const auto& begin_round) {
                                 const auto read = meeting->shape.is_late ? read_late : meeting->shape.is_latest ? read_latest : read_all;
                                 read(*meeting, begin_round);
                             }}};
            }};
}

// A writer that knows only the documented part, with steps that can be reordered.
enum class Step { retract, data, reset, publish, wake };
using Steps = std::vector<Step>;

void write_in_steps(const Steps& steps, Meeting& m, const std::function<void(int)>& begin_round) {
    begin_round(0);
    create(m);
    const broadcast::Ring ring(*m.segment, m.geometry);
    const core::Participants participants(*m.segment);
    participants.join(RingWriter::kSlot, os::own_identity());
    hand_over(m);
    core::Spinner spinner(2, os::usable_cores());
    for (std::uint64_t i = 0; i < m.shape.messages; ++i) {
        begin_round(static_cast<int>(i) + 1);
        const std::uint64_t chunk = ring.chunk_at(i);
        const auto is_free = [&] {
            if (core::load_relaxed(ring.written(chunk)) == 0) return true;
            SYNC_LOAD(consume);
            return core::load_acquire(ring.consumed_by(chunk, 0)) != 0;
        };
        const core::WaitPoint point{&ring.waits().consumed, &ring.waits().writer_parked};
        core::wait_until(point, spinner, os::Deadline::never(), is_free, keep_waiting);
        for (const Step step : steps) {
            switch (step) {
                case Step::retract:
                    SYNC_STORE(retract);
                    core::store_release<std::uint8_t>(ring.written(chunk), 0);
                    break;
                case Step::data:
                    SYNC_STEP(fill);
                    fill(ring.data(chunk), kBytes, i);
                    break;
                case Step::reset:
                    SYNC_STORE(reset);
                    core::store_release<std::uint8_t>(ring.consumed_by(chunk, 0), 0);
                    break;
                case Step::publish:
                    SYNC_STORE(publish);
                    core::store_release<std::uint8_t>(ring.written(chunk), 1);
                    break;
                case Step::wake: core::wake_parked(&ring.waits().published, ring.parked_readers()); break;
            }
        }
    }
    begin_round(static_cast<int>(m.shape.messages) + 1);
    participants.leave(RingWriter::kSlot);
    core::wake_always(&ring.waits().published);
}

void drive_in_steps(const char* name, const Steps& steps) {
    const auto write = [steps](Meeting& m, const auto& begin_round) { write_in_steps(steps, m, begin_round); };
    conduct(name, {.messages = 2, .stay = 2}, write).drive_all();
}

// Runs in its own process, which ends at the first order that fails.
void is_caught(const char* name, const Steps& steps) {
    std::printf("%s: must fail\n", name);
    std::fflush(stdout);
    const pid_t pid = ::fork();
    if (pid == 0) {
        drive_in_steps(name, steps);
        std::_Exit(0);
    }
    CHECK(exit_code(pid) == 1);
    // It may have ended before its segment's name was removed.
    for (const auto& entry : std::filesystem::directory_iterator(core::kDirectory))
        if (entry.path().filename().string().starts_with(prefix_of(pid))) std::filesystem::remove(entry.path());
}

void wrong_orders_are_caught() {
    using enum Step;
    drive_in_steps("documented order", {retract, data, reset, publish, wake});
    is_caught("flags reset while `written` stands", {reset, retract, data, publish, wake});
    is_caught("`written` set before the flags are reset", {retract, data, publish, reset, wake});
    is_caught("`written` set before the data is there", {retract, reset, publish, data, wake});
    is_caught("sleepers looked for before `written` is set", {retract, data, reset, wake, publish});
}

std::set<std::string> points_in_the_code() {
    std::set<std::string> points;
    const std::regex mark(R"(SYNC_(STORE|LOAD)\((\w+)\);)");
    for (const char* layer : {"core", "broadcast"}) {
        for (const auto& entry : std::filesystem::directory_iterator(std::string(MEMLANE_NATIVE) + "/" + layer)) {
            std::ifstream file(entry.path());
            const std::string text{std::istreambuf_iterator<char>(file), {}};
            for (std::sregex_iterator at(text.begin(), text.end(), mark), end; at != end; ++at)
                points.insert((*at)[2].str() + ((*at)[1] == "STORE" ? ".store" : ".load"));
        }
    }
    return points;
}

}  // namespace

int main() {
    wrong_orders_are_caught();
    std::set<std::string> reached;
    Conductor::ByPoint orders;
    std::size_t driven = 0;
    std::size_t impossible = 0;
    for (const auto& [name, shape] : std::vector<std::pair<std::string, Shape>>{
             {"one chunk", {}},
             {"a large message behind another", {.chunks = 2, .messages = 2, .stay = 2, .large = 1}},
             {"two readers", {.readers = 2, .messages = 2, .stay = 2}},
             {"messages that are lent", {.messages = 3, .stay = 3, .lends = true}},
             {"a reader that leaves", {.messages = 3, .stay = 1}},
             {"a late reader", {.messages = 3, .stay = 3, .is_late = true}},
             {"the latest message", {.chunks = 3, .messages = 3, .is_latest = true}},
         }) {
        Conductor conductor = conduct(name, shape);
        conductor.drive_all();
        driven += conductor.driven();
        impossible += conductor.impossible();
        reached.insert(conductor.points().begin(), conductor.points().end());
        for (const auto& [pair, why_not] : conductor.orders()) {
            std::string& known = orders.try_emplace(pair, why_not).first->second;
            if (why_not.empty()) known.clear();
        }
    }
    std::size_t never = 0;
    std::map<std::pair<std::string, std::string>, std::string> reasons;  // by second point and reason: the first points
    for (const auto& [pair, why_not] : orders) {
        if (why_not.empty()) continue;
        ++never;
        reasons[{pair.second, why_not}] += (reasons.contains({pair.second, why_not}) ? ", " : "") + pair.first;
    }
    for (const auto& [reason, points] : reasons)
        std::printf("impossible before %s, because %s: %s\n", reason.first.c_str(), reason.second.c_str(), points.c_str());
    for (const std::string& point : points_in_the_code())
        if (!reached.contains(point)) broken("nobody came to " + point);
    std::printf("orders: %zu of %zu orders of two points driven, %zu impossible; %zu times in all rounds, %zu impossible\n",
                orders.size() - never, orders.size(), never, driven, impossible);
}
