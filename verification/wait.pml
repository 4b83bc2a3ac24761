/* Sleeping and waking (core/wait.hpp), with the two ends of a ring on it (begin, publish, finish, announce_close,
 * stop_waiting of broadcast/ring_writer.hpp and broadcast/ring_reader.hpp).
 *
 * Modelled: wait_until as it stands, without the spin and without the slices of 100 ms: a sleeper that would only be
 * rescued by its slice counts as lost. wake_parked, wake_always, and a futex whose wait compares and sleeps in one step
 * and whose wake wakes all. The writer waits for the readers and the readers for the writer, whom only the last one
 * wakes that the chunk waits for. A futex wait may end for no reason, once per end (a signal). Stores are buffered
 * (memory.pml).
 *
 * Abstracted: the flags are one counter that the writer publishes and one per reader that it consumes, modulo
 * CAPACITY + 1 (ring.pml is about the flags). The writer may stop for ever, either side may close (CLOSES), the
 * first reader die, which the writer finds at the end of a slice, and be released (DIES), or it may be closed from
 * another thread (STOPPED). Of a futex word only matters whether it has changed since its
 * load (that 2^32 increments come in between is ruled out). The word `membership` is waited for in the same loop and
 * is always woken; it is not here.
 *
 * BURSTS: the writer publishes several messages before it looks who sleeps: at the end of a burst, and before it waits.
 *
 * Proven, for CAPACITY chunks and READERS readers:
 *   nobody_left_asleep   when nothing can move any more, nobody sleeps whose condition holds
 *   (LIVENESS) every_sleeper_is_woken, under weak fairness, also while everything goes on
 */
#define WRITER 0
#define READER(r) (1 + (r))
#define STOPPER (1 + READERS)
#ifdef STOPPED
#define OWNERS (2 + READERS)
#else
#define OWNERS (1 + READERS)
#endif
#define DEPTH 4

#define PUBLISHED 0
#define CONSUMED(r) (1 + (r))
#define PARKED(who) (1 + READERS + (who))
#define STATE(slot) (2 + 2 * READERS + (slot))
#define CLOSING (3 + 3 * READERS)
#define LOCATIONS (4 + 3 * READERS)
#define CLOSED 1
#define POSITIONS (CAPACITY + 1)
#define WORD_PUBLISHED 1
#define WORD_CONSUMED 2

#include "memory.pml"

byte position[OWNERS];           /* what an end has published or consumed */
byte asleep[OWNERS];         /* the word that the process sleeps on */
bit is_current[OWNERS];      /* nobody has incremented the word since the process loaded it */
bit has_been_signalled[OWNERS];
bit nobody_left_asleep = 1;
#ifdef DIES
bit is_dead;                 /* the first reader, and the writer has not found it yet */
#endif

#ifdef ONE_BYTE_FOR_ALL
#define PARKED_OF(who) PARKED((who) > 0)
#else
#define PARKED_OF(who) PARKED(who)
#endif

/* futex_wait: the kernel compares and puts to sleep in one step. */
inline futex_wait(who, word) {
#ifdef FUTEX_COMPARES_NOT
    asleep[who] = word;
#else
    d_step {
        if
        :: is_current[who] -> asleep[who] = word; is_current[who] = 0
        :: else
        fi
    };
#endif
    if
    :: !asleep[who]
#ifdef DIES
    :: d_step { asleep[who] && (who) == WRITER && is_dead -> asleep[who] = 0 }      /* a slice ends */
#endif
#ifdef SIGNALS
    :: d_step { asleep[who] && !has_been_signalled[who] -> asleep[who] = 0; has_been_signalled[who] = 1 }
#endif
    fi
}

inline futex_wake_all(word) {
    d_step {
#ifdef WAKE_ONE
        if
        :: asleep[0] == (word) -> asleep[0] = 0
        :: else ->
            if
            :: asleep[1] == (word) -> asleep[1] = 0
            :: else -> asleep[2] = (asleep[2] == (word) -> 0 : asleep[2])
            fi
        fi
#else
        asleep[0] = (asleep[0] == (word) -> 0 : asleep[0]);
        asleep[1] = (asleep[1] == (word) -> 0 : asleep[1]);
#if READERS > 1
        asleep[2] = (asleep[2] == (word) -> 0 : asleep[2])
#endif
#endif
    }
}

/* Read-modify-write: it acts on the memory at once, as a release after all earlier stores. */
inline fetch_add(who, word) {
    d_step {
#ifndef WAKE_RELAXED
        buffer[who].count == 0 ->
#endif
        is_current[WRITER] = is_current[WRITER] && word != WORD_CONSUMED;
        is_current[READER(0)] = is_current[READER(0)] && word != WORD_PUBLISHED;
#if READERS > 1
        is_current[READER(1)] = is_current[READER(1)] && word != WORD_PUBLISHED
#endif
    }
}

inline wake_always(who, word) {
    fetch_add(who, word);                           /* SYNC wake.store */
    futex_wake_all(word)
}

