// Which memory is free, as the kernel says.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>

namespace memlane::os {

// Those of all zones, from the text of /proc/buddyinfo: a line a zone, with the number of its free blocks of 1, 2, 4 ...
// pages.
inline std::uint64_t free_huge_pages_in(const char* text) noexcept {
    constexpr int kOrder = 9;  // 512 small pages
    std::uint64_t sum = 0;
    for (const char* zone = std::strstr(text, "zone"); zone != nullptr; zone = std::strstr(zone, "zone")) {
        for (int word = 0; word < 2; ++word) {  // "zone", and its name
            zone += std::strspn(zone, " ");
            zone += std::strcspn(zone, " \n");
        }
        unsigned long long blocks = 0;
        int length = 0;
        for (int order = 0; std::sscanf(zone, "%*[ ]%llu%n", &blocks, &length) == 1; ++order, zone += length)
            if (order >= kOrder) sum += blocks << (order - kOrder);
    }
    return sum;
}

// 0 if the file cannot be read.
inline std::uint64_t free_huge_pages() noexcept {
    std::FILE* const file = std::fopen("/proc/buddyinfo", "re");
    if (file == nullptr) return 0;
    char text[16384];
    text[std::fread(text, 1, sizeof text - 1, file)] = '\0';
    std::fclose(file);
    return free_huge_pages_in(text);
}

}  // namespace memlane::os
