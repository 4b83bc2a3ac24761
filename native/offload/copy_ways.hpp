// How copies between this host and a GPU are queued: the only place that chooses, a table and the function that reads it.
//
// NOT MEASURED YET: no GPU has run it. The rows are what CUDA's manual suggests, and sizes and directions make no difference.
// `make gpu` measures every way by direction, number and size of copies on a machine with a GPU, and says which was fastest;
// its table goes to docs/design/moving-blocks.md, and the rows below follow it.
#pragma once

#include <cstddef>
#include <string>

namespace memlane::offload {

// cudaMemcpyKind.
enum class Direction : int { to_device = 1, to_host = 2 };

// cudaMemcpy2DAsync for each copy, one cudaMemcpyBatchAsync for up to kMostInBatch, cudaMemcpyAsync for each.
enum class Way : unsigned { two_dimensional, batch, loop };

// The way of contiguous copies. Rows at a regular step always go two-dimensionally: the others would copy the first row only.
struct WayRow {
    Direction direction;
    std::size_t copies;  // at least so many
    std::size_t bytes;   // of at least so many bytes on average
    Way way;
};

inline constexpr WayRow kWays[] = {
    {Direction::to_device, 2, 0, Way::batch},
    {Direction::to_host, 2, 0, Way::batch},
};

// Of one cudaMemcpyBatchAsync. Drivers have failed with 50,000 (vLLM, issue 49276); what is best is not measured yet.
inline constexpr std::size_t kMostInBatch = 4096;

// That of the first row that fits, or the loop. Without `has_batches` (CUDA before 12.8; the legacy default stream) no batch fits.
constexpr Way way_of(Direction direction, std::size_t copies, std::size_t bytes, bool has_batches) noexcept {
    for (const WayRow& row : kWays)
        if (row.direction == direction && row.copies <= copies && row.bytes <= bytes && (has_batches || row.way != Way::batch))
            return row.way;
    return Way::loop;
}

// The ways that one move took.
class WaysTaken {
public:
    void add(Way way) noexcept { bits_ |= 1U << static_cast<unsigned>(way); }

    // "2d", "batch", "loop", or several joined by "+"; "none" if nothing was copied.
    std::string names() const {
        constexpr const char* kNames[] = {"2d", "batch", "loop"};  // in the order of Way
        std::string joined;
        for (unsigned way = 0; way < 3; ++way)
            if ((bits_ >> way & 1U) != 0) joined += (joined.empty() ? "" : "+") + std::string(kNames[way]);
        return joined.empty() ? "none" : joined;
    }

private:
    unsigned bits_ = 0;
};

}  // namespace memlane::offload
