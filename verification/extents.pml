/* Extents: space behind the ring for messages that do not fit a chunk (broadcast/extents.hpp; spill, reclaim, is_over and
 * is_kept of broadcast/ring_writer.hpp; copy_out, hold, release_held and lease of broadcast/ring_reader.hpp;
 * broadcast/lease.hpp).
 *
 * Modelled: MESSAGES messages, each small or large, through CHUNKS chunks and a file system with room for SPACE
 * extents; writing that fails half-way (ENOSPC) and is cancelled; waiting for older laps; READERS readers that copy an
 * extent in two steps, or keep a view of it and look at it again before they let it go, or keep a lease of it while they
 * read on, for ever or until they let it go or copy it because they close; readers that close at any
 * moment, and a first one that may be killed and is then released. What is given back is punched, or kept warm and
 * later overwritten.
 *
 * Abstracted: memory is sequentially consistent: the flags carry the data over, which ring.pml shows for weak memory.
 * All extents have one size, so how free ranges are cut and joined is not here. A view that outlives its reader's
 * close() is not protected, and not promised to be. A fork copies a lease as close() does, and is not here.
 *
 * Proven, for all runs of MESSAGES messages (more than two laps):
 *   extent_is_whole   whoever reads an extent reads the message of its own lap, while it reads and while it holds it
 *   all_given_back    the writer never waits for ever for space or for a chunk, nor for a lease, and when every reader is
 *                     done, closed or released, all extents are free again but those that living readers keep
 */
byte position;                      /* of the writer: the message that is under way */
byte published;
bit consumed_by[CHUNKS * READERS];
byte descriptor[CHUNKS];            /* 1 + the extent; 0: the message is in the chunk */
byte used[SPACE];                   /* 1 + position of the message; 0: free */
byte first_half[SPACE];             /* of the file */
byte second_half[SPACE];
bit leased[SPACE * READERS];        /* by reader; the row is the extent */
bit has_closed[READERS];
bit killed[READERS];
bit has_ended[READERS];             /* its lock is gone */
bit is_released[READERS];
bit is_over_for_writer;

bit extent_is_whole = 1;
bit all_given_back = 1;

#ifdef CLOSED_IS_NOT_DONE
#define HAS_CLOSED(r) 0
#else
#define HAS_CLOSED(r) has_closed[r]
#endif

#define IS_DONE(c, r) (consumed_by[(c) * READERS + r] || HAS_CLOSED(r) || is_released[r])
#if READERS > 1 && !defined(ONE_READER_ASKED)
#define ALL_DONE(c) (IS_DONE(c, 0) && IS_DONE(c, 1))
#else
#define ALL_DONE(c) IS_DONE(c, 0)
#endif
#if READERS > 1
#define IS_FREE(c) (position < CHUNKS || (IS_DONE(c, 0) && IS_DONE(c, 1)))
#else
#define IS_FREE(c) (position < CHUNKS || IS_DONE(c, 0))
#endif
#ifdef OVER_A_LAP_EARLY
#define IS_REUSED(at) (at + CHUNKS <= position + 1)
#else
#define IS_REUSED(at) (at + CHUNKS <= position)
#endif
#ifdef LEASES_OF_THE_DEAD
#define IS_KEPT_BY(extent, r) leased[(extent) * READERS + r]
#else
#define IS_KEPT_BY(extent, r) (leased[(extent) * READERS + r] && !HAS_CLOSED(r) && !is_released[r])
#endif
#ifdef LEASES_NOT_ASKED_FOR
#define IS_KEPT(extent) 0
#elif READERS > 1
#define IS_KEPT(extent) (IS_KEPT_BY(extent, 0) || IS_KEPT_BY(extent, 1))
#else
#define IS_KEPT(extent) IS_KEPT_BY(extent, 0)
#endif
#define IS_LAP_OVER(extent) \
    (used[extent] - 1 < position && (IS_REUSED(used[extent] - 1) || ALL_DONE((used[extent] - 1) % CHUNKS)))
