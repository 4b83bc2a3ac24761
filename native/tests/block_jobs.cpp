// The jobs of a tier in virtual time, with an engine that answers late, twice and never: each block is decided once, by its
// deadline, and its row is left alone afterwards. And CRC-32C, against its definition.
#include "tiers/block_jobs.hpp"

#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string_view>
#include <vector>

#include "check.hpp"

using namespace memlane::tiers;
using memlane::os::Deadline;
using memlane::os::Nanoseconds;

namespace {

// Deadline::after counts from the real clock, so virtual times are later than it.
constexpr Nanoseconds kFarAway = Nanoseconds{1} << 62;

struct Expected {
    std::size_t blocks;
    BlockJobs::Ref job{};
    std::size_t inside = 0;   // begun, and not finished by the engine
    bool is_reported = false;
    bool is_over = false;
};

void random_engine(std::uint64_t seed) {
    std::mt19937_64 draw(seed);
    BlockJobs jobs;
    std::map<BlockJobs::Id, Expected> expected;
    std::vector<BlockJobs::Work> inside, copying, finished;
    std::set<std::pair<BlockJobs::Id, std::size_t>> begun, abandoned;
    std::map<BlockJobs::Id, bool> passed;  // deadline 0 has passed at once, the others never do by themselves
    std::map<std::pair<BlockJobs::Id, std::size_t>, BlockJobs::Work> held_back;
    const auto go_on = [&] {
        for (const auto& [of, work] : held_back) jobs.go_on(work);
        held_back.clear();
    };
    for (int step = 0; step < 4000; ++step) {
        switch (draw() % 8) {
            case 0:
            case 1: {
                const std::size_t blocks = 1 + draw() % 5;
                const bool is_late = draw() % 3 == 0;
                const auto job = jobs.submit(draw() % 2 ? Direction::store : Direction::load, std::vector<BlockRequest>(blocks),
                                             is_late ? Deadline::after(0) : Deadline::never(), 0);
                CHECK(expected.emplace(job->id, Expected{blocks, job}).second);
                passed[job->id] = is_late;
                break;
            }
            case 2:
            case 3:
                if (const auto next = jobs.begin()) {
                    inside.push_back(*next);
                    CHECK(!held_back.contains({next->job->id, next->at}));
                    begun.insert({next->job->id, next->at});
                    Expected& job = expected.at(next->job->id);
                    CHECK(!job.is_reported);
                    ++job.inside;
                }
                break;
            case 4:
                if (!inside.empty()) {
                    std::swap(inside[draw() % inside.size()], inside.back());
                    const bool is_free = !abandoned.contains({inside.back().job->id, inside.back().at});
                    CHECK(jobs.begin_copy(inside.back()) == is_free);
                    if (is_free) {
                        copying.push_back(inside.back());
                        inside.pop_back();
                    }
                }
                break;
            case 5: {
                auto& from = draw() % 2 ? copying : inside;
                if (from.empty()) break;
                std::swap(from[draw() % from.size()], from.back());
                const BlockJobs::Work work = from.back();
                from.pop_back();
                const bool was_decided = abandoned.contains({work.job->id, work.at});
                --expected.at(work.job->id).inside;
                CHECK(jobs.finish(work, {}, 1) != was_decided);
                finished.push_back(work);
                break;
            }
            case 6:
                if (!finished.empty()) CHECK(!jobs.finish(finished[draw() % finished.size()], {}, 1));  // twice
                if (draw() % 4 == 0) go_on();
                break;
            default:
                jobs.expire(static_cast<Nanoseconds>(draw() % 2));
                for (const auto& work : inside)
                    if (passed[work.job->id]) abandoned.insert({work.job->id, work.at});
                break;
        }
        if (step % 100 == 0)
            for (const auto& [id, each] : expected)
                for (std::size_t at = 0; at < each.blocks; ++at)
                    if (!abandoned.contains({id, at}) && !held_back.contains({id, at})) {
                        const bool is_held = BlockJobs::hold_back(each.job, at);
                        CHECK((is_held || BlockJobs::is_expired(each.job, at)) != begun.contains({id, at}));
                        if (is_held) held_back.emplace(std::pair(id, at), BlockJobs::Work{each.job, at});
                    }
        for (const auto& event : jobs.take_events()) {
            Expected& job = expected.at(event.id);
            if (event.is_report) {
                CHECK(!std::exchange(job.is_reported, true));
                CHECK(event.faults.size() == job.blocks);
                for (const auto& work : copying) CHECK(work.job->id != event.id);  // nobody writes to its rows
                for (const Fault fault : event.faults)
                    CHECK(fault.kind == Fault::Kind::none || (passed[event.id] && fault.kind == Fault::Kind::expired));
            }
            if (event.is_over) {
                CHECK(!std::exchange(job.is_over, true));
                CHECK(job.inside == 0);
            }
        }
    }
    go_on();
    // The engine answers everything at last.
    while (const auto next = jobs.begin()) jobs.finish(*next, {}, 2);
    for (auto* rest : {&inside, &copying})
        for (const auto& work : *rest) jobs.finish(work, {}, 2);
    for (const auto& event : jobs.take_events()) {
        if (event.is_report) expected.at(event.id).is_reported = true;
        if (event.is_over) expected.at(event.id).is_over = true;
    }
    for (const auto& [id, job] : expected) CHECK(job.is_reported && job.is_over);
    CHECK(jobs.is_idle());
    CHECK(jobs.waiting() == 0);
}

void loads_first() {
    BlockJobs jobs;
    jobs.submit(Direction::store, std::vector<BlockRequest>(100), Deadline::never(), 0);
    jobs.submit(Direction::load, std::vector<BlockRequest>(100), Deadline::never(), 0);
    int loads = 0;
    for (int i = 0; i < 40; ++i) loads += jobs.begin()->direction() == Direction::load ? 1 : 0;
    CHECK(loads == 30);
}

void deadlines() {
    BlockJobs jobs;
    jobs.submit(Direction::load, std::vector<BlockRequest>(3), Deadline::after(1), 0);
    const auto first = jobs.begin();
    const auto second = jobs.begin();
    CHECK(jobs.begin_copy(*second));
    jobs.expire(kFarAway);
    CHECK(jobs.take_events().empty());  // the second is about to be decided
    jobs.end_copy(*second);
    CHECK(jobs.finish(*second, {}, kFarAway));
    auto events = jobs.take_events();
    CHECK(events.size() == 1 && events[0].is_report && !events[0].is_over);
    CHECK(events[0].faults[0].kind == Fault::Kind::expired);
    CHECK(events[0].faults[1].kind == Fault::Kind::none);
    CHECK(events[0].faults[2].kind == Fault::Kind::expired);
    CHECK(!jobs.begin_copy(*first));
    CHECK(!jobs.finish(*first, {}, kFarAway));
    events = jobs.take_events();
    CHECK(events.size() == 1 && !events[0].is_report && events[0].is_over);
    CHECK(!jobs.begin());
}

void latencies() {
    Latencies all;
    CHECK(all.quantile(0.5) == 0);
    for (int i = 1; i <= 1000; ++i) all.add(i * 1000);
    CHECK(all.quantile(0.5) >= 500'000 && all.quantile(0.5) <= 565'000);
    CHECK(all.quantile(0.99) >= 990'000 && all.quantile(0.99) <= 1'120'000);
}

// What ends after its deadline says how.
void late_ends() {
    BlockJobs jobs;
    const auto job = jobs.submit(Direction::store, std::vector<BlockRequest>(2), Deadline::after(0), 0);
    const auto first = jobs.begin(), second = jobs.begin();
    CHECK(first && second);
    jobs.expire(kFarAway);
    CHECK(jobs.take_events().at(0).late.empty());
    jobs.finish(*first, {}, 1);
    jobs.finish(*second, {Fault::Kind::system, 5}, 2);
    const auto events = jobs.take_events();
    CHECK(events.size() == 1 && events[0].is_over && !events[0].is_report);
    CHECK(events[0].late.size() == 2 && events[0].late[0].kind == Fault::Kind::none && events[0].late[1].error == 5);
    CHECK(jobs.is_idle());
}

std::uint32_t crc_of(std::string_view text) { return Crc32c::of(std::as_bytes(std::span(text))); }

void crc() {
    CHECK(crc_of("123456789") == 0xe3069283);                 // the check value of the algorithm
    CHECK(crc_of(std::string(32, '\0')) == 0x8a9136aa);       // RFC 3720, appendix B.4
    CHECK(crc_of(std::string(32, '\xff')) == 0x62a8ab43);
    CHECK(crc_of("") == 0);
    std::mt19937_64 draw(1);
    std::vector<std::byte> data(40'000), copy(40'000);
    for (std::byte& one : data) one = static_cast<std::byte>(draw());
    for (int i = 0; i < 500; ++i) {
        const std::size_t from = draw() % 64, bytes = draw() % 20'000, cut = bytes == 0 ? 0 : draw() % bytes;
        const std::span<const std::byte> all(data.data() + from, bytes);
        const std::uint32_t plain = ~Crc32c::slow(~0u, all.data(), bytes);
        CHECK(Crc32c::of(all) == plain);
        CHECK(Crc32c::of(all.subspan(cut), Crc32c::of(all.first(cut))) == plain);
        std::memset(copy.data(), 0, copy.size());
        std::byte* const to = copy.data() + draw() % 64;
        CHECK(Crc32c::copy(to, all, 0) == plain);
        CHECK(std::memcmp(to, all.data(), bytes) == 0);
        CHECK(to[bytes] == std::byte{0});
    }
}

}  // namespace

int main() {
    crc();
    latencies();
    loads_first();
    deadlines();
    late_ends();
    for (std::uint64_t seed = 0; seed < 50; ++seed) random_engine(seed);
}
