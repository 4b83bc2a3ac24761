/* Who is there, and how a death is noticed (core/participants.hpp, core/liveness.hpp, and what begin() of either end
 * does with it; release_reader of broadcast/ring_writer.hpp).
 *
 * Modelled: a writer and PROCESSES - 1 processes that try to take the one reader's place, by join, presence, leave and
 * release as they stand. The writer and the first of the others may be killed between any two steps; the kernel then
 * drops the lock, once all that the process had stored is visible. The writer may fork once (FORKS): the child holds a
 * copy of the lock's description until its atfork handler closes it. Every wait looks around again and again, which the
 * slices of 100 ms ensure; sleeping is wait.pml's. Stores are buffered (memory.pml); lock calls are steps that order.
 *
 * Abstracted: a ring of one chunk, as two counters modulo 2. Who a participant is, is one word (its pid).
 *
 * Proven:
 *   death_is_true         nobody is told of a death unless that process died without having closed
 *   death_has_a_pid       who is told of a death, or sees somebody attached, can say who it is
 *   messages_first        a reader is told that the writer died or closed only after all complete messages
 *   place_is_taken_once   a reader's place is joined at most once, and never after it was released
 *   living_are_not_released
 *   dead_are_released     a release of who is known to be dead works, also while the kernel is still ending the process
 *   (LIVENESS) every_death_is_noticed, under weak fairness: by a reader that waits for the writer, and by a
 *     writer that goes on calling, whatever a forked child or somebody who wants the place does
 *
 * Not proven: that a death in the middle of creation is noticed, before the handle is out; nobody can wait for it then.
 * Nobody notices the death of a process that took a place's lock and had not joined: the place counts as absent.
 */
#define WRITER 0
#define OWNERS PROCESSES
#define DEPTH 3
#define POSITIONS 2

#define PUBLISHED 0
#define CONSUMED 1
#define STATE(slot) (2 + (slot))
#define PID(slot) (4 + (slot))
#define LOCATIONS 6

#define ABSENT 0
#define ATTACHED 1
#define CLOSED 2
#define RELEASED 3

/* Presence */
#define DEAD 4

#include "memory.pml"

bit killed[PROCESSES];
bit has_closed[PROCESSES];  /* it has said so */
bit has_ended[PROCESSES];
bit has_handle;
bit has_forked;
bit child_has_copy;         /* of the writer's lock */
byte lock_of[2];            /* 1 + who holds the slot */
byte joined;                /* 1 + who joined as reader */
byte published;
bit writer_noticed;
bit reader_noticed;
bit is_released;

bit death_is_true = 1;
bit death_has_a_pid = 1;
bit messages_first = 1;
bit place_is_taken_once = 1;
bit living_are_not_released = 1;
bit dead_are_released = 1;

#ifdef JOIN_RELAXED
#define STORE_JOIN store_relaxed
#else
#define STORE_JOIN store_release
#endif

inline join(who, slot) {
    store_relaxed(who, PID(slot), 1);
    atomic {
        STORE_JOIN(who, STATE(slot), ATTACHED);     /* SYNC join.store */
        if
        :: (slot) == 1 ->
            place_is_taken_once = (!joined && !is_released);
            assert(place_is_taken_once);
            joined = 1 + who
        :: else
        fi
    }
}

inline leave(who, slot) {
    atomic { store_release(who, STATE(slot), CLOSED); has_closed[who] = 1 }     /* SYNC leave.store */
}

/* A lock call orders: what the process stored before it is visible to whoever sees the lock change. */
inline give_up(who, slot) {
    d_step { buffer[who].count == 0 -> lock_of[slot] = (lock_of[slot] == 1 + who -> 0 : lock_of[slot]) }
}

#define IS_HELD_BY_OTHER(slot, who) \
    ((lock_of[slot] && lock_of[slot] != 1 + who) || ((slot) == 0 && child_has_copy))

