// CUDA's runtime as tests have it: its functions, its rules for their arguments, and memcpy. A call that breaks a rule is
// refused as CUDA would, also where CUDA leaves it undefined. Memory of a "GPU" is what a test says is one.
//
// Copies of page-locked memory are done when somebody waits for them (`finish`), those of other memory at once.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <vector>

namespace {

using Address = std::uintptr_t;
using Ranges = std::map<Address, Address>;  // begin, end; none touches another in the middle

struct Copy {
    char* to;
    const char* from;
    std::size_t bytes;
};

struct Location {
    int type;
    int id;
};

struct Attributes {
    int source_access_order;
    Location source, target;
    unsigned flags;
};

enum Code { success = 0, invalid_value = 1, invalid_pitch = 12, invalid_direction = 21, invalid_handle = 400,
            registered_already = 712, not_registered = 713 };
constexpr Address kStream = 0x5eed0;

Ranges registered, of_gpu;
std::vector<Copy> waiting;
int sticky = 0, calls = 0, fails_at = 0, fails_with = 0, late = 0, batches = 0, waits = 0;

int refuse(int code) { return sticky = code; }

Address at(const void* p) { return reinterpret_cast<Address>(p); }

// The number of bytes of it lie in the ranges.
std::size_t common(const Ranges& ranges, const void* memory, std::size_t bytes) {
    std::size_t sum = 0;
    for (const auto& [begin, end] : ranges) {
        const Address low = begin > at(memory) ? begin : at(memory);
        const Address high = end < at(memory) + bytes ? end : at(memory) + bytes;
        if (low < high) sum += high - low;
    }
    return sum;
}

bool is_mapped(const void* memory, std::size_t bytes) {
    const Address page = static_cast<Address>(sysconf(_SC_PAGESIZE));
    unsigned char found;
    for (Address a = at(memory) / page * page; a < at(memory) + bytes; a += page)
        if (mincore(reinterpret_cast<void*>(a), 1, &found) != 0) return false;
    return true;
}

bool fails() { return ++calls == fails_at; }

// True if it reaches from one registration into another, which drivers refuse.
bool reaches_on(const void* memory, std::size_t bytes) {
    const std::size_t all = common(registered, memory, bytes);
    return all != 0 && std::none_of(registered.begin(), registered.end(), [&](const auto& range) {
               return common({range}, memory, bytes) == all;
           });
}

// One side in the GPU and the other not, in that direction; the other page-locked in whole or not at all.
int check(const Copy& copy, int kind) {
    if (copy.to == nullptr || copy.from == nullptr || copy.bytes == 0) return invalid_value;
    const void* const host = kind == 1 ? copy.from : copy.to;
    const void* const gpu = kind == 1 ? copy.to : copy.from;
    if (kind != 1 && kind != 2) return invalid_direction;
    if (common(of_gpu, gpu, copy.bytes) != copy.bytes || common(of_gpu, host, copy.bytes) != 0) return invalid_direction;
    const std::size_t locked = common(registered, host, copy.bytes);
    if (locked != 0 && locked != copy.bytes) return invalid_value;
    return reaches_on(host, copy.bytes) ? invalid_value : success;
}

void queue(const Copy& copy) {
    if (common(registered, copy.from, copy.bytes) + common(registered, copy.to, copy.bytes) != 0)
        waiting.push_back(copy);
    else
        std::memcpy(copy.to, copy.from, copy.bytes);
}

bool is_stream(const void* stream) { return at(stream) <= 2 || at(stream) == kStream; }

int batch(void* const* to, const void* const* from, const std::size_t* bytes, std::size_t count, const Attributes* attributes,
          const std::size_t* first, std::size_t sets, const void* stream) {
    if (fails()) return refuse(fails_with);
    if (!is_stream(stream) || at(stream) <= 1) return refuse(invalid_handle);
    if (count == 0 || sets != 1 || first[0] != 0) return refuse(invalid_value);
    if (attributes->source_access_order < 1 || attributes->source_access_order > 3) return refuse(invalid_value);
    if (attributes->source.type != 0 || attributes->target.type != 0 || attributes->flags > 1) return refuse(invalid_value);
    for (std::size_t i = 0; i < count; ++i) {
        const Copy copy{static_cast<char*>(to[i]), static_cast<const char*>(from[i]), bytes[i]};
        if (const int code = check(copy, common(of_gpu, to[i], 1) != 0 ? 1 : 2)) return refuse(code);
    }
    for (std::size_t i = 0; i < count; ++i) queue({static_cast<char*>(to[i]), static_cast<const char*>(from[i]), bytes[i]});
    ++batches;
    return success;
}

}  // namespace

