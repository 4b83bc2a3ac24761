// A memory as weak as C++20 allows, one step at a time: what a load may return, where a store may go.
//
// Of every location it keeps all values ever stored ("messages") in their modification order, and of every thread
// what it knows of them (its view):
//
//   load          may return any message that is not older than the one the thread knows; relaxed, it then knows that
//                 message; acquire, also all that the message carries
//   store         takes any place in the modification order behind the message the thread knows, not only the last;
//                 release, its message carries all that the thread knows
//   update        (read-modify-write) takes the place right behind the message it reads; passes on what that carries
//   full fence    turns earlier relaxed loads into acquires and later relaxed stores into releases; and all full
//                 fences stand in one order, in which each knows what the ones before it knew
//   plain access  is a data race unless every plain access of another thread to the same byte, one of the two being a
//                 write, happened before it
//
// These are the rules of C++20 (in the form of Lahav and others, "Repairing sequential consistency in C/C++11", PLDI
// 2017, and the views of Kang and others, "A promising semantics", POPL 2017) but for two: a load never returns a value
// that is stored later (no load buffering, as in the former), and seq_cst loads, stores and updates count as acquire
// and release only, which is weaker.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace memlane::weak {

inline constexpr std::size_t kMostThreads = 4;
inline constexpr std::size_t kMostLocations = 64;

// A place in the modification order of one location. Free numbers between two places are room for later stores.
using Time = std::uint32_t;

enum class Order { relaxed, acquire, release, acquire_release, full };

constexpr bool acquires(Order o) { return o != Order::relaxed && o != Order::release; }
constexpr bool releases(Order o) { return o != Order::relaxed && o != Order::acquire; }

inline constexpr std::size_t kInitial = SIZE_MAX;

// What somebody knows: of every location a message, of every thread up to which step it happened before.
struct View {
    std::array<Time, kMostLocations> times{};
    std::array<std::uint32_t, kMostThreads> steps{};

    void join(const View& other);
    void join_times(const View& other);
};

struct Message {
    Time time;
    std::uint64_t value;
    std::size_t number;  // how many came into being before it
    std::size_t step;    // of the execution, by which it was stored; kInitial for what was there
    View carried;
};

// Bytes that threads share: accesses to others are none of the model's business.
struct Watched {
    const std::byte* begin;
    std::size_t bytes;
};

class Memory {
public:
    // Forgets everything. `watched` holds the values that all threads know at the start.
    void reset(const std::vector<Watched>& watched);

    bool is_watched(const void* address, std::size_t bytes = 1) const;
    // The location at an address, with the value that is there now if it is new.
    std::size_t location(const void* address, std::size_t bytes);
    const void* address_of(std::size_t location) const { return locations_[location].address; }

    std::size_t count(std::size_t location) const { return locations_[location].messages.size(); }

    // The messages that a load may return, or behind which a store or update may go; the latest, which a strong memory
    // would take, first. Of those to load only such as are not numbered below `from`. Valid until the next call.
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
        View if_acquired;  // what its relaxed loads would have told it
        View released;     // what it knew at its last fence
    };
    // Of one byte: the steps at which it was last accessed.
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
