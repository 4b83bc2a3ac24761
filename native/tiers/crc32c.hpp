// CRC-32C (Castagnoli; RFC 3720, appendix B.4): 8 bytes an instruction where the processor has one, in three streams,
// because an instruction takes three cycles and one begins in each.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "core/copy_streaming.hpp"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define MEMLANE_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#define MEMLANE_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace memlane::tiers {

class Crc32c {
public:
    // The CRC of the bytes, after those that gave `crc`; 0 before the first.
    static std::uint32_t of(std::span<const std::byte> bytes, std::uint32_t crc = 0) noexcept {
        return ~(has_instruction() ? fast(~crc, bytes.data(), bytes.size()) : slow(~crc, bytes.data(), bytes.size()));
    }

    // The same, and copies them past the caches, in pieces that the nearest cache keeps between the two. (memcpy of a few
    // KiB is `rep movsb`, which some processors do at 2 GB/s unless both addresses are aligned alike.)
    static std::uint32_t copy(std::byte* to, std::span<const std::byte> bytes, std::uint32_t crc) noexcept {
        core::StreamingCopy copying;
        while (!bytes.empty()) {
            const auto piece = bytes.first(std::min(bytes.size(), 4 * kRound));
            crc = of(piece, crc);
            core::StreamingCopy::add_cached(to, piece.data(), piece.size());
            to += piece.size();
            bytes = bytes.subspan(piece.size());
        }
        copying.finish();
        return crc;
    }

    static bool has_instruction() noexcept {
#if defined(__x86_64__)
        static const bool has = __builtin_cpu_supports("sse4.2") != 0;
        return has;
#elif defined(__aarch64__)
        static const bool has = (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
        return has;
#else
        return false;
#endif
    }

    // Without the instruction.
    static std::uint32_t slow(std::uint32_t crc, const std::byte* at, std::size_t bytes) noexcept {
        for (; bytes > 0; --bytes, ++at) crc = (crc >> 8) ^ kByte[(crc ^ static_cast<std::uint32_t>(*at)) & 0xff];
        return crc;
    }

private:
    using Table = std::array<std::uint32_t, 256>;
    static constexpr std::uint32_t kPolynomial = 0x82f63b78;  // reversed
    static constexpr std::size_t kStream = 1024, kRound = 3 * kStream, kUnrolled = 64;

    static constexpr Table kByte = [] {
        Table table{};
        for (std::uint32_t i = 0; i < 256; ++i) {
            std::uint32_t crc = i;
            for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
            table[i] = crc;
        }
        return table;
    }();

    // What a CRC becomes by kStream zero bytes: it is linear, so four tables, one for each of its bytes.
    struct Shift {
        std::array<Table, 4> of_byte{};
        Shift() noexcept {
            for (std::uint32_t byte = 0; byte < 4; ++byte)
                for (std::uint32_t value = 0; value < 256; ++value) {
                    std::uint32_t crc = value << (8 * byte);
                    for (std::size_t i = 0; i < kStream; ++i) crc = (crc >> 8) ^ kByte[crc & 0xff];
                    of_byte[byte][value] = crc;
                }
        }
        std::uint32_t operator()(std::uint32_t crc) const noexcept {
            return of_byte[0][crc & 0xff] ^ of_byte[1][(crc >> 8) & 0xff] ^ of_byte[2][(crc >> 16) & 0xff] ^
                   of_byte[3][crc >> 24];
        }
    };

#if defined(MEMLANE_CRC_TARGET)
    MEMLANE_CRC_TARGET static std::uint64_t step(std::uint64_t crc, const std::byte* at) noexcept {
        std::uint64_t word;
        std::memcpy(&word, at, sizeof word);
#if defined(__x86_64__)
        return _mm_crc32_u64(crc, word);
#else
        return __crc32cd(static_cast<std::uint32_t>(crc), word);
#endif
    }

    MEMLANE_CRC_TARGET static std::uint32_t fast(std::uint32_t start, const std::byte* at, std::size_t bytes) noexcept {
        static const Shift shift;
        std::uint64_t crc = start;
        for (; bytes >= kRound; bytes -= kRound, at += kRound) {
            std::uint64_t second = 0, third = 0;
            for (std::size_t i = 0; i < kStream; i += kUnrolled) {  // a shorter loop is slower where it crosses a cache line
                for (std::size_t j = i; j < i + kUnrolled; j += 8) {
                    crc = step(crc, at + j);
                    second = step(second, at + kStream + j);
                    third = step(third, at + 2 * kStream + j);
                }
            }
            crc = shift(static_cast<std::uint32_t>(crc)) ^ second;
            crc = shift(static_cast<std::uint32_t>(crc)) ^ third;
        }
        for (; bytes >= 8; bytes -= 8, at += 8) crc = step(crc, at);
        return slow(static_cast<std::uint32_t>(crc), at, bytes);
    }
#else
    static std::uint32_t fast(std::uint32_t crc, const std::byte* at, std::size_t bytes) noexcept {
        return slow(crc, at, bytes);
    }
#endif
};

}  // namespace memlane::tiers