#define IS_OVER(extent) (used[extent] && IS_LAP_OVER(extent) && !IS_KEPT(extent))
#ifdef LEASES_ARE_WAITED_FOR
#define IS_IN_USE(extent) used[extent]
#else
#define IS_IN_USE(extent) (used[extent] && !(IS_LAP_OVER(extent) && IS_KEPT(extent)))
#endif
#if SPACE > 1
#define ANY_OVER (IS_OVER(0) || IS_OVER(1))
#define IN_USE (IS_IN_USE(0) || IS_IN_USE(1))
#else
#define ANY_OVER IS_OVER(0)
#define IN_USE IS_IN_USE(0)
#endif

inline give_back(extent) {
    used[extent] = 0;
    if
    :: first_half[extent] = 0; second_half[extent] = 0          /* punched */
    :: true                                         /* warm */
    fi
}

inline reclaim() {
    atomic {                                        /* SYNC lease.load */ /* SYNC drop.load */
        if
        :: IS_OVER(0) -> give_back(0)
        :: else
        fi
    };
#if SPACE > 1
    atomic {
        if
        :: IS_OVER(1) -> give_back(1)
        :: else
        fi
    }
#endif
}

inline take() {
    d_step {
        if
        :: !used[0] -> extent = 1
#if SPACE > 1
        :: used[0] && !used[1] -> extent = 2
#endif
        :: else -> extent = 0
        fi;
        if
        :: extent -> used[extent - 1] = position + 1
        :: else
        fi
    }
}

inline cancel() {
    d_step {
#ifndef CANCELLED_STAYS_USED
        used[extent - 1] = 0;
#endif
        first_half[extent - 1] = 0;
        second_half[extent - 1] = 0;
        extent = 0
    }
}

/* Leaves `extent`: 0 if there is no room (ShmExhausted), and the message is then not sent. */
inline spill() {
    do
    :: reclaim();
       take();
       if
       :: extent ->
           first_half[extent - 1] = position + 1;
           if
#ifdef PUBLISHED_BEFORE_WRITTEN
           :: break
#else
           :: second_half[extent - 1] = position + 1; break
#endif
           :: cancel()                              /* ENOSPC: others have filled the file system */
           fi
       :: else
       fi;
       if
       :: !IN_USE -> break
       :: ANY_OVER || !IN_USE                       /* it looks again when a reader has done anything */
       fi
    od
}

inline publish() {
    d_step {
        descriptor[position % CHUNKS] = extent;
        consumed_by[(position % CHUNKS) * READERS] = 0;
#if READERS > 1
        consumed_by[(position % CHUNKS) * READERS + 1] = 0;
#endif
        position++;
        published = position
    }
}

proctype writer() {
    byte extent;
    do
    :: position < MESSAGES ->
        IS_FREE(position % CHUNKS);
        if
        :: publish()
        :: skip;
           spill();
#ifdef PUBLISHED_BEFORE_WRITTEN
           if
           :: extent -> publish(); second_half[extent - 1] = position; extent = 0
           :: else
           fi
#else
           if
           :: extent -> publish(); extent = 0
           :: else -> publish()                     /* another one, which is small */
           fi
#endif
        fi
    :: else -> break
    od;
#ifndef RECLAIMED_BEFORE_FREE
    IS_FREE(position % CHUNKS);                     /* is_over takes that for granted, as begin() comes first */
#endif
    do
    :: IN_USE -> ANY_OVER || !IN_USE; reclaim()
    :: else -> break
    od;
    is_over_for_writer = 1;
end:
    do
    :: ANY_OVER -> reclaim()                        /* tend(), before the messages to come */
    od
}

/* The writer's calls of release_reader. */
proctype releases(byte r) {
end:
#ifdef RELEASED_WITHOUT_LOCK
    true;
#else
    killed[r];                                      /* has_ended: its lock is gone, so the writer gets it */
#endif
    is_released[r] = 1
}

