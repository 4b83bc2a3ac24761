// The disk tier, for Python. Row numbers are passed as arrays of int32, as bytes; keys are digests of 24 bytes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python/buffer.hpp"
#include "bindings/python/deadline.hpp"
#include "bindings/python/failures.hpp"
#include "bindings/python/gil.hpp"
#include "bindings/python/systems.hpp"
#include "bindings/tiers/asked_keys.hpp"
#include "bindings/tiers/pool_object.hpp"
#include "os/fork.hpp"
#include "tiers/disk_tier.hpp"
#include "tiers/pair_outside.hpp"
#include "tiers/tier_request.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr os::Nanoseconds kSlice = 100 * os::kMillisecond;  // between two looks for signals
constexpr std::size_t kWithGil = 64u << 10;  // shorter work keeps the GIL

// What there is of a tier until it is closed. What is under way when it is dropped keeps all of it for ever.
struct OpenTier {
    OpenTier(HeldBuffer held, std::unique_ptr<tiers::SlotFile> file, unsigned threads, bool may_ring, nb::object policy,
             std::uint32_t ttl)
        : rows(std::make_unique<HeldBuffer>(std::move(held))),
          pool(static_cast<std::uint32_t>(file->slots()), std::move(policy)),
          io(std::move(file), static_cast<std::byte*>(rows->data()), threads, may_ring),
          tier(io, pool.pool(), ttl) {}

    void publish() {
        const auto now = io.work().statistics();
        tiers::TierFacts facts = tiers::ShownFacts::of(pool.pool());
        facts.declined = tier.counts().declined;
        facts.loaded = tier.counts().loaded;
        facts.missed = tier.counts().missed;
        facts.errors = now.stores.faults + now.loads.faults;
        facts.corrupt = now.loads.corrupt;
        facts.expired = now.stores.expired + now.loads.expired;
        facts.queue = now.waiting;
        facts.is_stalled = is_stalled() ? 1 : 0;
        facts.is_detached = io.folder().is_detached() ? 1 : 0;
        facts.lookups = tier.counts().lookups;
        facts.found = tier.counts().found;
        facts.written = written(now.stores);
        shown.publish(facts);
        shown.publish(tiers::TierSpans{now.stores.spans, now.loads.spans});
    }

    // The disk does not move blocks, or does not erase headers.
    bool is_stalled() noexcept { return tier.is_stalled() || io.headers().is_stalled(); }

    // Bytes, with the headers; past the page cache slots are written whole.
    std::uint64_t written(const tiers::BlockJobs::Counts& stores) noexcept {
        const tiers::SlotFile& file = io.file();
        return stores.moved * ((file.is_direct() ? file.slot_bytes() : file.row_bytes()) + sizeof(tiers::SlotHeader));
    }

    std::unique_ptr<HeldBuffer> rows;  // null: closed
    PoolObject pool;
    tiers::DiskIo io;
    tiers::DiskTier tier;
    tiers::ShownFacts shown;
    bool has_waiting = false;  // reports that `poll` has handed to Python, whose caller has not got them
};

nb::bytes flags(const std::vector<bool>& ok) {
    std::string made;
    for (const bool is_ok : ok) made += static_cast<char>(is_ok);
    return nb::bytes(made.data(), made.size());
}

nb::typed<nb::list, bool> list_of(const std::vector<bool>& flags) {
    nb::typed<nb::list, bool> made;
    for (const bool is_set : flags) made.append(is_set);
    return made;
}

// Making a Python object may collect garbage, and garbage may close the tier: each call first takes from it what it needs.
class DiskObject {
public:
    DiskObject(const std::string& folder, const std::string& opener, nb::handle rows, std::uint64_t count,
               std::uint64_t row_bytes, std::uint64_t slots, const nb::bytes& name_space, std::optional<bool> direct,
               std::optional<std::uint64_t> margin, unsigned threads, bool may_ring, nb::object policy, std::uint32_t ttl,
               std::uint64_t quota, double share) {
        using Direct = tiers::SlotFile::Direct;
        const Direct way = !direct ? Direct::if_possible : *direct ? Direct::always : Direct::never;
        tiers::Namespace own;
        std::memcpy(own.data(), name_space.c_str(), own.size());
        HeldBuffer held(rows, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS);
        if (held.size() != count * row_bytes) {
            raise_error(Error::InvalidArgument, nb::str("the rows have changed while the tier was opened"));
        }
        std::unique_ptr<tiers::SlotFile> file;
        try {
            file = without_gil([&] {
                return std::make_unique<tiers::SlotFile>(folder, opener, row_bytes, slots, own, way, margin);
            });
        } catch (const tiers::PairInUse& error) {
            raise_error(Error::TierInUse, text_of(error.path), error.pid);
        } catch (const tiers::NotDirect&) {
            raise_error(Error::Unsupported, text_of("the file system of " + folder + " has no O_DIRECT; leave out `direct`"));
        }
        if (share > 0) quota = std::max<std::uint64_t>(1, static_cast<std::uint64_t>(share * static_cast<double>(file->all_slots())));
        const auto found = without_gil([&] { return file->recover(quota); });
        open_ = std::make_shared<OpenTier>(std::move(held), std::move(file), threads, may_ring, std::move(policy), ttl);
        try {
            restore(found);
        } catch (...) {
            open_->io.close();  // or its threads are waited for
            throw;
        }
    }

