#include "memory.hpp"

#include <algorithm>

#include "../check.hpp"

namespace memlane::weak {

namespace {

constexpr Time kGap = 1u << 16;

std::uint64_t value_at(const void* address, std::size_t bytes) {
    switch (bytes) {
        case 1: return *static_cast<const std::uint8_t*>(address);
        case 4: return *static_cast<const std::uint32_t*>(address);
        default: return *static_cast<const std::uint64_t*>(address);
    }
}

}  // namespace

void View::join_times(const View& other) {
    for (std::size_t i = 0; i < kMostLocations; ++i) times[i] = std::max(times[i], other.times[i]);
}

void View::join(const View& other) {
    join_times(other);
    for (std::size_t i = 0; i < kMostThreads; ++i) steps[i] = std::max(steps[i], other.steps[i]);
}

void Memory::reset(const std::vector<Watched>& watched) {
    for (Cell* one : touched_) *one = {};
    touched_.clear();
    watched_ = watched;
    cells_.resize(watched.size());
    for (std::size_t i = 0; i < watched.size(); ++i) cells_[i].resize(watched[i].bytes);
    for (std::size_t i = 0; i < location_count_; ++i) locations_[i].messages.clear();
    location_count_ = 0;
    threads_.fill({});
    fences_ = {};
    for (std::size_t i = 0; i < kMostThreads; ++i) threads_[i].now.steps[i] = 1;
}

bool Memory::is_watched(const void* address, std::size_t bytes) const {
    const auto* at = static_cast<const std::byte*>(address);
    return std::any_of(watched_.begin(), watched_.end(), [&](const Watched& one) {
        return at >= one.begin && at + bytes <= one.begin + one.bytes;
    });
}

Memory::Cell& Memory::cell(const std::byte* at) {
    for (std::size_t i = 0;; ++i) {
        CHECK(i < watched_.size());
        const auto offset = static_cast<std::size_t>(at - watched_[i].begin);
        if (at < watched_[i].begin || offset >= watched_[i].bytes) continue;
        touched_.push_back(&cells_[i][offset]);
        return cells_[i][offset];
    }
}

std::size_t Memory::location(const void* address, std::size_t bytes) {
    for (std::size_t i = 0; i < location_count_; ++i)
        if (locations_[i].address == address) {
            CHECK(locations_[i].bytes == bytes);
            return i;
        }
    CHECK(location_count_ < kMostLocations);
    Location& made = locations_[location_count_];
    made.address = address;
    made.bytes = bytes;
    made.messages.push_back({0, value_at(address, bytes), 0, kInitial, {}});
    for (std::size_t i = 0; i < bytes; ++i) {
        Cell& one = cell(static_cast<const std::byte*>(address) + i);
        CHECK(one.written == 0 && one.read == decltype(one.read){});  // nothing is both plain and atomic
        one.is_atomic = true;
    }
    return location_count_++;
}

std::size_t Memory::oldest_readable(std::size_t thread, std::size_t location, Time not_before) const {
    const auto& messages = locations_[location].messages;
    const Time known = std::max(threads_[thread].now.times[location], not_before);
    std::size_t i = messages.size() - 1;
    while (messages[i].time > known) --i;
    return i;
}

// There always is after the last message; between two messages, unless the second is an update of the first.
bool Memory::is_room_behind(const Location& location, std::size_t index) const {
    return index + 1 == location.messages.size() ||
           location.messages[index + 1].time - location.messages[index].time > 1;
}

const std::vector<std::size_t>& Memory::to_load(std::size_t thread, std::size_t location, std::size_t from,
                                                Time not_before) {
    ways_.clear();
    const std::size_t oldest = oldest_readable(thread, location, not_before);
    for (std::size_t i = locations_[location].messages.size(); i-- > oldest;)
        if (locations_[location].messages[i].number >= from) ways_.push_back(i);
    return ways_;
}

const std::vector<std::size_t>& Memory::to_store(std::size_t thread, std::size_t location) {
    ways_.clear();
    const std::size_t oldest = oldest_readable(thread, location, 0);
    for (std::size_t i = locations_[location].messages.size(); i-- > oldest;)
        if (is_room_behind(locations_[location], i)) ways_.push_back(i);
    return ways_;
}

const Message& Memory::load(std::size_t thread, std::size_t location, std::size_t index, Order order) {
    const Message& read = locations_[location].messages[index];
    Thread& t = threads_[thread];
    t.now.times[location] = std::max(t.now.times[location], read.time);
    t.if_acquired.join(read.carried);
    if (acquires(order)) t.now.join(read.carried);
    return read;
}

void Memory::store(std::size_t thread, std::size_t location, std::size_t behind, std::uint64_t value, Order order,
                   std::size_t step) {
    const auto& messages = locations_[location].messages;
    const bool is_last = behind + 1 == messages.size();
    const Time before = messages[behind].time;
    const Time time = is_last ? before + kGap : before + (messages[behind + 1].time - before) / 2;
    CHECK(time > before + 1);  // the place right after it is an update's
    insert(thread, location, behind, {time, value, messages.size(), step, {}}, order);
}

std::uint64_t Memory::add(std::size_t thread, std::size_t location, std::size_t behind, std::uint64_t amount,
                          Order order, std::size_t step) {
    const Message read = load(thread, location, behind, order);
    insert(thread, location, behind, {read.time + 1, read.value + amount, count(location), step, read.carried}, order);
    return read.value;
}

void Memory::insert(std::size_t thread, std::size_t location, std::size_t behind, Message made, Order order) {
    Thread& t = threads_[thread];
    t.now.times[location] = made.time;
    made.carried.join(releases(order) ? t.now : t.released);
    made.carried.times[location] = made.time;
    ++t.now.steps[thread];  // what the thread does from here on is not carried
    auto& messages = locations_[location].messages;
    messages.insert(messages.begin() + static_cast<std::ptrdiff_t>(behind) + 1, made);
}

void Memory::fence(std::size_t thread, Order order) {
    Thread& t = threads_[thread];
    if (acquires(order)) t.now.join(t.if_acquired);
    if (order == Order::full) {
        t.now.join_times(fences_);
        fences_.join_times(t.now);
    }
    if (releases(order)) {
        t.released = t.now;
        ++t.now.steps[thread];
    }
}

Memory::Verdict Memory::plain(std::size_t thread, const void* address, std::size_t bytes, bool is_write) {
    const auto& known = threads_[thread].now.steps;
    for (std::size_t i = 0; i < bytes; ++i) {
        Cell& one = cell(static_cast<const std::byte*>(address) + i);
        if (one.is_atomic) return Verdict::mixed;
        if (one.written > known[one.writer]) return Verdict::race;
        if (is_write) {
            for (std::size_t other = 0; other < kMostThreads; ++other)
                if (one.read[other] > known[other]) return Verdict::race;
            one.written = known[thread];
            one.writer = static_cast<std::uint32_t>(thread);
        } else {
            one.read[thread] = known[thread];
        }
    }
    return Verdict::fine;
}

}  // namespace memlane::weak
