/* A thread that watches a reader for an event loop (core/watcher.hpp), with the waker of core/wait.hpp.
 *
 * Modelled: pause, resume, the thread's loop and its lock as they stand, and wake_parked of a writer. The thread's word is
 * compared by the futex as in wait.pml; there are no slices, so what only a look would find counts as lost. The reader's
 * owner sleeps until the descriptor is readable; with BLOCKS it may also call at any time, and then waits by itself, as
 * wait_until does, with the same `parked` byte. Stores are buffered (memory.pml). A lock is taken by a read-modify-write,
 * which waits for nothing, and dropped by a release.
 *
 * Abstracted: what is published is a counter, modulo CAPACITY + 1. The writer waits for a free chunk by itself. What the
 * lock protects (state, the position, whether the eventfd is set) is not buffered.
 *
 * Proven, for CAPACITY chunks:
 *   every_message_is_shown   when nothing can move any more, and a message is unread, the descriptor is readable, and
 *                            nobody sleeps in a call
 */
#define WRITER 0
#define OWNER 1
#define THREAD 2
#define OWNERS 3
#define DEPTH 4

#define PUBLISHED 0
#define CONSUMED 1
#define PARKED 2
#define LOCK 3
#define LOCATIONS 4
#define POSITIONS (CAPACITY + 1)

#define CALLING 0
#define ARMED 1
#define READABLE 2

#include "memory.pml"

byte position[2];                /* what the writer has published, and the reader consumed */
byte state = CALLING;
bit shown;
bit asleep[OWNERS];
bit is_current[OWNERS];          /* nobody has incremented the word since it was loaded */
bit every_message_is_shown = 1;

inline lock() { d_step { memory[LOCK] == 0 -> memory[LOCK] = 1 } }
inline unlock(who) { store_release(who, LOCK, 0) }

inline futex_wait(who) {
#ifdef FUTEX_COMPARES_NOT
    asleep[who] = 1;
#else
    d_step {
        if
        :: is_current[who] -> asleep[who] = 1; is_current[who] = 0
        :: else
        fi
    };
#endif
    !asleep[who]
}

inline ask_ready(who) {
    load(who, PUBLISHED, ready);                    /* SYNC publish.load */
    ready = (ready != position[OWNER])
}

inline make_readable(who) {
    if
    :: state == ARMED -> store_relaxed(who, PARKED, 0)
    :: else
    fi;
    state = READABLE;
    shown = 1
}

inline pause() {
    lock();
    if
    :: state == ARMED -> store_relaxed(OWNER, PARKED, 0)
    :: else
    fi;
#ifndef NOT_DISARMED
    state = CALLING;
#endif
    unlock(OWNER)
}

inline resume() {
    lock();
    ask_ready(OWNER);
    if
    :: ready -> make_readable(OWNER)
    :: else ->
        shown = 0;
        state = ARMED;
        store_relaxed(OWNER, PARKED, 1);            /* SYNC park.store */
#ifndef NO_FENCE_IN_RESUME
        full_fence(OWNER);
#endif
#ifndef NOT_ASKED_AGAIN
        ask_ready(OWNER);
        if
        :: ready -> make_readable(OWNER)
        :: else
        fi
#endif
    fi;
    ready = 0;
    unlock(OWNER)
}

/* wait_until. */
inline wait_in_call() {
    ask_ready(OWNER);
    do
    :: ready -> break
    :: else ->
        is_current[OWNER] = 1;                      /* SYNC wake.load */
        store_relaxed(OWNER, PARKED, 1);            /* SYNC park.store */
        full_fence(OWNER);
        ask_ready(OWNER);
        if
        :: !ready -> futex_wait(OWNER)
        :: else -> is_current[OWNER] = 0
        fi;
        store_relaxed(OWNER, PARKED, 0);
        if
        :: !ready -> ask_ready(OWNER)
        :: else
        fi
    od
}

inline take() {
    ask_ready(OWNER);
    if
    :: ready ->
        position[OWNER] = (position[OWNER] + 1) % POSITIONS;
        store_release(OWNER, CONSUMED, position[OWNER])             /* SYNC consume.store */
    :: else
    fi;
    ready = 0
}

proctype owner() {
    byte ready;
    resume();
end:
    do
    :: shown ->
       pause();
       take();
       resume()
#ifdef BLOCKS
    :: pause();
       wait_in_call();
       take();
       resume()
#endif
    od
}

proctype thread() {
    byte ready;
end:
    do
    :: lock();
#ifndef WORD_LOADED_LATE
       is_current[THREAD] = 1;                      /* SYNC wake.load */
#endif
#ifndef NOT_PARKED_ANEW
       if
       :: state == ARMED -> store_relaxed(THREAD, PARKED, 1)        /* SYNC park.store */
       :: else
       fi;
#endif
#ifndef NO_FENCE_IN_THREAD
       full_fence(THREAD);
#endif
       if
       :: state == ARMED ->
           ask_ready(THREAD);
           if
           :: ready -> make_readable(THREAD)
           :: else
           fi;
           ready = 0
       :: else
       fi;
#ifdef WORD_LOADED_LATE
       is_current[THREAD] = 1;
#endif
       unlock(THREAD);
       futex_wait(THREAD)
    od
}

/* publish, and wake_parked. */
proctype writer() {
    byte parked;
    do
    :: (position[WRITER] + POSITIONS - memory[CONSUMED]) % POSITIONS < CAPACITY ->
       position[WRITER] = (position[WRITER] + 1) % POSITIONS;
       store_release(WRITER, PUBLISHED, position[WRITER]);          /* SYNC publish.store */
       full_fence(WRITER);
       load(WRITER, PARKED, parked);                                /* SYNC park.load */
       if
       :: parked ->
           parked = 0;
           store_relaxed(WRITER, PARKED, 0);
           d_step {                                                 /* SYNC wake.store */
               buffer[WRITER].count == 0 ->
               is_current[OWNER] = 0;
               is_current[THREAD] = 0
           };
           d_step { asleep[OWNER] = 0; asleep[THREAD] = 0 }
       :: else
       fi
    :: break                                        /* it has nothing more to say */
    od
}

proctype rest() {
end:
    timeout ->
    d_step {
        every_message_is_shown = memory[PUBLISHED] == memory[CONSUMED] || (shown && !asleep[OWNER]);
        assert(every_message_is_shown)
    }
}

init {
    byte i;
    atomic {
        run writer();
        run owner();
        run thread();
        for (i : 0 .. OWNERS - 1) { run reaches_memory(i) }
        run rest();
        i = 0
    }
}
