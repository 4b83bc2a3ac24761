// Frame tables parsed from untrusted bytes, and the writer's records of extents, compared with a simple model.
#include <cstring>
#include <random>
#include <vector>

#include "broadcast/extents.hpp"
#include "broadcast/frames.hpp"
#include "check.hpp"

using namespace memlane;
using broadcast::Extent;
using broadcast::Extents;
using broadcast::FrameTable;

namespace {

std::optional<FrameTable> parse(const std::vector<std::byte>& message) {
    return FrameTable::parse(message.size(), [&](std::uint64_t offset, std::uint64_t bytes, void* to) {
        if (offset > message.size() || bytes > message.size() - offset) return false;
        std::memcpy(to, message.data() + offset, bytes);
        return true;
    });
}

std::vector<std::byte> message_of(const FrameTable& table) {
    std::vector<std::byte> message(table.total());
    const auto header = table.header();
    std::memcpy(message.data(), &header, sizeof header);
    std::memcpy(message.data() + sizeof header, table.sizes().data(), table.sizes().size_bytes());
    return message;
}

void tables_come_back() {
    for (const std::vector<std::uint64_t>& sizes : {std::vector<std::uint64_t>{4096}, {5000, 4096, 100'000}}) {
        const FrameTable table(77, sizes);
        const auto read = parse(message_of(table));
        CHECK(read && read->total() == table.total() && read->buffers().size() == sizes.size());
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            CHECK(read->buffers()[i].offset % broadcast::kFrameAlignment == 0);
            CHECK(read->buffers()[i].bytes == sizes[i]);
        }
    }
}

// Whatever the header says, the table is refused, or its parts lie in the message, and its buffers together fit in it.
void forged_tables_are_refused() {
    std::mt19937_64 random(1);
    std::vector<std::byte> message = message_of(FrameTable(100, {4096, 8192, 5000}));
    const std::vector<std::byte> genuine = message;
    for (int round = 0; round < 200'000; ++round) {
        message = genuine;
        const std::size_t at = 8 * (random() % 5);
        std::uint64_t value = random();
        switch (random() % 4) {
            case 0: value %= message.size() + 10; break;
            case 1: value = UINT64_MAX - value % 5000; break;
            case 2: value = 0; break;
            default: break;
        }
        std::memcpy(message.data() + at, &value, sizeof value);
        const auto table = parse(message);
        if (!table) continue;
        std::uint64_t sum = 0;
        for (const auto& frame : table->buffers()) {
            CHECK(frame.bytes >= broadcast::kLeastOutOfBand);
            CHECK(frame.bytes <= message.size() && frame.offset <= message.size() - frame.bytes);
            sum += frame.bytes;
        }
        CHECK(sum <= message.size());
    }
    const broadcast::MessageHeader no_buffers{0, 100};  // such a message has no table
    message.assign(broadcast::kFrameAlignment + no_buffers.stream_bytes, std::byte{0});
    std::memcpy(message.data(), &no_buffers, sizeof no_buffers);
    CHECK(!parse(message));
    for (std::size_t cut = 0; cut < 100; ++cut) {
        message = genuine;
        message.resize(cut);
        CHECK(!parse(message));
    }
}

// Random takes, ends of laps, cancels and trims: live extents never overlap, and the file does not grow needlessly.
void extents_never_overlap() {
    os::FileDescriptor file = os::create_unnamed("/dev/shm");
    os::resize(file, 1u << 30);
    constexpr std::uint64_t kBegin = 8192;
    for (unsigned seed = 0; seed < 60; ++seed) {
        std::mt19937 random(seed);
        Extents extents(kBegin, (random() % 3) * (1u << 20));
        struct Live {
            Extent extent;
            std::uint64_t position;
        };
        std::vector<Live> live;
        const auto nobody = [](std::uint32_t) { return false; };
        std::uint64_t position = 0;
        std::uint64_t most = 0;
        for (int step = 0; step < 400; ++step) {
            const auto what = random() % 10;
            if (what < 5) {
                const std::uint64_t bytes = 1 + random() % 200'000;
                const Extent taken = extents.take(bytes, position);
                CHECK(taken.bytes >= bytes && taken.offset >= kBegin);
                for (const Live& other : live)
                    CHECK(taken.offset + taken.bytes <= other.extent.offset ||
                          other.extent.offset + other.extent.bytes <= taken.offset);
                if (what == 0) {
                    extents.cancel(file);
                } else {
                    live.push_back({taken, position});
                }
                ++position;
            } else if (what < 9 && !live.empty()) {
                const std::uint64_t over = live[random() % live.size()].position;
                CHECK(extents.reclaim(file, [&](std::uint64_t lap) { return lap == over; }, nobody));
                std::erase_if(live, [&](const Live& one) { return one.position == over; });
            } else {
                extents.trim(file);
                CHECK(extents.warm_bytes() == 0);
            }
            if (live.size() > 10) {
                CHECK(extents.reclaim(file, [](std::uint64_t) { return true; }, nobody));
                live.clear();
            }
            most = std::max(most, extents.end());
        }
        CHECK(most < kBegin + 8 * 11 * 204'800ull);
    }
}

// Lent extents outlive their laps, and nothing waits for them; rows of leases become free again.
void lent_extents_outlive_their_turns() {
    os::FileDescriptor file = os::create_unnamed("/dev/shm");
    os::resize(file, 1u << 20);
    Extents extents(0, 4 * core::kPage, 2);
    const auto always = [](std::uint64_t) { return true; };
    const auto nobody = [](std::uint32_t) { return false; };
    const auto all = [](std::uint32_t) { return true; };
    for (std::uint64_t round = 0; round < 5; ++round) {
        CHECK(extents.can_lend(2 * core::kPage));
        const Extent first = extents.take(2 * core::kPage, 0, true);
        CHECK(first.lease != 0 && !extents.can_lend(3 * core::kPage));
        const Extent second = extents.take(core::kPage, 1, true);
        CHECK(second.lease != 0 && second.lease != first.lease);
        CHECK(extents.can_lend(core::kPage) && extents.take(core::kPage, 2, true).lease == 0);  // no row
        CHECK(extents.reclaim(file, always, all));              // only the third is free
        CHECK(extents.awaited_bytes() == 0 && extents.has_any());
        CHECK(extents.reclaim(file, always, [&](std::uint32_t row) { return row == second.lease; }));
        const Extent beyond = extents.take(4 * core::kPage, 3, true);  // the second is in the way
        CHECK(beyond.lease == 0 && !extents.is_in_pool(beyond) && extents.awaited_bytes() == 4 * core::kPage);
        CHECK(extents.reclaim(file, always, nobody) && !extents.has_any());
        CHECK(extents.take(core::kPage, 4, true).lease != 0);
        extents.unlend();
        CHECK(extents.latest().lease == 0 && extents.reclaim(file, always, all));
    }
}

}  // namespace

int main() {
    tables_come_back();
    forged_tables_are_refused();
    extents_never_overlap();
    lent_extents_outlive_their_turns();
    std::puts("messages: 4 properties hold");
}
