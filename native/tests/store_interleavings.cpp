// Pinning and retiring at the same moment, in orders of steps that are forced through the SYNC hooks.
#include <functional>
#include <map>
#include <string>

#include "stores.hpp"

using namespace memlane;
using namespace memlane::testing;

namespace {

struct Trap {
    int passes;  // before it is sprung
    std::function<void()> action;
};
std::map<std::string, Trap> at_point;  // each is sprung once

void hook(const char* point) {
    const auto found = at_point.find(point);
    if (found == at_point.end() || found->second.passes-- > 0) return;
    const auto action = std::move(found->second.action);
    at_point.erase(found);
    action();
}

constexpr std::uint32_t kId = 5;

void read_by_all(const Store& s) {
    for (const auto& reader : {s.one, s.two}) {
        const auto object = reader->pin(s.address_of(kId), kId);
        CHECK(object);
        reader->count(*object);
        reader->unpin(*object);
    }
    CHECK(s.writer->is_read(kId, 1));
}

// The reader is halfway into its pin when the writer retires: exactly one of the two succeeds.
void writer_retires_while_a_reader_pins() {
    for (const char* point : {"pin.store", "offer.load", "retire.load"}) {
        const Store s{4, 128};
        s.put(kId);
        read_by_all(s);
        bool retired = false;
        at_point[point] = {0, [&] { retired = s.writer->retire(kId); }};
        const auto object = s.one->pin(s.address_of(kId), kId);
        CHECK(at_point.empty());
        CHECK(retired == !object.has_value());
        CHECK(retired == (std::string(point) == "pin.store"));
        if (object) {
            CHECK(s.one->is_valid(*object));
            s.one->unpin(*object);
            CHECK(s.writer->retire(kId));
        }
    }
}

// Where a reader arrives while the writer retires an entry, and whether it gets its pin. The writer checks slots 0, 1
// and 2 before it marks the entry, and again afterwards.
constexpr struct Coming {
    const char* point;
    int passes;
    bool pins;
} kComings[] = {{"pin.load", 0, true}, {"retire.store", 0, true}, {"pin.load", 3, false}};

// The writer is halfway into retiring when a reader pins.
void reader_pins_while_the_writer_retires() {
    for (const Coming& c : kComings) {
        const Store s{4, 128};
        s.put(kId);
        read_by_all(s);
        std::optional<Object> object;
        at_point[c.point] = {c.passes, [&] { object = s.one->pin(s.address_of(kId), kId); }};
        const bool retired = s.writer->retire(kId);
        CHECK(at_point.empty());
        CHECK(object.has_value() == c.pins);
        CHECK(retired == !c.pins);
        if (object) {
            CHECK(s.one->is_valid(*object));
            s.one->unpin(*object);
        }
    }
}

// A pin stops the writer before it marks the entry: no unpin can come in between, and the object stays for now.
void reader_unpins_while_the_writer_retires() {
    const Store s{4, 128};
    s.put(kId);
    read_by_all(s);
    const auto object = s.two->pin(s.address_of(kId), kId);
    at_point["retire.store"] = {0, [&] { s.two->unpin(*object); }};
    CHECK(!s.writer->retire(kId));
    CHECK(!at_point.empty());  // not sprung: the writer saw the pin before it marked anything
    at_point.clear();
    s.two->unpin(*object);
    CHECK(s.writer->retire(kId));
}

// A cleared object stays readable, for its readers and for those that know its address, until its entry or its space is
// needed. Neither can be reused while a reader pins it.
void cleared_in_the_middle() {
    const Store s{4, 128};
    s.put(kId);
    const auto object = s.one->pin(s.address_of(kId), kId);
    s.writer->clear(kId);
    CHECK(s.one->is_valid(*object));
    const auto later = s.two->pin(s.address_of(kId), kId);
    CHECK(later);
    s.two->unpin(*later);
    CHECK(!s.writer->admits(kId + 8));                                                 // the same entry
    CHECK(s.writer->obstacle(s.address_of(kId), 128) == s.address_of(kId) + 128);      // the same space
    CHECK(s.writer->obstacle(s.address_of(kId) - 64, 128) == s.address_of(kId) + 128);  // a part of it
    CHECK(s.writer->obstacle(s.address_of(kId) + 128, 128) == 0);
    CHECK(s.one->is_valid(*object));
    s.one->unpin(*object);
    CHECK(s.writer->obstacle(s.address_of(kId), 128) == 0);
    CHECK(!s.two->pin(s.address_of(kId), kId));
}

// A reader pins an orphan while the writer wants its space: exactly one of the two succeeds.
void reader_pins_while_an_orphan_is_retired() {
    for (const Coming& c : kComings) {
        const Store s{4, 128};
        s.put(kId);
        s.writer->clear(kId);
        std::optional<Object> object;
        at_point[c.point] = {c.passes, [&] { object = s.one->pin(s.address_of(kId), kId); }};
        const bool is_free = s.is_free(kId + 4);  // the same space, another entry
        CHECK(at_point.empty());
        CHECK(object.has_value() == c.pins);
        CHECK(is_free == !c.pins);
        if (object) {
            CHECK(s.one->is_valid(*object));
            s.one->unpin(*object);
            CHECK(s.is_free(kId + 4));
        }
    }
}

// One reader reads twice while another is reading. Wherever the second read occurs, it does not count for another reader,
// the other reader keeps the object, and no counter of another object changes.
void one_reads_twice_while_another_reads() {
    for (const char* point : {"offer.load", "refer.load", "count.store", "unpin.store"}) {
        const Store s{4, 128};
        s.put(kId);
        s.put(kId + 1);
        bool retired = true;
        const auto read_once = [](const Store& store, StoreReader& reader) {
            const auto object = reader.pin(store.address_of(kId), kId);
            CHECK(object && reader.is_valid(*object));
            reader.count(*object);
            CHECK(reader.is_valid(*object));
            reader.unpin(*object);
        };
        read_once(s, *s.one);
        at_point[point] = {0, [&] {
                               read_once(s, *s.one);
                               retired = s.writer->is_read(kId, 1) && s.writer->retire(kId);
                           }};
        read_once(s, *s.two);
        CHECK(at_point.empty());
        CHECK(!retired);
        CHECK(s.writer->is_read(kId, 1));
        for (const auto& blocker : s.writer->blockers(kId + 1, 1)) CHECK(blocker.owes == 1 && blocker.pins == 0);
        CHECK(s.writer->retire(kId));
    }
}

// A successor takes the place of a reader that left, after the writer has seen the old pin and before it checks whether
// its owner is alive: the successor pins after the entry was marked, and is refused.
void successor_comes_while_the_writer_retires() {
    const Store s{4, 128};
    s.put(kId);
    read_by_all(s);
    CHECK(s.one->pin(s.address_of(kId), kId));  // a pin left behind, as by a dead reader
    s.one->announce_close();
    s.one->segment().abandon();
    std::shared_ptr<StoreReader> successor;
    std::optional<Object> object;
    int asked = 0;
    // The writer passes `join.load` twice for slot 1 before it marks the entry, and again afterwards.
    at_point["join.load"] = {2, [&] {
                                 ++asked;
                                 successor = s.join();
                                 CHECK(successor->slot() == 1);
                                 object = successor->pin(s.address_of(kId), kId);
                             }};
    s.writer->retire(kId);
    CHECK(asked == 1);
    CHECK(!object);
}

// References are added while a reader counts: there are never more reads than references.
void references_while_a_reader_counts() {
    for (const char* point : {"refer.load", "count.store"}) {
        const Store s{4, 128};
        s.put(kId);
        const auto object = s.one->pin(s.address_of(kId), kId);
        at_point[point] = {0, [&] { s.writer->refer(kId, 2); }};
        s.one->count(*object);
        CHECK(at_point.empty());
        CHECK(s.writer->blockers(kId, 2)[0].owes == 1);
        s.one->count(*object);
        s.one->count(*object);
        CHECK(s.writer->blockers(kId, 2)[0].owes == 0);
        s.one->unpin(*object);
    }
}

// A refused drop loses no read, before whichever of the writer's checks it is counted.
void one_counts_while_a_drop_is_refused() {
    for (int passes : {0, 1}) {
        const Store s{4, 128};
        s.put(kId);
        const auto object = s.one->pin(s.address_of(kId), kId);
        const auto other = s.two->pin(s.address_of(kId), kId);
        s.two->count(*other);
        at_point["count.load"] = {passes, [&] { s.one->count(*object); }};
        CHECK(!s.writer->drop_reference(kId, 0));
        CHECK(at_point.empty());
        CHECK(s.writer->is_read(kId, 1));
        s.one->unpin(*object);
        s.two->unpin(*other);
    }
}

// A read of a reference that is dropped at the same time does not count for a later one.
void a_reference_is_dropped_while_a_reader_counts() {
    for (const char* point : {"refer.load", "count.store"}) {
        const Store s{4, 128};
        s.put(kId);
        const auto object = s.one->pin(s.address_of(kId), kId);
        at_point[point] = {0, [&] { CHECK(s.writer->drop_reference(kId, 0)); }};
        s.one->count(*object);
        CHECK(at_point.empty());
        s.writer->refer(kId, 1);
        CHECK(s.writer->blockers(kId, 1)[0].owes == 1);
        s.one->count(*object);
        CHECK(s.writer->blockers(kId, 1)[0].owes == 0);
        s.one->unpin(*object);
    }
}

}  // namespace

int main() {
    core::sync_hook.store(hook);
    writer_retires_while_a_reader_pins();
    reader_pins_while_the_writer_retires();
    reader_unpins_while_the_writer_retires();
    cleared_in_the_middle();
    reader_pins_while_an_orphan_is_retired();
    one_reads_twice_while_another_reads();
    successor_comes_while_the_writer_retires();
    references_while_a_reader_counts();
    one_counts_while_a_drop_is_refused();
    a_reference_is_dropped_while_a_reader_counts();
    CHECK(at_point.empty());
    std::puts("store_interleavings: 22 forced orders hold");
}