inline look_at_parked(who, other) {
    load(who, PARKED_OF(other), parked);            /* SYNC park.load */
    if
    :: parked ->
#ifndef CLEARED_AFTER_INCREMENT
        store_relaxed(who, PARKED_OF(other), 0);
#endif
        parked = 0;
        any = 1
    :: else
    fi
}

/* `first` and `last`: the ends that sleep on the word. */
inline wake_parked(who, word, first, last) {
#ifndef NO_FENCE_IN_WAKE
    full_fence(who);
#endif
    look_at_parked(who, first);
    if
    :: first != last -> look_at_parked(who, last)
    :: else
    fi;
    if
    :: any ->
        any = 0;
#ifdef CLEARED_AFTER_INCREMENT
        fetch_add(who, word);
        store_relaxed(who, PARKED_OF(first), 0);
        store_relaxed(who, PARKED_OF(last), 0);
        futex_wake_all(word)
#else
        wake_always(who, word)
#endif
    :: else
    fi
}

/* Has reader `s`, too, given back the chunk that `r` has given back just now? The chunk may have been published again
 * meanwhile: then its flags have fallen, that of `r` among them. */
inline ask_other(r, s) {
    load(READER(r), PUBLISHED, ready);
    if
    :: (ready + POSITIONS - position[READER(r)]) % POSITIONS == CAPACITY -> is_last = 0
    :: else ->
        load(READER(r), CONSUMED(s), parked);
        is_last = ((ready + POSITIONS - parked) % POSITIONS <= (ready + POSITIONS - position[READER(r)]) % POSITIONS);
        parked = 0
    fi;
    ready = 0;
#if (defined(CLOSES) || defined(DIES)) && !defined(CLOSED_IS_WAITED_FOR)
    if
    :: !is_last -> load(READER(r), STATE(1 + (s)), is_last)         /* SYNC leave.load */
    :: else
    fi
#endif
}

/* wake_parked of a reader that has given back a chunk. */
inline wake_writer(r) {
#ifdef OTHERS_ASKED_BEFORE_FENCE
    is_last = 1;
    if
    :: READERS > 1 -> ask_other(r, 1 - r)
    :: else
    fi;
#endif
#ifndef NO_FENCE_IN_WAKE
    full_fence(READER(r));
#endif
    load(READER(r), PARKED_OF(WRITER), parked);                     /* SYNC park.load */
    if
    :: parked ->
        parked = 0;
#ifdef CLEARED_BY_ANYBODY
        store_relaxed(READER(r), PARKED_OF(WRITER), 0);
#endif
#ifndef OTHERS_ASKED_BEFORE_FENCE
        is_last = 1;
        if
        :: READERS > 1 -> ask_other(r, 1 - r)
        :: else
        fi;
#endif
        if
        :: is_last ->
#ifdef CLEARED_AFTER_INCREMENT
            fetch_add(READER(r), WORD_CONSUMED);
            store_relaxed(READER(r), PARKED_OF(WRITER), 0);
            futex_wake_all(WORD_CONSUMED)
#else
            store_relaxed(READER(r), PARKED_OF(WRITER), 0);
            wake_always(READER(r), WORD_CONSUMED)
#endif
        :: else
        fi;
    :: else
    fi;
    is_last = 0
}

inline ask_one(r) {
    load(WRITER, CONSUMED(r), ready);
    ready = ((position[WRITER] + POSITIONS - ready) % POSITIONS < CAPACITY);
#if defined(CLOSES) || defined(DIES)
    if
    :: !ready -> load(WRITER, STATE(1 + r), ready)  /* SYNC leave.load */
    :: else
    fi
#endif
}
inline is_free() {
    ask_one(0);
#if READERS > 1
    if
    :: ready -> ask_one(1)
    :: else
    fi
#endif
}

inline is_published(who) {
    load(who, PUBLISHED, ready);                    /* SYNC publish.load */
    ready = (ready != position[who]);
#ifdef CLOSES
    if
    :: !ready -> load(who, STATE(0), ready)         /* SYNC leave.load */
    :: else
    fi;
#endif
#ifdef STOPPED
    if
    :: !ready && who == READER(0) -> load(who, CLOSING, ready)
    :: else
    fi
#endif
}

inline ask_ready(who) {
    if
    :: (who) == WRITER -> is_free()
    :: else -> is_published(who)
    fi
}

inline wait_until(who, word) {
    ask_ready(who);
    do
    :: ready -> break
    :: else ->
#ifdef WAKE_LOAD_RELAXED
        store_relaxed(who, PARKED_OF(who), 1);
        is_current[who] = 1;
#else
        is_current[who] = 1;                      /* SYNC wake.load */
        store_relaxed(who, PARKED_OF(who), 1);      /* SYNC park.store */
#endif
#ifndef NO_FENCE_IN_WAIT
        full_fence(who);
#endif
#ifndef NOT_ASKED_AGAIN
        ask_ready(who);
#endif
        if
        :: !ready -> futex_wait(who, word)
        :: else -> is_current[who] = 0
        fi;
        store_relaxed(who, PARKED_OF(who), 0);
#ifdef DIES
        if
        :: (who) == WRITER && is_dead ->
            is_dead = 0;
            store_release(WRITER, STATE(1), CLOSED)                 /* release_reader */
        :: else
        fi;
#endif
        if
        :: !ready -> ask_ready(who)
        :: else
        fi
    od;
    ready = 0
}