inline look(at, extent) {
    d_step { extent_is_whole = (first_half[extent - 1] == (at) + 1); assert(extent_is_whole) };
    d_step { extent_is_whole = (second_half[extent - 1] == (at) + 1); assert(extent_is_whole) }
}

#define CONSUMED_BY_ME(at) consumed_by[((at) % CHUNKS) * READERS + r]

inline end_lease() {
#ifndef DROPPED_BEFORE_LAST_LOOK
    look(lent - 1, lent_extent);
#endif
    leased[(lent_extent - 1) * READERS + r] = 0;    /* SYNC drop.store */
#ifdef DROPPED_BEFORE_LAST_LOOK
    look(lent - 1, lent_extent);
#endif
    d_step { lent = 0; lent_extent = 0 }
}

proctype reader(byte r) {
    byte at, extent, held, held_extent;             /* held: 1 + position of the view that is kept */
    byte lent, lent_extent;                         /* the same of the lease */
    {
        do
        :: held ->
            if
            :: held_extent -> look(held - 1, held_extent)
            :: else
            fi;
#ifndef HOLD_GIVES_BACK
            CONSUMED_BY_ME(held - 1) = 1;
#endif
            d_step { held = 0; held_extent = 0 }
        :: at < published && !(held && (held - 1) % CHUNKS == at % CHUNKS) ->
            extent = descriptor[at % CHUNKS];
#ifdef COPIED_AFTER_FINISH
            CONSUMED_BY_ME(at) = 1;
#endif
            if
            :: extent -> look(at, extent)
            :: else
            fi;
            if
            :: CONSUMED_BY_ME(at) = 1
            :: extent && !lent ->
                d_step { lent = at + 1; lent_extent = extent };
#ifdef LEASED_AFTER_FINISH
                CONSUMED_BY_ME(at) = 1;
                leased[(extent - 1) * READERS + r] = 1
#else
                leased[(extent - 1) * READERS + r] = 1; /* SYNC lease.store */
                CONSUMED_BY_ME(at) = 1
#endif
            :: !held ->
                d_step { held = at + 1; held_extent = extent }
#ifdef HOLD_GIVES_BACK
                CONSUMED_BY_ME(at) = 1
#endif
            fi;
            d_step { extent = 0; at++ }
        :: lent -> end_lease()
        :: lent && at == MESSAGES && !held ->
end:        is_over_for_writer;                     /* a lease that is kept for ever */
            look(lent - 1, lent_extent);
            false
        :: at == MESSAGES && !held -> break
        :: break
        od;
#ifdef CLOSED_BEFORE_COPIED
        has_closed[r] = 1;
#endif
        if
        :: lent -> look(lent - 1, lent_extent)      /* copied: from here on it is the reader's own */
        :: else
        fi;
        has_closed[r] = 1;
        has_ended[r] = 1
    } unless { killed[r] }
}

proctype killer() {
    if
    :: d_step { !has_ended[0] -> killed[0] = 1; has_ended[0] = 1 }
    :: true
    fi
}

#if READERS > 1
#define IS_KEPT_BY_LIVING(e) ((leased[(e) * READERS] && !has_ended[0]) || (leased[(e) * READERS + 1] && !has_ended[1]))
#else
#define IS_KEPT_BY_LIVING(e) (leased[e] && !has_ended[0])
#endif
#if SPACE > 1
#define IS_ANY_LOST ((used[0] && !IS_KEPT_BY_LIVING(0)) || (used[1] && !IS_KEPT_BY_LIVING(1)))
#else
#define IS_ANY_LOST (used[0] && !IS_KEPT_BY_LIVING(0))
#endif

proctype rest() {
end:
    timeout ->
    d_step {
        all_given_back = is_over_for_writer && !IS_ANY_LOST;
        assert(all_given_back)
    }
}

init {
    byte r;
    atomic {
        run writer();
        for (r : 0 .. READERS - 1) {
            run reader(r);
            run releases(r)
        }
        run killer();
        run rest();
        r = 0
    }
}
