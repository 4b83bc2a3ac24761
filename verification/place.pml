/* A reader's place that changes hands (readmit and admit of broadcast/ring_writer.hpp, attaching of
 * broadcast/ring_reader.hpp).
 *
 * Modelled: a ring with one place; its writer publishes, notices that the reader has closed or died, releases the
 * place, and opens it again, OPENINGS times at most. Two processes get a handle at any time, try once to take the place
 * with it, read, and close; the first may be killed between any two steps; the kernel then drops the lock, once all that it had stored is visible. With LATE the
 * place is open from the start, and the writer counts a reader only from the moment at which it sees it. Stores are
 * buffered (memory.pml); lock calls are steps that order. With REOPENED_LATE the writer counts from the start who comes first;
 * those who take a place that was opened again it counts from then on, or once it sees them, as it likes.
 *
 * Abstracted: waiting, and all that ring.pml and death.pml show. MESSAGES are published.
 *
 * Proven:
 *   begins_where_counted  a reader's first message is the next one after its place was opened, or it was counted
 *   whole_and_next        what it reads is whole, and is its next message: nothing of its predecessor's, nothing skipped
 *   place_is_held_by_one  nobody joins while a predecessor lives that has not closed
 *   handle_is_of_the_last_opening  nobody joins with a handle from before the place was opened again
 */
#define WRITER 0
#define OWNERS 3
#define DEPTH 4

#define WRITTEN(c) (c)
#define DATA(c) (CHUNKS + (c))
#define CONSUMED(c) (2 * CHUNKS + (c))
#define STATE (3 * CHUNKS)
#define ADMITTED (3 * CHUNKS + 1)
#define GENERATION (3 * CHUNKS + 2)
#define LOCATIONS (3 * CHUNKS + 3)
#define OPENINGS 2

#define ABSENT 0
#define ATTACHED 1
#define CLOSED 2
#define RELEASED 3

/* What the writer makes of the place. */
#define EXPECTED 0
#define GONE 1
#define UNCOUNTED 2

#include "memory.pml"

byte lock_holder;       /* 1 + who holds the place's lock */
byte owner;             /* 1 + who has joined last */
bit killed[OWNERS];
bit has_closed[OWNERS];
bit has_ended[OWNERS];
byte published;
byte opened_at;         /* the position from which the present reader is counted */
byte openings;          /* how often the place has been opened again; a handle has the number as of when it was made */

bit begins_where_counted = 1;
bit whole_and_next = 1;
bit place_is_held_by_one = 1;
bit handle_is_of_the_last_opening = 1;

inline drop_lock(who) {
    d_step { buffer[who].count == 0 -> lock_holder = (lock_holder == 1 + who -> 0 : lock_holder) }
}
inline take_lock(who) {
    d_step {
        if
        :: !lock_holder -> lock_holder = 1 + who
        :: else
        fi
    }
}

inline publish() {
    chunk = published % CHUNKS;
    load(WRITER, WRITTEN(chunk), seen);
    if
    :: seen && reader == EXPECTED ->
        load(WRITER, CONSUMED(chunk), seen);            /* SYNC consume.load */
    :: else -> seen = 1
    fi;
    if
    :: seen ->
        store_relaxed(WRITER, WRITTEN(chunk), 0);       /* SYNC retract.store */
        store_relaxed(WRITER, DATA(chunk), 1 + published);
#ifdef RESET_FOR_ALL
        store_release(WRITER, CONSUMED(chunk), 0);
#else
        store_release(WRITER, CONSUMED(chunk), (reader == EXPECTED -> 0 : 1));  /* SYNC reset.store */
#endif
        store_release(WRITER, WRITTEN(chunk), 1);       /* SYNC publish.store */
        published++;
#ifndef NO_FENCE_IN_WAKE
        full_fence(WRITER)
#endif
    :: else
    fi;
    seen = 0;
    chunk = 0
}

/* Closed, or dead and then released; also one that never came. */
inline look() {
    load(WRITER, STATE, seen);                          /* SYNC leave.load */
    if
    :: seen == CLOSED -> reader = GONE
    :: seen == ATTACHED || (seen == ABSENT && reader == EXPECTED) ->
        take_lock(WRITER);
        if
        :: lock_holder == 1 + WRITER ->
            load(WRITER, STATE, seen);
            if
            :: seen != CLOSED -> store_release(WRITER, STATE, RELEASED)
            :: else
            fi;
            reader = GONE
        :: else
        fi
    :: else
    fi;
    seen = 0
}

inline readmit() {
    take_lock(WRITER);
    if
    :: lock_holder == 1 + WRITER ->
        store_relaxed(WRITER, GENERATION, 1 + openings);
#ifdef OPENED_BEFORE_CLEARED
        store_release(WRITER, STATE, ABSENT);
        drop_lock(WRITER);
#endif
#ifndef FLAGS_STAY
        for (chunk : 0 .. CHUNKS - 1) {
            store_relaxed(WRITER, CONSUMED(chunk), 1)
        }
        chunk = 0;
#endif
        if
#if defined(LATE) || defined(REOPENED_LATE)
        :: true ->
            reader = UNCOUNTED;
#ifndef ADMITTED_STAYS
            store_relaxed(WRITER, ADMITTED, 0)
#endif
#endif
#ifndef LATE
        :: true ->
            reader = EXPECTED;
            opened_at = published;
            store_relaxed(WRITER, ADMITTED, 1 + published)
#endif
        fi;
#ifndef OPENED_BEFORE_CLEARED
        store_release(WRITER, STATE, ABSENT);
        drop_lock(WRITER);
#endif
        openings++                                      /* from now on there are handles of this opening */
    :: else
    fi
}

