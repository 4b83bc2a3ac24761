/* The latest message, and what its readers keep (broadcast/latest.hpp, and extents.hpp behind it).
 *
 * Modelled: a writer that never waits, with CHUNKS chunks and one extent; it chooses a chunk that nobody reads, writes to
 * the extent if a reader keeps the chunk's bytes (or at any time), and points to the message. Readers that take the latest
 * message, give up in the middle of it at any time, and keep what they have read until later. Stores are buffered
 * (memory.pml).
 *
 * Abstracted: a message is one word, its number. MESSAGES are published. When the extent is in use, the real writer takes
 * another; this one looks again. Waiting is wait.pml's, dying death.pml's: what a dead reader has said stays until it is
 * released, which costs no more than a reader that never goes on.
 *
 * The loads of `latest` need no order: the fence between them orders all that follows.
 *
 * Proven:
 *   whole         what a reader reads, or keeps, is the message that it has taken
 *   newer         no message comes twice, and none after a newer one
 *   always_free   of READERS + 2 chunks the writer finds one, whatever the readers do
 */
#define WRITER 0
#define READER(r) (1 + (r))
#define OWNERS (1 + READERS)
#define DEPTH 4
#define EXTENT CHUNKS

#define LATEST 0
#define READING(r) (1 + (r))
#define WHERE(c) (1 + READERS + (c))
#define DATA(a) (1 + READERS + CHUNKS + (a))
#define KEPT(a, r) (2 + READERS + 2 * CHUNKS + (a) * READERS + (r))
#define LOCATIONS (2 + READERS + 2 * CHUNKS + (CHUNKS + 1) * READERS)

#include "memory.pml"

byte position_of[READERS];
bit whole = 1;
bit newer = 1;
bit always_free = 1;

#ifdef LATEST_RELAXED
#define STORE_LATEST store_relaxed
#else
#define STORE_LATEST store_release
#endif

/* The bit of every chunk that a reader reads. */
inline look_at_readers() {
    busy = 0;
    r = 0;
    do
    :: r < READERS ->
        load(WRITER, READING(r), seen);                 /* SYNC take.load */ /* SYNC finish.load */
        busy = busy | (1 << seen);
        r++
    :: else -> break
    od;
    seen = 0;
    r = 0
}
inline look_at_marks(area) {
    kept = 0;
    r = 0;
    do
    :: r < READERS ->
        load(WRITER, KEPT(area, r), seen);              /* SYNC lease.load */ /* SYNC drop.load */
        kept = kept | seen;
        r++
    :: else -> break
    od;
#ifdef MARKS_NOT_ASKED
    kept = 0;
#endif
    seen = 0;
    r = 0
}
#define IS_BUSY(c) ((busy >> (1 + (c))) & 1)

proctype writer() {
    byte number, chunk, latest, busy, seen, r;
    byte in_extent;         /* 1 + the chunk of the message in the extent, while that is still there */
    bit kept, is_used;      /* the extent is in use */
    latest = CHUNKS;
    do
    :: number == MESSAGES -> break
    :: number < MESSAGES ->
#ifndef READERS_NOT_ASKED
       look_at_readers();
#endif
       chunk = 0;
       do
#ifdef LATEST_IS_TAKEN
       :: chunk < CHUNKS && IS_BUSY(chunk) -> chunk++
#else
       :: chunk < CHUNKS && (IS_BUSY(chunk) || chunk == latest) -> chunk++
#endif
       :: else -> break
       od;
       always_free = (chunk < CHUNKS);
       assert(always_free);
       if
       :: is_used ->
#ifndef EXTENT_NOT_ASKED
           if
           :: in_extent && (in_extent == 1 + latest || IS_BUSY(in_extent - 1))
           :: else ->
#endif
               look_at_marks(EXTENT);
               if
               :: !kept -> is_used = 0; in_extent = 0
               :: else -> kept = 0
               fi
#ifndef EXTENT_NOT_ASKED
           fi
#endif
       :: else
       fi;
       busy = 0;
       look_at_marks(chunk);
       if
       :: kept && is_used -> kept = 0; chunk = 0        /* the real one takes another extent */
       :: !kept || !is_used ->
           d_step {
               if
               :: in_extent == 1 + chunk -> in_extent = 0
               :: else
               fi
           };
           if
           :: !kept ->
               store_relaxed(WRITER, DATA(chunk), 1 + number);
               store_relaxed(WRITER, WHERE(chunk), chunk)
           :: !is_used ->
               is_used = 1;
               in_extent = 1 + chunk;
               store_relaxed(WRITER, DATA(EXTENT), 1 + number);
#ifdef OVER_BEFORE_PUBLISHED
               is_used = 0;                             /* reclaimed when space is short */
               in_extent = 0;
#endif
               store_relaxed(WRITER, WHERE(chunk), EXTENT)
           fi;
           STORE_LATEST(WRITER, LATEST, 1 + number * CHUNKS + chunk);   /* SYNC latest.store */
#ifndef NO_FENCE_IN_PUBLISH
           full_fence(WRITER);                          /* SYNC park.load */
#endif
           number++;
           latest = chunk;
           chunk = 0;
           kept = 0
       fi
    od
}