extern "C" {

int cudaHostRegister(void* memory, std::size_t bytes, unsigned flags) {
    if (fails()) return refuse(fails_with);
    if (memory == nullptr || bytes == 0 || flags > 15 || !is_mapped(memory, bytes)) return refuse(invalid_value);
    if (common(registered, memory, bytes) != 0) return refuse(registered_already);
    registered[at(memory)] = at(memory) + bytes;
    return success;
}

int cudaHostUnregister(void* memory) {
    if (!waiting.empty() || !is_mapped(memory, 1)) ++late;
    return registered.erase(at(memory)) != 0 ? success : refuse(not_registered);
}

int cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int kind, void* stream) {
    if (fails()) return refuse(fails_with);
    const Copy copy{static_cast<char*>(to), static_cast<const char*>(from), bytes};
    if (!is_stream(stream)) return refuse(invalid_handle);
    if (const int code = check(copy, kind)) return refuse(code);
    queue(copy);
    return success;
}

int cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t width,
                      std::size_t height, int kind, void* stream) {
    if (fails()) return refuse(fails_with);
    if (!is_stream(stream)) return refuse(invalid_handle);
    if (width > to_pitch || width > from_pitch || to_pitch > 0x7fffffff || from_pitch > 0x7fffffff)
        return refuse(invalid_pitch);
    const std::size_t span = (height - 1) * (kind == 1 ? from_pitch : to_pitch) + width;
    if (reaches_on(kind == 1 ? from : to, span)) return refuse(invalid_value);
    for (int is_real = 0; is_real < 2; ++is_real)
        for (std::size_t row = 0; row < height; ++row) {
            const Copy copy{static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width};
            if (is_real != 0)
                queue(copy);
            else if (const int code = check(copy, kind))
                return refuse(code);
        }
    return success;
}

#if VERSION >= 13000
int cudaMemcpyBatchAsync(void* const* to, const void* const* from, const std::size_t* bytes, std::size_t count,
                         Attributes* attributes, std::size_t* first, std::size_t sets, void* stream) {
    return batch(to, from, bytes, count, attributes, first, sets, stream);
}
#elif VERSION >= 12080
int cudaMemcpyBatchAsync(void** to, void** from, std::size_t* bytes, std::size_t count, Attributes* attributes,
                         std::size_t* first, std::size_t sets, std::size_t* failed, void* stream) {
    *failed = SIZE_MAX;
    return batch(to, from, bytes, count, attributes, first, sets, stream);
}
#endif

int cudaRuntimeGetVersion(int* version) { return *version = VERSION, success; }
int cudaDriverGetVersion(int* version) { return *version = DRIVER, success; }
int cudaGetLastError() {
    const int last = sticky;
    sticky = 0;
    return last;
}
const char* cudaGetErrorString(int code) { return code == 2 ? "out of memory" : "it failed"; }

// For tests.
void be_gpu(const void* memory, std::size_t bytes) { of_gpu[at(memory)] = at(memory) + bytes; }
void fail_at_call(int number, int code) { calls = 0, fails_at = number, fails_with = code; }
void finish() {
    for (const Copy& copy : waiting) std::memcpy(copy.to, copy.from, copy.bytes);
    waiting.clear();
    ++waits;
}
int times_finished() { return waits; }
std::size_t copies_waiting() { return waiting.size(); }
std::size_t ranges_registered() { return registered.size(); }
std::size_t bytes_registered() {
    std::size_t sum = 0;
    for (const auto& [begin, end] : registered) sum += end - begin;
    return sum;
}
int sticky_error() { return sticky; }
int batches_queued() { return batches; }
// Too late: after unmapping, or while copies were under way.
int unregistered_late() { return late; }
}
