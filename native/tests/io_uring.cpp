// The interface of io_uring that native/os/io_uring.hpp declares is that of the kernel's own header, where that is new
// enough.
#include "os/io_uring.hpp"

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#include <sys/syscall.h>

#include <cstddef>

using namespace memlane::os::uring;

#if defined(IORING_FEAT_RW_CUR_POS)
static_assert(kSetup == SYS_io_uring_setup && kEnter == SYS_io_uring_enter && kRegister == SYS_io_uring_register);
static_assert(kRings == IORING_OFF_SQ_RING && kEntries == IORING_OFF_SQES);
static_assert(kHasSingleMap == IORING_FEAT_SINGLE_MMAP && kHasPlainReads == IORING_FEAT_RW_CUR_POS);
static_assert(kGetEvents == IORING_ENTER_GETEVENTS && kRegisterBuffers == IORING_REGISTER_BUFFERS);
static_assert(static_cast<int>(Operation::read) == IORING_OP_READ);
static_assert(static_cast<int>(Operation::write) == IORING_OP_WRITE);
static_assert(static_cast<int>(Operation::read_fixed) == IORING_OP_READ_FIXED);
static_assert(static_cast<int>(Operation::write_fixed) == IORING_OP_WRITE_FIXED);
static_assert(static_cast<int>(Operation::poll_add) == IORING_OP_POLL_ADD);

static_assert(sizeof(Parameters) == sizeof(io_uring_params));
static_assert(offsetof(Parameters, flags) == offsetof(io_uring_params, flags));
static_assert(offsetof(Parameters, features) == offsetof(io_uring_params, features));
static_assert(offsetof(Parameters, queue) == offsetof(io_uring_params, sq_off));
static_assert(offsetof(Parameters, done) == offsetof(io_uring_params, cq_off));
static_assert(offsetof(QueueOffsets, head) == offsetof(io_sqring_offsets, head));
static_assert(offsetof(QueueOffsets, tail) == offsetof(io_sqring_offsets, tail));
static_assert(offsetof(QueueOffsets, array) == offsetof(io_sqring_offsets, array));
static_assert(offsetof(ResultOffsets, head) == offsetof(io_cqring_offsets, head));
static_assert(offsetof(ResultOffsets, tail) == offsetof(io_cqring_offsets, tail));
static_assert(offsetof(ResultOffsets, results) == offsetof(io_cqring_offsets, cqes));

static_assert(sizeof(Request) == sizeof(io_uring_sqe));
static_assert(offsetof(Request, fd) == offsetof(io_uring_sqe, fd));
static_assert(offsetof(Request, offset) == offsetof(io_uring_sqe, off));
static_assert(offsetof(Request, address) == offsetof(io_uring_sqe, addr));
static_assert(offsetof(Request, bytes) == offsetof(io_uring_sqe, len));
static_assert(offsetof(Request, tag) == offsetof(io_uring_sqe, user_data));
static_assert(sizeof(Done) == sizeof(io_uring_cqe));
static_assert(offsetof(Done, value) == offsetof(io_uring_cqe, res));
#endif
#if defined(IORING_SETUP_COOP_TASKRUN)
static_assert(kSetupCoopTaskrun == IORING_SETUP_COOP_TASKRUN);
#endif

int main() {}
