/* Who reads an object and who evicts it (store/object_reader.hpp, store_reader.hpp, store_writer.hpp).
 *
 * Modelled: OBJECTS objects, one after the other, in one entry of the table and one place of the ring; their offer,
 * references (GET_CACHED: a second one at any moment; DROPS: taken back again), eviction, and clear(), which makes an
 * orphan of it (CLEARS): nobody owes reads of that, and it is retired when its space is needed, as what is evicted is.
 * Not together: CLEARS and DROPS. READERS readers
 * pin any id at any moment, look whether it is live, read, look again, count the read and unpin. A reader may die between
 * any two steps (DIES), and then another one takes its place; or it closes while it reads (CLOSES), after which its pins
 * are void, though it looks on. Stores are buffered (memory.pml). The writer appends the table's section first.
 *
 * Abstracted: an object is two words. What a pin adds is a store of 1, because one thread at a time reads here.
 * Taking a place or leaving it is a system call, so a barrier. The id stands for the address, too.
 *
 * Proven:
 *   valid_is_whole      what is read between pin and unpin is that object, and no other; so it is behind a close() if the
 *                       entry is valid still
 *   pinned_stays        an object that was granted stays valid until it is unpinned, also when it is cleared
 *   evicted_when_read   what is evicted has been read by every reader that is there, as often as it was referenced
 *   reads_are_counted   a read is left out only if it was one too many at some moment while it lasted
 *   listed_is_complete  whoever finds the section finds it filled in
 */
#define WRITER 0
#define READER(r) (1 + (r))
#define OWNERS (1 + READERS)
#define DEPTH 6

#define STAMP 0
#define FIRST 1
#define SECOND 2
#define REFERENCES 3
#define FACTS 4
#define SECTIONS 5
#define PINS(r) (6 + (r))
#define READS(r) (6 + READERS + (r))
#define LOCATIONS (6 + 2 * READERS)

#define LIVE(id) (4 * (id) + 1)
#define CLOSING(id) (4 * (id) + 2)
#define RETIRED(id) (4 * (id) + 3)

#include "memory.pml"

bit is_gone[READERS];           /* its lock is free, or it has said `closed`; absent is not gone */
bit killed[READERS];
byte finished[READERS];         /* references of the object that is offered by which it was read */
#ifdef DROPS
byte referred;                  /* references of it, whatever of that has reached the memory */
byte least[READERS];            /* of them, since that reader's get began */
#endif
bit reads_are_counted = 1;
bit valid_is_whole = 1;
bit pinned_stays = 1;
bit evicted_when_read = 1;
bit listed_is_complete = 1;

#ifdef OFFER_RELAXED
#define STORE_OFFER store_relaxed
#else
#define STORE_OFFER store_release
#endif
#ifdef APPEND_RELAXED
#define STORE_APPEND store_relaxed
#else
#define STORE_APPEND store_release
#endif

inline mark(what) {
    store_relaxed(WRITER, STAMP, what);             /* SYNC retire.store */
#ifndef NO_FENCE_IN_MARK
    full_fence(WRITER)
#endif
}

/* Leaves `pinned`. */
inline ask_pins(r) {
    load(WRITER, PINS(r), pins);                    /* SYNC pin.load */ /* SYNC unpin.load */
    was_there = !is_gone[r];
    pinned = pinned || (pins && was_there);
    pins = 0;
    was_there = 0
}

inline look_for_pins() {
    pinned = 0;
#ifndef PINS_NOT_ASKED
    ask_pins(0);
#if READERS > 1
    ask_pins(1)
#endif
#endif
}

inline ask_reads(r) {
    load(WRITER, READS(r), reads);                  /* SYNC count.load */
    was_there = !is_gone[r];
    owed = owed || (reads < references && was_there);
    reads = 0;
    was_there = 0
}

inline look_for_debts() {
    owed = 0;
#ifndef READS_NOT_ASKED
    ask_reads(0);
#if READERS > 1
    ask_reads(1)
#endif
#endif
}

inline refers_to_reader(r, count) {
    if
    :: finished[r] > count -> finished[r] = count
    :: else
    fi;
    if
    :: least[r] > count -> least[r] = count
    :: else
    fi
}

/* From now on there are so many; who has read more has read for nothing. */
inline refers(count) {
#ifdef DROPS
    d_step {
        referred = count;
        refers_to_reader(0, count);
#if READERS > 1
        refers_to_reader(1, count)
#endif
    }
#else
    skip
#endif
}

