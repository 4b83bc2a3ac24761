// Two readers race with a writer that evicts every object without a pin: every byte read is of the requested object. Also
// built with ThreadSanitizer, which sees races through one mapping only. The argument is the number of objects.
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "stores.hpp"

using namespace memlane;
using namespace memlane::testing;

int main(int argc, char** argv) {
    CHECK(argc == 2);
    const auto objects = static_cast<std::uint32_t>(std::stoul(argv[1]));
    const Store s{1, 256};  // one place: every object overwrites the one that is being read
    std::atomic<std::uint32_t> newest{0};
    std::atomic<std::uint64_t> right{0};
    std::atomic<std::uint64_t> refused{0};
    s.put(0);
    std::vector<std::thread> threads;
    for (const auto& reader : {s.one, s.two}) {
        threads.emplace_back([&, reader] {
            for (std::uint32_t id = 0; id < objects;) {
                id = newest.load();
                const auto object = reader->pin(s.address_of(id), id);
                if (!object) {
                    refused.fetch_add(1);
                    continue;
                }
                for (std::uint64_t i = 0; i < s.payload_bytes(); ++i)
                    CHECK(s.payload(s.address_of(id))[i] == static_cast<std::byte>(id % 251));
                CHECK(reader->is_valid(*object));
                reader->count(*object);
                reader->unpin(*object);
                right.fetch_add(1);
            }
        });
    }
    std::uint64_t kept = 0;
    for (std::uint32_t id = 1; id <= objects; ++id) {
        while (!s.writer->retire(id - 1)) ++kept;
        s.put(id);
        newest.store(id);
    }
    for (std::thread& thread : threads) thread.join();
    std::printf("store_threads: %u objects, %llu reads right, %llu refused, %llu times the writer was kept out\n", objects,
                static_cast<unsigned long long>(right.load()), static_cast<unsigned long long>(refused.load()),
                static_cast<unsigned long long>(kept));
}