/* Presence of `slot`, as `who` sees it, into `seen`. */
inline presence(who, slot) {
#ifdef JOIN_LOAD_RELAXED
    load(who, PID(slot), its_pid);
#endif
    load(who, STATE(slot), seen);                   /* SYNC join.load */ /* SYNC leave.load */
#ifndef JOIN_LOAD_RELAXED
    load(who, PID(slot), its_pid);
#endif
    if
    :: seen == ATTACHED ->
        d_step {
            death_has_a_pid = its_pid;
            assert(death_has_a_pid)
        }
        if
        :: IS_HELD_BY_OTHER(slot, who)
        :: else ->
#ifdef NO_SECOND_LOOK
            seen = DEAD
#else
            load(who, STATE(slot), seen);
            if
            :: seen == ATTACHED -> seen = DEAD
            :: else
            fi
#endif
        fi
    :: else
    fi;
    its_pid = 0
}

/* The writer, for a reader who is dead or absent: the lock is its own from then on. */
inline release_reader() {
    is_known = (joined && killed[joined - 1] && !has_closed[joined - 1]);   /* by a pidfd, or as a zombie */
#ifndef ENDING_NOT_WAITED_FOR
    if
    :: is_known -> d_step { lock_of[1] == 0 || lock_of[1] == 1 + WRITER -> lock_of[1] = 1 + WRITER }
    :: else
    fi;
#endif
    d_step {
        if
#ifdef RELEASED_WITHOUT_LOCK
        :: true -> lock_of[1] = 1 + WRITER
#else
        :: !lock_of[1] -> lock_of[1] = 1 + WRITER
#endif
        :: else
        fi
    }
    if
    :: lock_of[1] == 1 + WRITER ->
        load(WRITER, STATE(1), seen);
        if
        :: seen != CLOSED -> store_release(WRITER, STATE(1), RELEASED)
        :: else
        fi;
        d_step {
            is_released = 1;
            living_are_not_released = (!joined || killed[joined - 1] || has_closed[joined - 1]);
            assert(living_are_not_released)
        }
    :: else
    fi;
    d_step {
        dead_are_released = (!is_known || is_released);
        assert(dead_are_released);
        is_known = 0
    }
    seen = 0
}

proctype writer() {
    byte seen, its_pid;
    bit is_known;
    {
#ifdef JOINED_BEFORE_LOCKED
        join(WRITER, 0);
        has_handle = 1;
        lock_of[0] = 1 + WRITER;
#else
        lock_of[0] = 1 + WRITER;
#ifdef HANDLE_BEFORE_JOIN
        has_handle = 1;
#endif
        join(WRITER, 0);
#endif
        full_fence(WRITER);                             /* the handle is handed over by system calls */
        has_handle = 1;
        do
        :: load(WRITER, CONSUMED, seen);
           if
           :: seen == published || is_released || writer_noticed ->
               atomic {
                   published = (published + 1) % POSITIONS;
                   store_release(WRITER, PUBLISHED, published)      /* SYNC publish.store */
               }
           :: else
           fi;
           if
           :: !is_released -> presence(WRITER, 1)       /* after a slice, or in passing */
           :: is_released -> seen = ABSENT
#ifndef LIVENESS
           :: seen = ABSENT                             /* not yet */
#endif
           fi;
           if
           :: seen == DEAD ->
               d_step {
                   death_is_true = (killed[joined - 1] && !has_closed[joined - 1]);
                   assert(death_is_true);
                   writer_noticed = 1
               }
           :: else
           fi;
           seen = 0
        :: !is_released -> release_reader()
#ifdef FORKS
        :: !has_forked -> d_step { has_forked = 1; child_has_copy = 1 }
#endif
        :: break
        od;
#ifdef UNLOCKED_BEFORE_LEAVE
        give_up(WRITER, 0);
        leave(WRITER, 0);
#else
        leave(WRITER, 0);
        give_up(WRITER, 0);
#endif
        d_step { lock_of[1] = (lock_of[1] == 1 + WRITER -> 0 : lock_of[1]); has_ended[WRITER] = 1 }
    } unless { killed[WRITER] }
}