    ~DiskObject() {
        if (open_ == nullptr || (is_here() && open_->io.close())) return;
        new std::shared_ptr<OpenTier>(std::move(open_));
    }

    bool is_here() const noexcept { return generation_ == os::fork_generation().load(); }

    OpenTier& open() const {
        if (!is_here()) raise_error(Error::WrongProcess, nb::str("this tier belongs to the process that opened it"));
        if (open_ == nullptr) raise_error(Error::Closed, nb::str("this tier was closed"));
        return *open_;
    }

    std::vector<bool> has(tiers::DiskTier::Keys keys, bool is_lookup) const {
        tiers::DiskTier& tier = open().tier;
        std::vector<bool> there(keys.size());
        for (std::size_t at = 0; at < keys.size(); ++at) there[at] = tier.has(keys[at]);
        if (is_lookup) tier.count_lookups(there);
        return there;
    }

    // A call that may enter the policy. `wakes`: the descriptor is readable afterwards if there is something to report. No
    // Python object is made in it: collecting garbage may run any code, which would let other threads call.
    template <class Call>
    auto call(const Call& work, bool wakes = true, bool is_first = false) const {
        OpenTier& opened = open();
        const std::shared_ptr<OpenTier> kept = open_;  // a policy may close the tier
        return opened.pool.call([&](tiers::BlockPool&) {
            struct Wake {
                OpenTier& opened;
                bool wakes;
                ~Wake() {
                    if (wakes && (opened.tier.has_done() || opened.has_waiting)) opened.io.work().wake();
                    opened.publish();
                }
            } wake{opened, wakes};
            if (!is_first) opened.tier.notice_emptied();
            return work(opened.tier);
        });
    }

    // What the thread that writes headers was told to do; it is not waited for if the disk had not answered before.
    struct Order {
        std::shared_ptr<OpenTier> tier;
        tiers::HeaderWork::OrderRef ref;
        bool may_wait;
    };
    template <class Call>
    Order order(const Call& work) const {
        const std::shared_ptr<OpenTier> kept = (static_cast<void>(open()), open_);
        const bool may_wait = !kept->is_stalled();
        return {kept, call(work), may_wait};
    }

    // Without the GIL. Returns 0, an errno, or ETIMEDOUT: it will be done once the disk answers.
    int wait(const Order& order, nb::handle timeout) const {
        const os::Deadline deadline = to_deadline(timeout);
        const std::shared_ptr<OpenTier> kept = order.tier;
        for (;;) {
            if (!is_here()) open();  // raises: a child has none of the threads
            const os::Nanoseconds now = os::monotonic_now();
            const os::Nanoseconds until = order.may_wait ? std::min(deadline.at(), now + kSlice) : now;
            const std::optional<int> error = without_gil([&] { return kept->io.headers().wait(order.ref, until); });
            if (error) {
                if (open_ != nullptr && is_here()) call([](tiers::DiskTier& tier) { tier.collect(); });
                return *error;
            }
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
            if (order.may_wait && !deadline.passed(os::monotonic_now())) continue;
            kept->io.headers().note_late();
            return ETIMEDOUT;
        }
    }

