// A memory as weak as C++20 allows, one step at a time: what a load may return, and where a store may be placed.
//
// For every location it keeps all values ever stored ("messages") in modification order, and for every thread what it
// knows of them (its view):
//
//   load          may return any message that is not older than the one the thread knows. The thread then knows that
//                 message; if the load acquires, also everything that the message carries
//   store         takes any place in the modification order after the message the thread knows, not only the last. If
//                 the store releases, its message carries everything that the thread knows
//   update        (read-modify-write) takes the place right after the message it reads; passes on what that carries
//   full fence    turns earlier relaxed loads into acquires and later relaxed stores into releases. All full fences
//                 have one order, in which each knows what the ones before it knew
//   plain access  is a data race unless every plain access of another thread to the same byte, one of the two being a
//                 write, happened before it
//
// These are the rules of C++20 (as formulated by Lahav et al., "Repairing sequential consistency in C/C++11", PLDI
// 2017, with the views of Kang et al., "A promising semantics", POPL 2017), with two exceptions: a load never returns a
// value that is stored later (no load buffering, as in the former), and seq_cst loads, stores and updates count only as
// acquire and release, which is weaker.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace memlane::weak {

inline constexpr std::size_t kMostThreads = 4;
inline constexpr std::size_t kMostLocations = 64;

// A place in the modification order of a location. Free numbers between two places are room for later stores.
using Time = std::uint32_t;

enum class Order { relaxed, acquire, release, acquire_release, full };

constexpr bool acquires(Order o) { return o != Order::relaxed && o != Order::release; }
constexpr bool releases(Order o) { return o != Order::relaxed && o != Order::acquire; }

inline constexpr std::size_t kInitial = SIZE_MAX;

// What a thread knows, or a message carries: a message of every location, and the last known step of every thread.
struct View {
    std::array<Time, kMostLocations> times{};
    std::array<std::uint32_t, kMostThreads> steps{};

    void join(const View& other);
    void join_times(const View& other);
};

struct Message {
    Time time;
    std::uint64_t value;
    std::size_t number;  // how many were stored before it
    std::size_t step;    // of the execution that stored it; kInitial for an initial value
    View carried;
};

// Bytes that threads share. The model ignores accesses to others.
struct Watched {
    const std::byte* begin;
    std::size_t bytes;
};

class Memory {
public:
    // Forgets everything. All threads know the values in `watched` at the start.
    void reset(const std::vector<Watched>& watched);

    bool is_watched(const void* address, std::size_t bytes = 1) const;
    // The location at an address. A new one starts with the value that is there now.
    std::size_t location(const void* address, std::size_t bytes);
    const void* address_of(std::size_t location) const { return locations_[location].address; }

    std::size_t count(std::size_t location) const { return locations_[location].messages.size(); }

    // The messages that a load may return, or after which a store or update may be placed; the latest first, which a
    // strong memory would take. to_load() leaves out those numbered below `from`. Valid until the next call.
    const std::vector<std::size_t>& to_load(std::size_t thread, std::size_t location, std::size_t from = 0,
                                            Time not_before = 0);
    const std::vector<std::size_t>& to_store(std::size_t thread, std::size_t location);

    const Message& load(std::size_t thread, std::size_t location, std::size_t index, Order order);
    void store(std::size_t thread, std::size_t location, std::size_t behind, std::uint64_t value, Order order,
               std::size_t step);
    // Adds and returns the value before.
    std::uint64_t add(std::size_t thread, std::size_t location, std::size_t behind, std::uint64_t amount, Order order,
                      std::size_t step);
    void fence(std::size_t thread, Order order);

    enum class Verdict { fine, race, mixed };
    // `mixed`: the byte was accessed as an atomic before.
    Verdict plain(std::size_t thread, const void* address, std::size_t bytes, bool is_write);

    const View& view_of(std::size_t thread) const { return threads_[thread].now; }

private:
    struct Location {
        const void* address = nullptr;
        std::size_t bytes = 0;
        std::vector<Message> messages;  // by time
    };
    struct Thread {
        View now;
        View if_acquired;  // what its relaxed loads would have added
        View released;     // what it knew at its last release fence
    };
    // The steps at which a byte was last accessed.
    struct Cell {
        std::uint32_t written = 0;
        std::uint32_t writer = 0;
        std::array<std::uint32_t, kMostThreads> read{};
        bool is_atomic = false;
    };

    Cell& cell(const std::byte* at);
    void insert(std::size_t thread, std::size_t location, std::size_t behind, Message made, Order order);
    std::size_t oldest_readable(std::size_t thread, std::size_t location, Time not_before) const;
    bool is_room_behind(const Location& location, std::size_t index) const;

    std::vector<Watched> watched_;
    std::vector<std::vector<Cell>> cells_;  // of each watched range
    std::vector<Cell*> touched_;
    std::array<Location, kMostLocations> locations_;
    std::size_t location_count_ = 0;
    std::array<Thread, kMostThreads> threads_;
    View fences_;
    std::vector<std::size_t> ways_;
};

}  // namespace memlane::weak