/* In the child, whatever becomes of its parent. */
proctype atfork_child() {
end:
    do
    :: child_has_copy ->
#ifdef COPY_STAYS_OPEN
        break
#else
        child_has_copy = 0
#endif
    od
}

proctype reader(byte who) {
    byte seen, its_pid, closed, is_dead, consumed;
    {
        has_handle;
        d_step {
            if
            :: !lock_of[1] -> lock_of[1] = 1 + who
            :: else
            fi
        }
        if
        :: lock_of[1] != 1 + who -> goto over           /* RankTaken */
        :: else
        fi;
#ifndef STATE_NOT_ASKED
        load(who, STATE(1), seen);
        if
        :: seen != ABSENT -> goto over                  /* RankTaken */
        :: else
        fi;
#endif
        join(who, 1);
        do
        ::
#ifdef LOOKED_AFTER_MESSAGES
           load(who, STATE(0), closed);
           closed = (closed == CLOSED);
           load(who, PUBLISHED, seen);
           if
           :: seen == consumed && !closed -> presence(who, 0); is_dead = (seen == DEAD); seen = consumed
           :: else
           fi;
#else
#ifndef NOT_LOOKED
           presence(who, 0);                            /* after a slice */
           is_dead = (seen == DEAD);
#endif
           load(who, STATE(0), closed);                 /* SYNC leave.load */
           closed = (closed == CLOSED);
           load(who, PUBLISHED, seen);                  /* SYNC publish.load */
#endif
           if
           :: seen != consumed ->
               consumed = (consumed + 1) % POSITIONS;
               store_release(who, CONSUMED, consumed)   /* SYNC consume.store */
           :: seen == consumed && (closed || is_dead) ->
               d_step {
                   messages_first = (consumed == published);
                   assert(messages_first);
                   death_is_true = (closed || (killed[WRITER] && !has_closed[WRITER]));
                   assert(death_is_true);
                   reader_noticed = 1
               };
               break
           :: else
           fi;
           d_step { seen = 0; closed = 0; is_dead = 0 }
        :: break                                        /* it closes */
        od;
        leave(who, 1);
over:
        give_up(who, 1);
        has_ended[who] = 1
    } unless { killed[who] }
}

/* kill -9: the kernel drops the lock, with everything that was stored visible before. */
proctype killer(byte who) {
    if
    :: d_step { !has_ended[who] -> killed[who] = 1 };
       d_step {
           buffer[who].count == 0 ->
           lock_of[0] = (lock_of[0] == 1 + who -> 0 : lock_of[0]);
           lock_of[1] = (lock_of[1] == 1 + who -> 0 : lock_of[1])
       }
    :: true
    fi
}

init {
    byte i;
    atomic {
        run writer();
#ifdef FORKS
        run atfork_child();
#endif
        run killer(WRITER);
        run killer(1);
        for (i : 1 .. PROCESSES - 1) { run reader(i) }
        for (i : 0 .. PROCESSES - 1) { run reaches_memory(i) }
        i = 0
    }
}

#ifdef LIVENESS
#define WRITER_IS_DEAD (killed[WRITER] && has_handle && !has_closed[WRITER])
#define READER_IS_DEAD (joined == 2 && killed[1] && !has_closed[1] && memory[STATE(1)] == ATTACHED)
#define IS_READING (joined == 2)
ltl every_death_is_noticed {
    [] ((WRITER_IS_DEAD && IS_READING) -> <> (reader_noticed || killed[1] || has_closed[1]))
    && [] (READER_IS_DEAD -> <> (writer_noticed || is_released || killed[WRITER] || has_closed[WRITER]))
}
#endif