    // Moves what is done to the list `waiting` of an object. A report that cannot be made, because a signal's handler raises,
    // stays; meanwhile other calls may take the others.
    void poll(nb::handle reports, nb::handle make) const {
        const std::shared_ptr<OpenTier> kept = (static_cast<void>(open()), open_);
        call([](tiers::DiskTier& tier) { tier.collect(); }, false);
        kept->has_waiting = false;
        while (std::optional<tiers::DiskTier::Done> done = kept->tier.take_done()) {
            try {
                const nb::object report = make(done->ticket, flags(done->ok), static_cast<int>(done->fault.kind),
                                               done->fault.error, done->bytes, static_cast<double>(done->span) / 1e9);
                nb::cast<nb::list>(reports.attr("waiting")).append(report);
            } catch (...) {
                kept->tier.put_back(*std::move(done));
                throw;
            }
        }
    }

    // Makes the descriptor readable until the next poll.
    void wake() const {
        if (open_ == nullptr || !is_here()) return;
        open_->has_waiting = true;
        open_->io.work().wake();
    }

    // True if a disk that did not answer does by now.
    void look_again() const {
        if (open().tier.is_stalled()) call([](tiers::DiskTier& tier) { tier.collect(); });
    }

    std::shared_ptr<OpenTier> shared() const { return open_; }

    // True if nothing was under way.
    bool close() {
        if (open_ == nullptr || !is_here()) return true;
        const auto collect = [](tiers::DiskTier& tier) {
            tier.collect();
            return tier.is_idle();
        };
        if (!call(collect)) return false;
        const auto kept = std::exchange(open_, nullptr);  // first: whoever comes from here on finds it closed
        if (!without_gil([&] { return kept->io.close(); })) {  // another process has just had it emptied
            open_ = kept;
            return false;
        }
        kept->shown.end();
        kept->rows.reset();  // last: may run any code
        return true;
    }

    static int traverse(PyObject* self, visitproc visit, void* arg) noexcept {
        Py_VISIT(Py_TYPE(self));
        if (!nb::inst_ready(self)) return 0;
        const auto* const tier = nb::inst_ptr<DiskObject>(self);
        if (tier->open_ == nullptr) return 0;
        if (tier->open_->rows != nullptr) Py_VISIT((*tier->open_->rows)->obj);
        if (const nb::handle policy = tier->open_->pool.policy(); policy.is_valid()) Py_VISIT(policy.ptr());
        return 0;
    }

private:
    // Other threads run, between the hashes of some keys and from then on; a policy of the user's needs the GIL throughout.
    void restore(const tiers::SlotFile::Slots& found) {
        constexpr std::size_t kHashed = 4096;
        std::vector<tiers::BlockPool::Asked> asked;
        for (const auto& kept : found.own) {
            if (asked.size() % kHashed == kHashed - 1) without_gil([] {});
            asked.push_back({hash_of(nb::bytes(kept.digest.data(), kept.digest.size())), kept.digest});
        }
        // What was emptied since the headers were read is noticed by the next call, when the pool has it.
        const auto work = [&] { call([&](tiers::DiskTier& tier) { tier.restore(asked, found.own, found.foreign); }, true, true); };
        if (open_->pool.policy().is_valid()) return work();
        without_gil(work);
    }

    std::shared_ptr<OpenTier> open_;  // null: closed
    const std::uint64_t generation_ = os::fork_generation().load();
};

// Blocks that are not evicted.
class PinnedSlots {
public:
    PinnedSlots(const std::shared_ptr<OpenTier>& tier, std::vector<tiers::Block> blocks)
        : tier_(tier), blocks_(std::move(blocks)) {}
    PinnedSlots(PinnedSlots&&) = default;
    ~PinnedSlots() { release(); }

    void release() noexcept {
        if (generation_ != os::fork_generation().load()) return;
        std::erase(blocks_, tiers::kNoBlock);
        if (const auto open = tier_.lock()) open->tier.release(std::exchange(blocks_, {}));
    }

private:
    std::weak_ptr<OpenTier> tier_;  // expired: closed
    std::vector<tiers::Block> blocks_;
    std::uint64_t generation_ = os::fork_generation().load();
};

std::optional<tiers::Namespace> namespace_from(const std::optional<nb::bytes>& bytes) {
    if (!bytes) return std::nullopt;
    tiers::Namespace made{};
    std::memcpy(made.data(), bytes->c_str(), std::min(made.size(), bytes->size()));
    return made;
}

using Stored = nb::typed<nb::tuple, nb::bytes, std::uint64_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint64_t>;
nb::typed<nb::list, Stored> stored_in(const tiers::PairOutside& pair) {
    const auto found = without_gil([&] { return pair.stored(); });
    nb::typed<nb::list, Stored> made;
    for (const auto& [name_space, of] : found)
        made.append(nb::make_tuple(nb::bytes(name_space.data(), name_space.size()), of.blocks, of.oldest, of.newest, of.last_use, of.hits));
    return made;
}

