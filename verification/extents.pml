/* Extents: space behind the ring for messages that do not fit a chunk (broadcast/extents.hpp; spill, reclaim and
 * is_over of broadcast/ring_writer.hpp; copy_out, hold and release_held of broadcast/ring_reader.hpp).
 *
 * Modelled: MESSAGES messages, each small or large, through CHUNKS chunks and a file system with room for SPACE
 * extents; writing that fails half-way (ENOSPC) and is cancelled; waiting for older turns; READERS readers that copy an
 * extent in two steps, or keep a view of it and look at it again before they let it go; readers that close at any
 * moment, and a first one that may be killed and is then released. What is given back is punched, or kept warm and
 * later overwritten.
 *
 * Abstracted: memory is sequentially consistent: the flags carry the data over, which ring.pml shows for weak memory.
 * All extents have one size, so how free ranges are cut and joined is not here. A view that outlives its reader's
 * close() is not protected, and not promised to be.
 *
 * Proven, for all runs of MESSAGES messages (more than two laps):
 *   extent_is_whole   whoever reads an extent reads the message of its own turn, while it reads and while it holds it
 *   all_given_back    the writer never waits for ever for space or for a chunk, and when every reader is done, closed
 *                     or released, all extents are free again
 */
byte position;                      /* of the writer: the message that is under way */
byte published;
bit consumed_by[CHUNKS * READERS];
byte descriptor[CHUNKS];            /* 1 + the extent; 0: the message is in the chunk */
byte used[SPACE];                   /* 1 + position of the message; 0: free */
byte first_half[SPACE];             /* of the file */
byte second_half[SPACE];
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
#ifdef OVER_A_TURN_EARLY
#define IS_REUSED(at) (at + CHUNKS <= position + 1)
#else
#define IS_REUSED(at) (at + CHUNKS <= position)
#endif
#define IS_OVER(extent) \
    (used[extent] && used[extent] - 1 < position && \
     (IS_REUSED(used[extent] - 1) || ALL_DONE((used[extent] - 1) % CHUNKS)))
#if SPACE > 1
#define ANY_OVER (IS_OVER(0) || IS_OVER(1))
#define IN_USE (used[0] || used[1])
#else
#define ANY_OVER IS_OVER(0)
#define IN_USE used[0]
#endif

inline give_back(extent) {
    used[extent] = 0;
    if
    :: first_half[extent] = 0; second_half[extent] = 0          /* punched */
    :: true                                         /* warm */
    fi
}

inline reclaim() {
    atomic {
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
       :: ANY_OVER
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
    :: IN_USE -> ANY_OVER; reclaim()
    :: else -> break
    od;
    is_over_for_writer = 1
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

proctype reader(byte r) {
    byte at, extent, held, held_extent;             /* held: 1 + position of the view that is kept */
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
            :: !held ->
                d_step { held = at + 1; held_extent = extent }
#ifdef HOLD_GIVES_BACK
                CONSUMED_BY_ME(at) = 1
#endif
            fi;
            d_step { extent = 0; at++ }
        :: at == MESSAGES && !held -> break
        :: break
        od;
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

proctype rest() {
end:
    timeout ->
    d_step {
        all_given_back = is_over_for_writer && !IN_USE;
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
