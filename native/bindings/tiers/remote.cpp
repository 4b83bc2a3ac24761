// What tiers on servers, and on other openers' files, do with many blocks at once, without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/python/buffer.hpp"
#include "bindings/python/failures.hpp"
#include "bindings/python/gil.hpp"
#include "bindings/python/systems.hpp"
#include "tiers/resp.hpp"
#include "tiers/slot_reader.hpp"
#include "tiers/staged_block.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

std::span<std::byte> bytes_of(const HeldBuffer& held) { return {static_cast<std::byte*>(held.data()), held.size()}; }

// Not an nb::enum_: that runs Python's enum module, and a signal handler that raises there ends the process.
const char* name_of(tiers::RespReader::Fault fault) {
    using Fault = tiers::RespReader::Fault;
    switch (fault) {
        case Fault::kNone: return "none";
        case Fault::kLate: return "late";
        case Fault::kClosed: return "closed";
        case Fault::kSystem: return "system";
        case Fault::kNonsense: break;
    }
    return "nonsense";
}

std::vector<tiers::Digest> digests_in(const std::vector<nb::bytes>& keys) {
    std::vector<tiers::Digest> digests(keys.size());
    for (std::size_t at = 0; at < keys.size(); ++at) {
        if (keys[at].size() != digests[at].size()) raise_error(Error::InvalidArgument, nb::str("digest"));
        std::memcpy(digests[at].data(), keys[at].c_str(), digests[at].size());
    }
    return digests;
}

void bind_slot_reader(nb::module_& m) {
    using tiers::SlotReader;
    nb::class_<SlotReader>(m, "SlotReader", "Another opener's pair of files of a disk tier, for reading.")
        .def(
            "__init__",
            [](SlotReader* self, const std::string& path, std::uint64_t row_bytes, const nb::bytes& name_space) {
                tiers::Namespace own{};
                std::memcpy(own.data(), name_space.c_str(), std::min(own.size(), name_space.size()));
                without_gil([&] { new (self) SlotReader(path, row_bytes, own); });
            },
            "path"_a, "row_bytes"_a, "name_space"_a, "`path`.headers and `path`.data.")
        .def_prop_ro("number", [](const SlotReader& self) { return without_gil([&] { return self.number(); }); }, "The inode of its headers.")
        .def_prop_ro("last_sequence", &SlotReader::last_sequence, "The greatest of all namespaces, as of the last look; or -1.")
        .def(
            "look", [](SlotReader& self, bool in_any_case) { without_gil([&] { self.look(in_any_case); }); }, "in_any_case"_a,
            "Reads which keys there are, if the file has changed.")
        .def(
            "has",
            [](const SlotReader& self, const std::vector<nb::bytes>& digests, const std::vector<std::int64_t>& after) {
                const std::vector<tiers::Digest> keys = digests_in(digests);
                if (after.size() != keys.size()) raise_error(Error::InvalidArgument, nb::str("after"));
                return without_gil([&] { return self.has(keys, after); });
            },
            "digests"_a, "after"_a, "Whether it has these keys, stored after those sequences.")
        .def(
            "get",
            [](const SlotReader& self, const std::vector<nb::bytes>& digests, const std::vector<std::int64_t>& after,
               const std::vector<nb::object>& into) {
                const std::vector<tiers::Digest> keys = digests_in(digests);
                std::vector<HeldBuffer> held;
                std::vector<std::span<std::byte>> memory;
                held.reserve(into.size());
                for (const nb::object& each : into) {
                    held.emplace_back(each, PyBUF_WRITABLE);
                    memory.push_back(bytes_of(held.back()));
                }
                if (after.size() != keys.size() || memory.size() != keys.size()) {
                    raise_error(Error::InvalidArgument, nb::str("into"));
                }
                return without_gil([&] { return self.get(keys, after, memory); });
            },
            "digests"_a, "after"_a, "into"_a, "Reads rows; what the CRC of each should be, or None.");
}

}  // namespace

void bind_remote_tiers(nb::module_& m) {
    using tiers::RespReader;
    bind_slot_reader(m);
    m.def(
        "read_replies",
        [](int socket, double seconds, const std::string& kinds, const std::vector<nb::object>& into) {
            std::vector<std::optional<HeldBuffer>> memory(into.size());
            for (std::size_t at = 0; at < into.size(); ++at)
                if (!into[at].is_none()) memory[at].emplace(into[at], PyBUF_WRITABLE);
            RespReader reader(socket, os::Deadline::after(static_cast<os::Nanoseconds>(seconds * 1e9)));
            std::vector<tiers::Reply> replies(into.size());
            without_gil([&] {
                for (std::size_t at = 0; at < into.size(); ++at)
                    if (!reader.read(kinds, memory[at] ? bytes_of(*memory[at]) : std::span<std::byte>(), replies[at])) return;
                static_cast<void>(reader.end());
            });
            nb::typed<nb::list, nb::object> found;
            for (const tiers::Reply& reply : replies) {
                if (reply.refusal) {
                    found.append(nb::bytes(reply.refusal->data(), reply.refusal->size()));
                } else {
                    found.append(nb::int_(reply.number));
                }
            }
            const std::string& line = reader.nonsense();
            return std::tuple(found, nb::str(name_of(reader.fault())), reader.error(), nb::bytes(line.data(), line.size()));
        },
        "socket"_a, "seconds"_a, "kinds"_a, "into"_a,
        "Reads a reply for each buffer or None: numbers or refusals; fault, errno, line.");
    m.def(
        "place_blocks",
        [](const std::vector<nb::object>& values, const std::vector<std::uint32_t>& crcs, nb::handle rows, std::size_t row_bytes,
           const std::vector<std::size_t>& ids) {
            std::vector<HeldBuffer> held;
            held.reserve(values.size());
            for (const nb::object& value : values) held.emplace_back(value, PyBUF_SIMPLE);
            const HeldBuffer memory(rows, PyBUF_WRITABLE);
            const auto is_row = [&](std::size_t id) { return id < memory.size() / row_bytes; };
            const bool fits = crcs.size() == values.size() && ids.size() == values.size() && row_bytes > 0 &&
                              std::ranges::all_of(ids, is_row);
            if (!fits) raise_error(Error::InvalidArgument, nb::str("row"));
            return without_gil([&] {
                std::vector<bool> right(values.size());
                for (std::size_t at = 0; at < values.size(); ++at)
                    right[at] = tiers::place(bytes_of(held[at]), crcs[at], bytes_of(memory).subspan(ids[at] * row_bytes, row_bytes));
                return right;
            });
        },
        "values"_a, "crcs"_a, "rows"_a, "row_bytes"_a, "ids"_a,
        "Copies values, headers and rows, into those rows; whether each fits the CRC of its key.");
}

}  // namespace memlane::bindings