/* Of a reader that has attached since. */
inline admit() {
    load(WRITER, STATE, seen);                          /* SYNC join.load */
    if
    :: seen == ATTACHED ->
        atomic {
            opened_at = published;
            store_relaxed(WRITER, ADMITTED, 1 + published)  /* SYNC admit.store */
        }
        reader = EXPECTED
    :: else
    fi;
    seen = 0
}

proctype writer() {
    byte chunk, seen;
#ifdef LATE
    byte reader = UNCOUNTED;
#else
    byte reader = EXPECTED;
#endif
end:
    do
    :: published < MESSAGES -> publish()
    :: reader == EXPECTED -> look()
    :: reader == GONE && openings < OPENINGS -> readmit()
    :: reader == UNCOUNTED -> admit()
    od
}

proctype candidate(byte who) {
    byte position, chunk, seen, consumed, data, handle;
    bit is_counted;
#ifdef ADMITTED_IS_THE_GENERATION
    byte admitted;
#endif
    {
        handle = openings;
#ifdef ADMITTED_IS_THE_GENERATION
        load(who, ADMITTED, admitted);
        handle = openings;
#endif
#ifdef GENERATION_BEFORE_LOCK
        load(who, GENERATION, seen);
        if
        :: seen != handle -> goto over
        :: else
        fi;
#endif
        take_lock(who);
        if
        :: lock_holder != 1 + who -> goto over              /* RankTaken */
        :: else
        fi;
        load(who, STATE, seen);
        if
        :: seen != ABSENT -> goto over                      /* RankTaken */
        :: else
        fi;
#if !defined(NO_GENERATION) && !defined(GENERATION_BEFORE_LOCK)
#ifdef ADMITTED_IS_THE_GENERATION
        load(who, ADMITTED, seen);
        seen = (seen == admitted -> handle : 1 + handle);
        admitted = 0;
#else
        load(who, GENERATION, seen);
#endif
        if
        :: seen != handle -> goto over                      /* RankTaken */
        :: else -> seen = 0
        fi;
#endif
#ifndef LATE
        load(who, ADMITTED, position);
        if
#if defined(REOPENED_LATE) && !defined(COUNTED_AT_ONCE)
        :: handle && !position
        :: !handle || position ->
#else
        :: true ->
#endif
            d_step {
                position = (position -> position - 1 : 0);
                is_counted = 1;
                begins_where_counted = (position == opened_at);
                assert(begins_where_counted)
            }
        fi;
#endif
        atomic {
            place_is_held_by_one = (!owner || killed[owner - 1] || has_closed[owner - 1]);
            assert(place_is_held_by_one);
            handle_is_of_the_last_opening = (handle == openings);
            assert(handle_is_of_the_last_opening);
            handle = 0;
            owner = 1 + who;
            store_release(who, STATE, ATTACHED)             /* SYNC join.store */
        }
        do
        ::
#if defined(LATE) || defined(REOPENED_LATE)
           if
           :: !is_counted ->
#ifdef ADMIT_LOAD_RELAXED
               load(who, CONSUMED(0), consumed);            /* it could come to happen before */
#endif
               load(who, ADMITTED, position);               /* SYNC admit.load */
               if
               :: position ->
                   d_step {
                       position--;
                       is_counted = 1;
                       begins_where_counted = (position == opened_at);
                       assert(begins_where_counted)
                   }
               :: else
               fi
           :: else
           fi;
#endif
           if
           :: is_counted ->
               chunk = position % CHUNKS;
#ifdef ADMIT_LOAD_RELAXED
               if
               :: chunk || position != opened_at -> load(who, CONSUMED(chunk), consumed)
               :: else
               fi;
#else
               load(who, CONSUMED(chunk), consumed);        /* SYNC reset.load */
#endif
               load(who, WRITTEN(chunk), seen);             /* SYNC retract.load */ /* SYNC publish.load */
               if
               :: !consumed && seen ->
                   load(who, DATA(chunk), data);
                   d_step {
                       whole_and_next = (data == 1 + position);
                       assert(whole_and_next);
                       data = 0
                   }
                   position++;
                   store_release(who, CONSUMED(chunk), 1)   /* SYNC consume.store */
               :: else
               fi;
               d_step { chunk = 0; seen = 0; consumed = 0 }
           :: else
           fi
        :: break                                            /* it closes */
        od;
        atomic { store_release(who, STATE, CLOSED); has_closed[who] = 1 }   /* SYNC leave.store */
over:
        drop_lock(who);
        has_ended[who] = 1
    } unless { killed[who] }
}

/* kill -9: the kernel drops the lock, with everything that was stored visible before. */
proctype killer(byte who) {
    if
    :: d_step { !has_ended[who] -> killed[who] = 1 };
       drop_lock(who)
    :: true
    fi
}

init {
    byte i;
    atomic {
        run writer();
        run killer(1);
        for (i : 1 .. OWNERS - 1) { run candidate(i) }
        for (i : 0 .. OWNERS - 1) { run reaches_memory(i) }
        i = 0
    }
}
