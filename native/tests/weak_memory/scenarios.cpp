#include "scenarios.hpp"

#include "bed.hpp"

namespace memlane::weak {

namespace {

// The reader reads the only chunk while the writer wants it for the next message.
Scenario next_lap(unsigned cores) {
    const auto bed = std::make_shared<Bed>(1);
    return bed->scenario(cores == 1 ? "next lap, yielding" : "next lap",
                         {[bed] { bed->send(2); },
                          [bed] {
                              bed->receive(1);
                              bed->receive(2);
                          }},
                         [bed, cores] {
                             bed->start_tired(cores);
                             bed->fill_at_once(1);
                         });
}

// Laps of one chunk, in which both ends may have to wait for every message.
Scenario laps(std::uint64_t count) {
    const auto bed = std::make_shared<Bed>(1);
    return bed->scenario(std::to_string(count) + " laps",
                         {[bed, count] {
                              for (std::uint64_t i = 1; i <= count; ++i) bed->send(i);
                          },
                          [bed, count] {
                              for (std::uint64_t i = 1; i <= count; ++i) bed->receive(i);
                          }},
                         [bed] { bed->start_tired(); });
}

// The first message of a ring, whose flags were never written.
Scenario first_message(bool spinning) {
    const auto bed = std::make_shared<Bed>(1);
    return bed->scenario(spinning ? "first message, spinning" : "first message",
                         {[bed] { bed->send(1); }, [bed] { bed->receive(1); }},
                         [bed, spinning] {
                             bed->start();
                             if (!spinning) bed->tire(*bed->reader);
                         });
}

// As many chunks as messages: only the reader waits, or only the writer.
Scenario reader_waits_twice() {
    const auto bed = std::make_shared<Bed>(2);
    return bed->scenario("reader waits twice",
                         {[bed] {
                              bed->send(1);
                              bed->send(2);
                          },
                          [bed] {
                              bed->receive(1);
                              bed->receive(2);
                          }},
                         [bed] {
                             bed->start();
                             bed->tire(*bed->reader);
                         });
}

Scenario writer_waits_twice() {
    const auto bed = std::make_shared<Bed>(2);
    return bed->scenario("writer waits twice",
                         {[bed] {
                              bed->send(3);
                              bed->send(4);
                          },
                          [bed] {
                              bed->receive(1);
                              bed->receive(2);
                          }},
                         [bed] {
                             bed->start();
                             bed->fill_at_once(1);
                             bed->fill_at_once(2);
                             bed->tire(*bed->writer);
                         });
}

// Two readers give the only chunk back at once while the writer sleeps: one of them wakes it, although only the last
// reader does.
Scenario last_reader_wakes() {
    const auto bed = std::make_shared<Bed>(1, 2);
    const auto is_woken = std::make_shared<bool>();
    const auto samples = std::make_shared<std::vector<RingReader::Sample>>();
    const auto give_back = [bed, samples, is_woken](std::size_t reader) {
        samples->at(reader).finish(sizeof(std::uint64_t));
        *is_woken |= core::load_relaxed(bed->writer->ring().waits().consumed) != 0;
    };
    Scenario made = bed->scenario("last reader wakes",
                                  {[give_back] { give_back(0); }, [give_back] { give_back(1); }},
                                  [bed, samples, is_woken] {
                                      bed->start();
                                      bed->fill_at_once(1);
                                      samples->clear();
                                      for (auto* reader : {&bed->reader, &bed->second})
                                          samples->push_back(testing::must((*reader)->begin_nowait()));
                                      bed->writer->ring().waits().writer_parked = 1;
                                      *is_woken = false;
                                  });
    made.finish = [is_woken] { CHECK(*is_woken); };
    return made;
}

// The writer closes after its last message. A reader that polls gets the message first.
Scenario writer_leaves() {
    const auto bed = std::make_shared<Bed>(1);
    return bed->scenario("writer leaves",
                         {[bed] {
                              bed->send(1);
                              bed->writer->announce_close();
                          },
                          [bed] {
                              bool is_received = false;
                              for (int i = 0; i < 3; ++i) {
                                  const os::Deadline poll = os::Deadline::after(0);
                                  auto sample = bed->reader->begin(poll, keep_waiting);
                                  if (sample.loan) {
                                      bed->take(*sample.loan, 1);
                                      is_received = true;
                                  }
                                  require(is_received || sample.status != Status::peer_closed, "skipped message");
                              }
                          }},
                         [bed] { bed->start(); });
}

// The same for a reader that waits.
Scenario writer_leaves_a_waiting_reader() {
    const auto bed = std::make_shared<Bed>(1);
    return bed->scenario("writer leaves, waited for",
                         {[bed] {
                              bed->send(1);
                              bed->writer->announce_close();
                          },
                          [bed] {
                              bed->receive(1);
                              require(bed->reader->begin(kNever, keep_waiting).status == Status::peer_closed,
                                      "skipped message");
                          }},
                         [bed] {
                             bed->start();
                             bed->tire(*bed->reader);
                         });
}

// A reader closes in the middle of a read: from then on, and not before, the writer may reuse the chunk.
Scenario reader_leaves() {
    const auto bed = std::make_shared<Bed>(1);
    return bed->scenario("reader leaves",
                         {[bed] { bed->send(2); },
                          [bed] {
                              const auto sample = bed->reader->begin(kNever, keep_waiting);
                              require(sample.status == Status::ok, "wait without a result");
                              require(bed->read(*sample.loan) == 1, "skipped message");
                              bed->reader->announce_close();
                          }},
                         [bed] {
                             bed->start_tired();
                             bed->fill_at_once(1);
                         });
}

// The writer waits until the reader has attached, and then knows its identity.
Scenario reader_joins() {
    const auto bed = std::make_shared<Bed>(1);
    return bed->scenario("reader joins",
                         {[bed] {
                              const core::Outcome outcome = bed->writer->wait_for_all(kNever, keep_waiting);
                              require(outcome.status == Status::ok, "wait without a result");
                              const os::ProcessIdentity who = bed->writer->participants().identity(1);
                              require(who.pid == static_cast<std::uint64_t>(::getpid()), "stale identity");
                          },
                          [bed] { bed->make_reader(); }},
                         [bed] {
                             bed->clean();
                             bed->make_writer();
                         });
}

// A late reader attaches while messages are sent that nobody waits to have read. It gets what comes once it is counted.
Scenario late_reader() {
    const auto bed = std::make_shared<Bed>(1, 1, core::kLateReaders);
    return bed->scenario("late reader",
                         {[bed] {
                              for (std::uint64_t i = 1; i <= 2; ++i) {
                                  auto claim = bed->writer->begin_nowait(sizeof i);
                                  if (claim.status == Status::would_block) return;  // it is counted, and has not read yet
                                  testing::put(std::move(*claim.loan), i);
                              }
                          },
                          [bed] {
                              bed->make_reader();
                              std::uint64_t last = 0;
                              for (int i = 0; i < 2; ++i) {
                                  auto sample = bed->reader->begin_nowait();
                                  if (!sample.loan) continue;
                                  const std::uint64_t value = bed->read(*sample.loan);
                                  require(value == sample.loan->position() + 1, "another message than its position says");
                                  require(last == 0 || value == last + 1, "skipped message");
                                  last = value;
                                  sample.loan->finish(sizeof value);
                              }
                          }},
                         [bed] {
                             bed->clean();
                             bed->make_writer();
                         });
}

// What a reader of the latest message takes is whole, and newer than what it has had.
void take_latest(Bed& bed, std::uint64_t& last) {
    auto sample = bed.reader->begin_nowait();
    if (!sample.loan) return;
    const std::uint64_t value = bed.read(*sample.loan);
    require(value == sample.loan->position() + 1, "another message than its position says");
    require(value > last, "repeated message");
    last = value;
    sample.loan->finish(sizeof value);
}

// From three chunks the writer takes the first again for its second message, unless the reader still reads there.
Scenario latest_message() {
    const auto bed = std::make_shared<Bed>(3, 1, core::kLatestOnly);
    return bed->scenario("latest message",
                         {[bed] {
                              bed->fill_at_once(2);
                              bed->fill_at_once(3);
                          },
                          [bed] {
                              std::uint64_t last = 0;
                              take_latest(*bed, last);
                              take_latest(*bed, last);
                          }},
                         [bed] {
                             bed->start();
                             bed->fill_at_once(1);
                         });
}

// A read that ends with an exception leaves the message, but its next may be of a later one.
Scenario latest_message_given_up() {
    const auto bed = std::make_shared<Bed>(3, 1, core::kLatestOnly);
    return bed->scenario("latest, given up",
                         {[bed] {
                              bed->fill_at_once(2);
                              bed->fill_at_once(3);
                          },
                          [bed] {
                              auto sample = bed->reader->begin_nowait();
                              bed->read(*sample.loan);
                              std::uint64_t last = 0;
                              take_latest(*bed, last);
                          }},
                         [bed] {
                             bed->start();
                             bed->fill_at_once(1);
                         });
}

// What a reader keeps stays as it is, while the writer goes on; then the writer takes its chunk.
Scenario latest_message_kept() {
    const auto bed = std::make_shared<Bed>(3, 1, core::kLatestOnly);
    return bed->scenario("latest, kept",
                         {[bed] {
                              bed->fill_at_once(2);
                              bed->fill_at_once(3);
                          },
                          [bed] {
                              auto sample = bed->reader->begin_nowait();
                              const std::uint64_t value = bed->read(*sample.loan);
                              const std::byte* const kept = sample.loan->chunk();
                              const std::uint64_t hold = bed->reader->new_hold();
                              sample.loan->keep(hold, sizeof value);
                              std::uint64_t again = 0;
                              std::memcpy(&again, kept, sizeof again);
                              require(again == value, "a kept message has changed");
                              bed->reader->release_held(hold);
                          }},
                         [bed] {
                             bed->start();
                             bed->fill_at_once(1);
                         });
}

// close() in another thread of the reader's process ends its wait.
Scenario reader_is_stopped() {
    const auto bed = std::make_shared<Bed>(1);
    Scenario made = bed->scenario("reader is stopped",
                                  {[bed] { bed->reader->stop_waiting(); },
                                   [bed] {
                                       require(bed->reader->begin(kNever, keep_waiting).status == Status::closed,
                                               "wait without a result");
                                   }},
                                  [bed] {
                                      bed->start();
                                      bed->tire(*bed->reader);
                                  });
    bed->start();
    made.watched.push_back({reinterpret_cast<const std::byte*>(&*bed->reader), sizeof(RingReader)});
    return made;
}

// One process fills in the header, another one reads it; the file system orders nothing between them.
Scenario header_is_filled_in() {
    const auto bed = std::make_shared<Bed>(1);
    const core::SegmentPlan plan = broadcast::plan_of(bed->geometry);
    core::SegmentHeader& header = bed->segment->header();
    Scenario made = bed->scenario(
        "header",
        {[bed, plan, &header] {
             core::fill_in(header, plan, {}, core::place_sections(plan), bed->segment->bytes());
         },
         [bed, plan, &header] {
             const auto seen = core::copy_header(bed->reader_segment->file(), header, plan.header_offset());
             if (!seen) return;
             require(seen->geometry == plan.geometry && seen->section_count == plan.sections.size(), "torn read of the header");
         }},
        [bed, &header] {
            bed->clean();
            std::memset(&header, 0, sizeof header);
            map_files_at(bed->segment->mapping()->base());
        });
    made.atomics = {{reinterpret_cast<const std::byte*>(&header.magic), sizeof header.magic}};
    return made;
}

}  // namespace

std::vector<Scenario> small_scenarios() {
    return {header_is_filled_in(), first_message(false),  next_lap(4),
            next_lap(1),           writer_waits_twice(),  reader_joins(),
            reader_leaves(),       writer_leaves(),       writer_leaves_a_waiting_reader(),
            reader_is_stopped(),     last_reader_wakes(),   late_reader(),
            latest_message(),      latest_message_given_up(), latest_message_kept()};
}

std::vector<Scenario> large_scenarios() { return {first_message(true), reader_waits_twice(), laps(2)}; }

}  // namespace memlane::weak
