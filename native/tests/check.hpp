// A minimal test framework, so that nothing has to be installed on a bare machine.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            std::_Exit(1);                                                                \
        }                                                                                 \
    } while (false)

namespace memlane::testing {

// A pipe through which one process tells another that it has reached a point.
class Signal {
public:
    Signal() { CHECK(::pipe(ends_) == 0); }
    void send() const { CHECK(::write(ends_[1], "x", 1) == 1); }
    void wait() const {
        char c;
        CHECK(::read(ends_[0], &c, 1) == 1);
    }

private:
    int ends_[2];
};

inline int exit_code(pid_t pid) {
    int status = 0;
    CHECK(::waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace memlane::testing