/* Leaves `owed`: has a reader read the second reference? */
inline ask_seconds(r) {
    load(WRITER, READS(r), reads);                  /* SYNC count.load */
    was_there = !is_gone[r];
    owed = owed || (reads > 1 && was_there);
    reads = 0;
    was_there = 0
}

inline look_for_seconds() {
    owed = 0;
    ask_seconds(0);
#if READERS > 1
    ask_seconds(1)
#endif
}

/* One compare-exchange: it was of a reference that was dropped while it was read. */
inline take_second_back(r) {
    d_step {
        buffer[WRITER].count == 0 ->
        if
        :: memory[READS(r)] == 2 -> memory[READS(r)] = 1    /* SYNC count.store */
        :: else
        fi
    }
}

inline drop_reference() {
#ifdef LOWERED_BEFORE_IT_LOOKS
    store_release(WRITER, REFERENCES, 1);           /* SYNC refer.store */
    full_fence(WRITER);
    look_for_seconds();
    if
    :: owed -> store_release(WRITER, REFERENCES, 2)
    :: else -> references = 1; refers(1)
    fi;
#else
    look_for_seconds();
    if
    :: owed
    :: else ->
        references = 1;
        refers(1);
        store_release(WRITER, REFERENCES, 1)        /* SYNC refer.store */
    fi;
#endif
    owed = 0
}

#define HAS_READ(r) (is_gone[r] || finished[r] >= references)

inline check_eviction() {
    d_step {
        evicted_when_read = HAS_READ(0);
        assert(evicted_when_read);
#if READERS > 1
        evicted_when_read = HAS_READ(1);
        assert(evicted_when_read)
#endif
    }
}

proctype writer() {
    byte id, references, pins, reads;
    bit pinned, owed, was_there;
    store_relaxed(WRITER, FACTS, 1);
    STORE_APPEND(WRITER, SECTIONS, 1);              /* SYNC append.store */
    do
    :: id < OBJECTS ->
        id++;
        store_relaxed(WRITER, FIRST, id);
        store_relaxed(WRITER, SECOND, id);
        d_step {
            finished[0] = 0;
#if READERS > 1
            finished[1] = 0
#endif
        }
        refers(0);
        store_relaxed(WRITER, READS(0), 0);
#if READERS > 1
        store_relaxed(WRITER, READS(1), 0);
#endif
        store_relaxed(WRITER, REFERENCES, 0);
        STORE_OFFER(WRITER, STAMP, LIVE(id));       /* SYNC offer.store */
        references = 1;
        refers(1);
        store_release(WRITER, REFERENCES, 1);       /* SYNC refer.store */
        do
#ifdef GET_CACHED
        :: references == 1 ->
            references = 2;
            refers(2);
#ifndef SECONDS_STAY_READ
            take_second_back(0);
#if READERS > 1
            take_second_back(1);
#endif
#endif
            store_release(WRITER, REFERENCES, 2)    /* SYNC refer.store */
#endif
#ifdef DROPS
        :: references == 2 -> drop_reference()
#endif
#ifdef CLEARS
        :: references > 0 ->
            references = 0;
            refers(0);
            store_release(WRITER, REFERENCES, 0)    /* SYNC refer.store */
#endif
        :: look_for_debts();
           if
           :: owed
           :: else ->
               look_for_pins();
               if
               :: pinned
               :: else ->
#ifndef PINS_NOT_ASKED_AGAIN
                   mark(CLOSING(id));
                   look_for_pins();
#endif
                   if
                   :: pinned -> STORE_OFFER(WRITER, STAMP, LIVE(id))    /* SYNC offer.store */
                   :: else ->
                       check_eviction();
#ifdef NO_FENCE_BEHIND_RETIRED
                       store_relaxed(WRITER, STAMP, RETIRED(id));       /* SYNC retire.store */
#else
                       mark(RETIRED(id));
#endif
                       break
                   fi
               fi
           fi
        od
    :: else -> break
    od
}

inline read_object() {
    load(READER(r), FIRST, first);
    load(READER(r), SECOND, second)
}

/* What is to be released is read before that. */
inline unpin() {
    store_release(READER(r), PINS(r), 0)            /* SYNC unpin.store */
}