#define NUMBER(ticket) (((ticket) - 1) / CHUNKS)
#define CHUNK(ticket) (((ticket) - 1) % CHUNKS)

inline check(what, ticket_of_it) {
    d_step {
        whole = (what == 1 + NUMBER(ticket_of_it));
        assert(whole);
        what = 0
    }
}
inline end_of_keeping() {
#ifdef DROPPED_BEFORE_LAST_LOOK
    store_release(READER(r), KEPT(area_kept, r), 0);
#endif
    load(READER(r), DATA(area_kept), data);
    check(data, kept);
#ifndef DROPPED_BEFORE_LAST_LOOK
    store_release(READER(r), KEPT(area_kept, r), 0);    /* SYNC drop.store */
#endif
    kept = 0;
    area_kept = 0
}

proctype reader(byte r) {
    byte ticket, again, data, area, kept, area_kept;
    do
    :: position_of[r] == MESSAGES -> break
    :: kept -> end_of_keeping()
    :: position_of[r] < MESSAGES ->
       load(READER(r), LATEST, ticket);                 /* SYNC latest.load */
       if
       :: ticket && NUMBER(ticket) >= position_of[r] ->
           store_release(READER(r), READING(r), 1 + CHUNK(ticket));    /* SYNC take.store */
#ifndef NO_FENCE_IN_TAKE
           full_fence(READER(r));
#endif
           load(READER(r), LATEST, again);              /* SYNC latest.load */
#ifdef NOT_LOADED_AGAIN
           again = ticket;
#endif
           if
           :: again != ticket -> ticket = 0; again = 0; data = 0; area = 0
           :: else ->
               again = 0;
               load(READER(r), WHERE(CHUNK(ticket)), area);
               load(READER(r), DATA(area), data);
               if
               :: data = 0                              /* gives up: it is still the next one */
               ::
#ifdef FINISH_RELAXED
                  store_relaxed(READER(r), READING(r), 0);
                  load(READER(r), DATA(area), data);
#endif
                  check(data, ticket);
                  d_step { newer = (NUMBER(ticket) >= position_of[r]); assert(newer) };
                  position_of[r] = 1 + NUMBER(ticket);
#ifndef FINISH_RELAXED
                  if
#ifdef KEEPS
                  :: !kept ->
                      kept = ticket;
                      area_kept = area;
#ifdef MARKED_AFTER_FINISH
                      store_release(READER(r), READING(r), 0);
#endif
                      store_relaxed(READER(r), KEPT(area, r), 1);   /* SYNC lease.store */
#ifndef MARKED_AFTER_FINISH
                      store_release(READER(r), READING(r), 0)
#endif
#endif
                  :: store_release(READER(r), READING(r), 0)        /* SYNC finish.store */
                  fi
#endif
               fi;
               area = 0;
               ticket = 0
           fi
       :: else -> ticket = 0
       fi
    od
}

init {
    byte i;
    atomic {
        run writer();
        for (i : 0 .. READERS - 1) { run reader(i) }
        for (i : 0 .. READERS) { run reaches_memory(i) }
        i = 0
    }
}