proctype writer() {
    byte ready, parked;
    bit any, is_due;
    do
    ::
#if defined(BURSTS) && !defined(BURST_WAITS_BEFORE_WAKING)
       if
       :: is_due ->
          is_free();
          if
          :: !ready -> wake_parked(WRITER, WORD_PUBLISHED, READER(0), READER(READERS - 1)); is_due = 0
          :: else
          fi;
          ready = 0
       :: else
       fi;
#endif
       wait_until(WRITER, WORD_CONSUMED);
       position[WRITER] = (position[WRITER] + 1) % POSITIONS;
#ifdef WOKEN_BEFORE_PUBLISHED
       wake_parked(WRITER, WORD_PUBLISHED, READER(0), READER(READERS - 1));
       store_release(WRITER, PUBLISHED, position[WRITER])
#else
       store_release(WRITER, PUBLISHED, position[WRITER]);     /* SYNC publish.store */
#ifdef BURSTS
       if
       :: is_due = 1                                /* the burst goes on */
       :: is_due = 0;
#ifndef BURST_ENDS_WITHOUT_WAKING
          wake_parked(WRITER, WORD_PUBLISHED, READER(0), READER(READERS - 1))
#endif
       fi
#else
       wake_parked(WRITER, WORD_PUBLISHED, READER(0), READER(READERS - 1))
#endif
#endif
    :: !is_due -> break                             /* it has nothing more to say */
#ifdef CLOSES
    :: !is_due -> store_release(WRITER, STATE(0), CLOSED);     /* SYNC leave.store */
#ifndef CLOSED_WITHOUT_WAKING
       wake_always(WRITER, WORD_PUBLISHED);
#endif
       break
#endif
    od
}

proctype reader(byte r) {
    byte ready, parked;
    bit is_last;
    do
    :: wait_until(READER(r), WORD_PUBLISHED);
       load(READER(r), PUBLISHED, ready);
       if
       :: ready == position[READER(r)] -> break                /* closed, and nothing left */
       :: else -> ready = 0
       fi;
       if
       :: position[READER(r)] = (position[READER(r)] + 1) % POSITIONS;
          store_release(READER(r), CONSUMED(r), position[READER(r)]);      /* SYNC consume.store */
          wake_writer(r)
#ifdef CLOSES
       :: store_release(READER(r), STATE(1 + r), CLOSED);       /* SYNC leave.store */
#ifndef CLOSED_READER_WAKES_NOBODY
          wake_always(READER(r), WORD_CONSUMED);
#endif
          break
#endif
#ifdef DIES
       :: r == 0 -> is_dead = 1; break
#endif
       fi
    od
}

#ifdef STOPPED
/* close() in another thread of the first reader's process. */
proctype stopper() {
#ifdef STOPPED_AFTER_WAKING
    wake_always(STOPPER, WORD_PUBLISHED);
    store_release(STOPPER, CLOSING, 1)
#else
    store_release(STOPPER, CLOSING, 1);
    wake_always(STOPPER, WORD_PUBLISHED)
#endif
}
#endif

#define IS_FREE_OF(r) (memory[STATE(1 + r)] || (memory[PUBLISHED] + POSITIONS - memory[CONSUMED(r)]) % POSITIONS < CAPACITY)
#define HAS_NEWS(r) (memory[STATE(0)] || (r == 0 && memory[CLOSING]) || memory[PUBLISHED] != memory[CONSUMED(r)])

proctype rest() {
end:
    timeout ->
    d_step {
        nobody_left_asleep = !(asleep[READER(0)] && HAS_NEWS(0));
#if READERS > 1
        nobody_left_asleep = nobody_left_asleep && !(asleep[READER(1)] && HAS_NEWS(1));
        nobody_left_asleep = nobody_left_asleep && !(asleep[WRITER] && IS_FREE_OF(0) && IS_FREE_OF(1));
#else
        nobody_left_asleep = nobody_left_asleep && !(asleep[WRITER] && IS_FREE_OF(0));
#endif
        assert(nobody_left_asleep)
    }
}

init {
    byte i;
    atomic {
        run writer();
        for (i : 0 .. READERS - 1) { run reader(i) }
#ifdef STOPPED
        run stopper();
#endif
        for (i : 0 .. OWNERS - 1) { run reaches_memory(i) }
#ifndef LIVENESS
        run rest();
#endif
        i = 0
    }
}

#ifdef LIVENESS
ltl every_sleeper_is_woken {
    [] ((asleep[READER(0)] && HAS_NEWS(0)) -> <> !asleep[READER(0)])
    && [] ((asleep[WRITER] && IS_FREE_OF(0)) -> <> !asleep[WRITER])
}
#endif