inline find_section() {
    load(READER(r), SECTIONS, seen);                /* SYNC append.load */
    if
    :: seen ->
        load(READER(r), FACTS, seen);
        listed_is_complete = seen;
        assert(listed_is_complete)
    :: else
    fi;
    seen = 0
}

inline get() {
    select_id();
#ifdef DROPS
    d_step {                                        /* an id goes to readers once its reference can be seen */
        if
        :: memory[STAMP] == LIVE(id) && memory[REFERENCES] == referred && buffer[WRITER].count == 0 ->
            least[r] = referred
        :: else -> least[r] = 0
        fi
    }
#endif
    store_relaxed(READER(r), PINS(r), 1);           /* SYNC pin.store */
#ifndef NO_FENCE_IN_PIN
    full_fence(READER(r));
#endif
#ifdef GRANT_LOAD_RELAXED
    read_object();
#endif
    load(READER(r), STAMP, seen);                   /* SYNC offer.load */ /* SYNC retire.load */
    if
    :: seen == LIVE(id) ->
#ifdef UNPINNED_BEFORE_READ
        unpin();
#endif
#ifndef GRANT_LOAD_RELAXED
        read_object();
#endif
#ifdef NOT_VALIDATED_BEHIND
        seen = LIVE(id);
#else
        load(READER(r), STAMP, seen);               /* SYNC offer.load */ /* SYNC retire.load */
#endif
        d_step {
            pinned_stays = is_gone[r] || seen == LIVE(id) || seen == CLOSING(id);
#ifndef UNPINNED_BEFORE_READ
            assert(pinned_stays);
#endif
            valid_is_whole = (first == id && second == id) ||
                             (is_gone[r] && seen != LIVE(id) && seen != CLOSING(id));
            assert(valid_is_whole)
        }
        if
        :: (seen == LIVE(id) || seen == CLOSING(id)) && !is_gone[r] ->
            load(READER(r), REFERENCES, seen);      /* SYNC refer.load */
            d_step {                                /* one compare-exchange; it waits for nothing but own stores */
                buffer[READER(r)].count == 0 ->
                if
                :: memory[READS(r)] < seen ->
                    memory[READS(r)] = memory[READS(r)] + 1;    /* SYNC count.store */
#ifdef DROPS
                    if
                    :: memory[READS(r)] <= referred -> finished[r] = finished[r] + 1
                    :: else
                    fi
#else
                    finished[r] = finished[r] + 1
#endif
                :: else ->
#ifdef DROPS
                    reads_are_counted = memory[READS(r)] >= least[r];
                    assert(reads_are_counted)
#endif
                fi
            }
        :: else
        fi
    :: else
    fi;
#ifndef UNPINNED_BEFORE_READ
    unpin();
#endif
    d_step { first = 0; second = 0; seen = 0; id = 0 }
}

inline select_id() {
    if
    :: id = 1
#if OBJECTS > 1
    :: id = 2
#endif
#if OBJECTS > 2
    :: id = 3
#endif
    fi
}

proctype reader(byte r) {
    byte id, first, second, seen;
    bit is_successor;
life:
    {
        if
        :: is_successor ->
            /* It owes nothing of what is there now (mark_stored_as_read). */
            d_step { is_gone[r] = 0; killed[r] = 0; finished[r] = 2 }
            store_relaxed(READER(r), PINS(r), 0);
            full_fence(READER(r))
        :: else -> find_section()
        fi;
end:
        do
        :: get()
        od
    } unless { killed[r] };
    /* What it had stored reaches the memory; what it had in its head is gone. */
    full_fence(READER(r));
    d_step { id = 0; first = 0; second = 0; seen = 0; is_gone[r] = 1 }
    if
    :: !is_successor -> is_successor = 1; goto life
    :: else
    fi
}

#ifdef CLOSES
/* Another thread of the first reader closes its end in the middle of whatever it does. */
proctype closer() {
    is_gone[0] = 1
}
#endif

#ifdef DIES
proctype killer() {
    if
    :: killed[0] = 1
    :: true
    fi
}
#endif

init {
    byte r;
    atomic {
        for (r : 0 .. READERS) { run reaches_memory(r) }
        run writer();
        for (r : 0 .. READERS - 1) { run reader(r) }
#ifdef CLOSES
        run closer();
#endif
#ifdef DIES
        run killer();
#endif
        r = 0
    }
}