// 0 or an errno; nullopt: no answer.
std::optional<int> ask_owner(const std::string& folder, const std::string& opener, const std::optional<nb::bytes>& name_space,
                             nb::handle timeout) {
    tiers::TierRequest request;
    if (const auto purged = namespace_from(name_space)) {
        request.what = tiers::TierRequest::What::purge;
        request.name_space = *purged;
    }
    const os::Deadline deadline = to_deadline(timeout);
    const tiers::AskedRequest asked(folder, opener, request);
    for (;;) {
        const os::Nanoseconds left = deadline.at() - os::monotonic_now();
        const auto answer = without_gil([&] { return asked.wait(std::clamp<os::Nanoseconds>(left, 0, os::kSecond)); });
        if (answer || left <= 0) return answer;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

using Facts = nb::typed<nb::dict, nb::str, nb::any>;

Facts facts_of(tiers::DiskIo& io) {
    const tiers::OpenedPair facts = io.file().facts();
    const std::uint64_t slots = io.file().all_slots(), slot_bytes = io.file().slot_bytes();
    const bool is_direct = io.file().is_direct();
    const char* const engine = io.engine();  // static text
    const int unwatched = io.folder().error();
    Facts made;
    made["engine"] = engine;
    made["slots"] = slots;
    made["slot_bytes"] = slot_bytes;
    made["wanted_slots"] = facts.wanted_slots;
    made["is_direct"] = is_direct;
    made["is_memory"] = facts.is_memory;
    made["is_indirect"] = facts.is_indirect;
    made["alignment"] = facts.alignment;
    made["copies_on_write"] = facts.copies_on_write;
    made["margin"] = facts.margin;
    made["refused"] = facts.refused;
    made["was_damaged"] = facts.was_damaged;
    made["other_row_bytes"] = facts.other_row_bytes;
    made["unwatched"] = unwatched;
    return made;
}

void add_counts(Facts& made, const char* prefix, const tiers::BlockJobs::Counts& counts, const tiers::Latencies& spans) {
    const auto name = [&](const char* what) { return nb::str((std::string(prefix) + what).c_str()); };
    made[name("errors")] = counts.faults;
    made[name("corrupt")] = counts.corrupt;
    made[name("expired")] = counts.expired;
    made[name("p50")] = static_cast<double>(spans.quantile(0.5)) / 1e9;
    made[name("p99")] = static_cast<double>(spans.quantile(0.99)) / 1e9;
}

Facts statistics_of(OpenTier& opened) {
    const tiers::PoolStatistics pool = opened.pool.pool().statistics();
    const std::uint32_t slots = opened.pool.pool().blocks();
    const tiers::DiskCounts counts = opened.tier.counts();
    const bool is_stalled = opened.is_stalled(), is_detached = opened.io.folder().is_detached();
    const auto now = opened.io.work().statistics();
    const tiers::Latencies stores = opened.io.work().latencies(tiers::Direction::store);
    const tiers::Latencies loads = opened.io.work().latencies(tiers::Direction::load);
    const std::uint64_t written = opened.written(now.stores);
    Facts made;
    made["slots"] = slots;
    made["blocks"] = pool.used;
    made["recovered"] = counts.recovered;
    made["stored"] = counts.stored;
    made["loaded"] = counts.loaded;
    made["missed"] = counts.missed;
    made["declined"] = counts.declined;
    made["evicted"] = pool.evicted;
    made["retired"] = pool.retired;
    made["lookups"] = counts.lookups;
    made["found"] = counts.found;
    made["written"] = written;
    made["queue"] = now.waiting;
    made["stalled"] = is_stalled;
    made["detached"] = is_detached;
    add_counts(made, "store_", now.stores, stores);
    add_counts(made, "load_", now.loads, loads);
    return made;
}

}  // namespace

void bind_disk(nb::module_& m) {
    using tiers::DiskTier;
    m.def(
        "slots_in",
        [](std::uint64_t capacity, std::uint64_t row_bytes) { return tiers::SlotFile::slots_in(capacity, row_bytes); },
        "capacity"_a, "row_bytes"_a, "How many slots of a disk tier fit into so many bytes, with their headers.");
    m.def(
        "crc32c",
        [](nb::handle data, std::uint32_t crc) {
            const HeldBuffer held(data, PyBUF_SIMPLE);
            const std::span bytes(static_cast<const std::byte*>(held.data()), held.size());
            if (bytes.size() < kWithGil) return tiers::Crc32c::of(bytes, crc);
            const WithoutGil no_gil;
            return tiers::Crc32c::of(bytes, crc);
        },
        "data"_a, "crc"_a = 0, nb::sig("def crc32c(data: bytes | bytearray | memoryview, crc: int = 0) -> int"),
        "CRC-32C, as the tiers compute it, of the bytes after those that gave `crc`.");

    using tiers::PairOutside;
    nb::class_<PairOutside>(m, "PairOutside", "A pair of a disk tier's files, whether a tier has it open or not.")
        .def(nb::init<const std::string&>(), "path"_a, "`path`.headers")
        .def("owner", &PairOutside::owner, "The pid of who has it open, 0 if it is unknown, or None.")
        .def_prop_ro("slots", [](const PairOutside& self) { return self.pair().slots; })
        .def_prop_ro("slot_bytes", [](const PairOutside& self) { return tiers::slot_bytes_of(self.pair().row_bytes); })
        .def("stored", &stored_in, "(namespace, blocks, when the oldest and newest were stored, last use, hits) of each.")
        .def(
            "remove",
            [](PairOutside& self, const std::optional<nb::bytes>& name_space) {
                const auto purged = namespace_from(name_space);
                return without_gil([&] { return self.remove(purged); });
            },
            "name_space"_a.none(), "Removes its blocks, or all; False: a tier has it open.");
    m.def("ask_owner", &ask_owner, "folder"_a, "opener"_a, "name_space"_a.none(), "timeout"_a,
          "The open tier removes a namespace's blocks, or all: 0, an errno, or None (no answer).");

    nb::class_<PinnedSlots>(m, "PinnedSlots", "Blocks that are not evicted; `memlane.tiers.TierPin`.")
        .def("release", &PinnedSlots::release);

    nb::class_<DiskObject::Order>(m, "DiskOrder", "What a disk tier's thread of headers was told to do.");

    static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&DiskObject::traverse)}, {0, nullptr}};
    nb::class_<DiskObject>(m, "DiskTier", nb::type_slots(slots), "`memlane.tiers.DiskTier` checks its arguments.")
        .def(nb::init<const std::string&, const std::string&, nb::handle, std::uint64_t, std::uint64_t, std::uint64_t,
                      const nb::bytes&, std::optional<bool>, std::optional<std::uint64_t>, unsigned, bool, nb::object, std::uint32_t, std::uint64_t, double>(),
             "folder"_a, "opener"_a, "rows"_a, "count"_a, "row_bytes"_a, "slots"_a, "name_space"_a, "direct"_a.none(), "margin"_a.none(),
             "threads"_a, "may_ring"_a, "policy"_a, "ttl"_a = 0, "quota"_a = 0,
             "share"_a = 0.0)
        .def(
            "show",
            [](const DiskObject& self, const nb::bytes& id, const std::string& name, const std::string& label) {
                OpenTier& opened = self.open();
                opened.shown.show(id_from(id), name, label, opened.pool.pool().blocks(), opened.io.file().slot_bytes());
                opened.publish();
            },
            "id"_a, "name"_a, "label"_a, "Lets `memlane.inspect` see its counters.")
        .def("facts", [](const DiskObject& self) { return facts_of(self.open().io); })
        .def(
            "has",
            [](const DiskObject& self, nb::handle keys, bool is_lookup) {
                const AskedKeys asked(keys);
                self.look_again();
                return list_of(self.has(asked.asked(), is_lookup));
            },
            "keys"_a, "is_lookup"_a = true)
        .def(
            "hold",
            [](const DiskObject& self, nb::handle keys) {
                const AskedKeys asked(keys);
                self.look_again();
                std::vector<tiers::Block> blocks = self.call([&](DiskTier& tier) { return tier.hold(asked.asked()); });
                std::vector<bool> is_there(blocks.size());
                for (std::size_t at = 0; at < blocks.size(); ++at) is_there[at] = blocks[at] != tiers::kNoBlock;
                PinnedSlots pinned(self.shared(), std::move(blocks));
                using Found = nb::typed<nb::tuple, PinnedSlots, nb::typed<nb::list, bool>>;
                return Found(nb::make_tuple(std::move(pinned), list_of(is_there)));
            },
            "keys"_a, "(what pins them, whether each is there)")
        .def(
            "store",
            [](const DiskObject& self, nb::handle keys, const nb::bytes& rows, nb::handle timeout, bool is_access) {
                const AskedKeys asked(keys);
                const os::Deadline deadline = to_deadline(timeout);
                return self.call(
                    [&](DiskTier& tier) { return tier.store(asked.asked(), blocks_in(rows), deadline, is_access); });
            },
            "keys"_a, "rows"_a, "timeout"_a, "is_access"_a = true)
        .def(
            "load",
            [](const DiskObject& self, nb::handle keys, const nb::bytes& rows, nb::handle timeout) {
                const AskedKeys asked(keys);
                const os::Deadline deadline = to_deadline(timeout);
                return self.call([&](DiskTier& tier) { return tier.load(asked.asked(), blocks_in(rows), deadline); });
            },
            "keys"_a, "rows"_a, "timeout"_a)
        .def_prop_ro("last", [](const DiskObject& self) { return self.open().tier.last(); },
                     "The ticket of the latest store or load; 0: there was none.")
        .def(
            "touch",
            [](const DiskObject& self, nb::handle keys) {
                const AskedKeys asked(keys);
                self.call([&](DiskTier& tier) { tier.touch(asked.asked()); });
            },
            "keys"_a)
        .def(
            "forget",
            [](const DiskObject& self, nb::handle keys) {
                const AskedKeys asked(keys);
                return self.order([&](DiskTier& tier) { return tier.forget(asked.asked()); });
            },
            "keys"_a)
        .def("clear", [](const DiskObject& self) { return self.order([](DiskTier& tier) { return tier.clear(); }); })
        .def(
            "keep_uses",
            [](const DiskObject& self) { return self.order([](DiskTier& tier) { return tier.keep_uses(); }); },
            "Writes when blocks were used, for a restart.")
        .def("wait", &DiskObject::wait, "order"_a, "timeout"_a, "0 or an errno.")
        .def(
            "collect",
            [](const DiskObject& self, bool wakes) {
                const auto collect = [](DiskTier& tier) {
                    tier.collect();
                    return tier.is_idle();
                };
                return self.call(collect, wakes);
            },
            "wakes"_a, "Takes in what the threads have done; whether nothing is under way.")
        .def("poll", &DiskObject::poll, "reports"_a, "make"_a,
             "Appends what `make` returns for each report to `reports.waiting`.")
        .def("wake", &DiskObject::wake, "Makes the descriptor readable until the next poll.")
        .def(
            "alerts",
            [](const DiskObject& self) {
                OpenTier& opened = self.open();
                const auto corrupt = opened.io.work().statistics().loads.corrupt;
                const auto stalled = opened.tier.counts().stalled, unerased = opened.tier.counts().unerased;
                const auto refused = opened.tier.counts().refused;
                using Refused = nb::typed<nb::tuple, bool, int, int>;
                const bool is_detached = opened.io.folder().is_detached();
                using Alerts = nb::typed<nb::tuple, bool, int, int, int, nb::typed<nb::list, Refused>>;
                nb::list each;
                for (const auto& [of, count] : refused) {
                    const auto& [direction, error] = of;
                    each.append(nb::make_tuple(direction == tiers::Direction::store, error, count));
                }
                return Alerts(nb::make_tuple(is_detached, stalled, unerased, corrupt, each));
            },
            "Whether files are gone, looks that found blocks or headers late, corrupt blocks, refusals.")
        .def(
            "idle_fileno",
            [](const DiskObject& self) {
                OpenTier& opened = self.open();
                return opened.io.work().idle_descriptor(opened.tier.is_idle());
            },
            "Readable while nothing is under way, as of the last call that looked.")
        .def("fileno", [](const DiskObject& self) { return self.open().io.work().descriptor(); })
        .def(
            "changes",
            [](const DiskObject& self) {
                const auto changes = self.open().pool.pool().take_changes();
                nb::typed<nb::list, nb::typed<nb::tuple, nb::bytes, bool>> made;
                for (const auto& [key, is_stored] : changes)
                    made.append(nb::make_tuple(nb::bytes(key.data(), key.size()), is_stored));
                return made;
            },
            "Digests that were stored, or are gone, since the last call; b\"\": all are.")
        .def("statistics", [](const DiskObject& self) { return statistics_of(self.open()); })
        .def("close", &DiskObject::close, "Whether nothing was under way.");
}

}  // namespace memlane::bindings
