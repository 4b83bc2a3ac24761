/* The flags of the ring and the data that they guard (broadcast/ring_writer.hpp, broadcast/ring_reader.hpp).
 *
 * Modelled: the writer's begin (is_free, retract), fill in, publish (reset, publish); a block that ends without being
 * published; the reader's begin (is_published, has_writer_closed), read, finish, hold and release_held; either side's
 * announce_close at any moment. A reader polls, so it can time out at any moment. Stores are buffered
 * (memory.pml); there is no fence at all, because the flags need none.
 *
 * Abstracted: a chunk is two words, its data and its descriptor, that carry the message's number. Numbers count
 * modulo three laps, so runs never end: what is proven holds for any number of messages. Waiting is wait.pml's,
 * attaching and dying death.pml's; a released reader is like one that closed. A reader holds at most one chunk.
 *
 * Proven, for CHUNKS chunks and READERS readers:
 *   whole_and_next   what a reader reads is whole, and is its next message: no torn read, none repeated or skipped
 *   published_to_all nothing is read before it is published, which shows it to all readers at once
 *   all_before_end   a reader that is told that the writer closed has had all messages
 *   raised_is_unsent (SIGNALS) a call that a signal's handler ends by raising has published nothing
 *   no deadlock, and (LIVENESS) every_message_arrives, under weak fairness
 *
 * Some orderings are there twice: without retract, or with a reader that looks at `written` first, all data would still
 * be whole, because reset is a release; but readers could see a message that is not published yet, one of them sooner
 * than the others. Without the acquire of the writer's loads the language lets its stores come first; the processors
 * of today would not. ONLY_DATA looks at the data alone.
 */
#define PERIOD (3 * CHUNKS)
#define WRITER 0
#define READER(r) (1 + (r))
#define OWNERS (1 + READERS)
#define DEPTH (READERS + 4)

#define WRITTEN(c) (c)
#define DATA(c) (CHUNKS + (c))
#define DESCRIPTOR(c) (2 * CHUNKS + (c))
#define CONSUMED_BY(c, r) (3 * CHUNKS + (c) * READERS + (r))
#define STATE(slot) (3 * CHUNKS + CHUNKS * READERS + (slot))
#define LOCATIONS (3 * CHUNKS + CHUNKS * READERS + 1 + READERS)
#define CLOSED 1
#define GARBAGE 255

#include "memory.pml"

byte published;           /* messages that the writer has published, modulo PERIOD */
byte position_of[READERS];
bit whole_and_next = 1;
bit published_to_all = 1;
bit all_before_end = 1;
bit raised_is_unsent = 1;

#ifdef RESET_RELAXED
#define STORE_RESET store_relaxed
#else
#define STORE_RESET store_release
#endif
#ifdef PUBLISH_RELAXED
#define STORE_PUBLISH store_relaxed
#else
#define STORE_PUBLISH store_release
#endif
#ifdef LEAVE_RELAXED
#define STORE_LEAVE store_relaxed
#else
#define STORE_LEAVE store_release
#endif

#ifdef SIGNALS
/* A handler runs, and raises or not: in Python only where the call looks for signals. */
inline look_for_signals() {
    if
    :: raised = 1
    :: true
    fi
}
#else
inline look_for_signals() { skip }
#endif

inline is_done(r) {
    load(WRITER, CONSUMED_BY(chunk, r), done);      /* SYNC consume.load */
#ifdef CLOSES
    if
    :: !done ->
#ifdef LEAVE_LOAD_RELAXED_WRITER
        store_relaxed(WRITER, DATA(chunk), published + 1);
#endif
        load(WRITER, STATE(1 + r), done)            /* SYNC leave.load */
    :: else
    fi
#endif
}

proctype writer() {
    byte chunk, free, done, r, before;
    bit raised;
    do
    :: chunk = published % CHUNKS;
       before = published;
#ifdef CONSUME_LOAD_RELAXED
       store_relaxed(WRITER, DATA(chunk), published + 1);
#endif
       do
       :: load(WRITER, WRITTEN(chunk), free);
          free = !free;
          if
          :: free -> break
          :: else ->
              is_done(0);
#if READERS > 1
              if
              :: done -> is_done(1)
              :: else
              fi;
#endif
              if
              :: done -> break
              :: else
              fi
          fi
       od;
       free = 0;
       done = 0;
#ifndef NO_RETRACT
       store_relaxed(WRITER, WRITTEN(chunk), 0);    /* SYNC retract.store */
#endif
       if
#ifdef ABANDONS
       :: store_relaxed(WRITER, DATA(chunk), GARBAGE)  /* a block that raises */
#endif
       ::
#ifndef CONSUME_LOAD_RELAXED
          store_relaxed(WRITER, DATA(chunk), published + 1);
#endif
          store_relaxed(WRITER, DESCRIPTOR(chunk), published + 1);
          for (r : 0 .. READERS - 1) {
              STORE_RESET(WRITER, CONSUMED_BY(chunk, r), 0)     /* SYNC reset.store */
          }
          r = 0;
#ifndef LOOKED_AFTER_PUBLISH
          look_for_signals();
#endif
          if
          :: !raised ->
              atomic {
                  STORE_PUBLISH(WRITER, WRITTEN(chunk), 1);     /* SYNC publish.store */
                  published = (published + 1) % PERIOD
              }
#ifdef LOOKED_AFTER_PUBLISH
              look_for_signals()
#endif
          :: else
          fi;
          d_step {
              raised_is_unsent = (!raised || published == before);
              assert(raised_is_unsent);
              raised = 0;
              before = 0
          }
       fi
#ifdef CLOSES
    :: STORE_LEAVE(WRITER, STATE(0), CLOSED);       /* SYNC leave.store */
       break
#endif
    od
}

inline read_data() { load(READER(r), DATA(chunk), data) }
inline check() {
    d_step {
        whole_and_next = (data == position_of[r] + 1 && descriptor == position_of[r] + 1);
        assert(whole_and_next);
        data = 0;
        descriptor = 0
    }
}

proctype reader(byte r) {
    byte chunk, closed, consumed, written, data, descriptor;
#ifdef HOLDS
    byte held;  /* 1 + the chunk that is kept */
#endif
    do
    :: chunk = position_of[r] % CHUNKS;
#ifdef HOLDS
       if
#ifndef NO_HOLDS_NEXT
       :: held == 1 + chunk                         /* holds_next: it cannot go on before that is given back */
#else
       :: held
#endif
          -> store_release(READER(r), CONSUMED_BY(held - 1, r), 1); held = 0
#ifndef NO_HOLDS_NEXT
       :: held && held != 1 + chunk
#else
       :: held
#endif
       :: !held
       fi;
#endif
#if defined(CLOSES) && !defined(LEAVE_LOAD_RELAXED)
       load(READER(r), STATE(0), closed);           /* SYNC leave.load */
#endif
#if defined(RESET_LOAD_RELAXED) || defined(OWN_FLAG_SECOND)
       load(READER(r), WRITTEN(chunk), written);
#ifdef RESET_LOAD_RELAXED
       read_data();
#endif
       load(READER(r), CONSUMED_BY(chunk, r), consumed);
#else
       load(READER(r), CONSUMED_BY(chunk, r), consumed);        /* SYNC reset.load */
#ifdef PUBLISH_LOAD_RELAXED
       read_data();
#endif
       load(READER(r), WRITTEN(chunk), written);    /* SYNC retract.load */ /* SYNC publish.load */
#endif
#ifdef LEAVE_LOAD_RELAXED
       load(READER(r), STATE(0), closed);
#endif
       if
       :: !consumed && written ->
           written = 0;
           closed = 0;
           load(READER(r), DESCRIPTOR(chunk), descriptor);
           if
           ::
#ifdef CONSUME_RELAXED
              store_relaxed(READER(r), CONSUMED_BY(chunk, r), 1);
#endif
#if !defined(PUBLISH_LOAD_RELAXED) && !defined(RESET_LOAD_RELAXED)
              read_data();
#endif
              check();
#ifndef ONLY_DATA
              d_step {
                  published_to_all = (position_of[r] != published);
                  assert(published_to_all)
              };
#endif
              if
#ifndef CONSUME_RELAXED
              :: store_release(READER(r), CONSUMED_BY(chunk, r), 1)     /* SYNC consume.store */
#else
              :: true
#endif
#ifdef HOLDS
              :: !held -> held = 1 + chunk
#endif
              fi;
              position_of[r] = (position_of[r] + 1) % PERIOD
#ifdef CLOSES
           ::                                       /* with a message that is read and not given back */
#ifdef LEAVE_RELAXED_READER
              store_relaxed(READER(r), STATE(1 + r), CLOSED);
#endif
              read_data();
              check();
#ifndef LEAVE_RELAXED_READER
              store_release(READER(r), STATE(1 + r), CLOSED);   /* SYNC leave.store */
#endif
              break
#endif
           fi
       :: (consumed || !written) && closed ->
           d_step {
               all_before_end = (position_of[r] == published);
               assert(all_before_end)
           };
           break
       :: else -> d_step { consumed = 0; written = 0; data = 0 }
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

#ifdef LIVENESS
ltl every_message_arrives { []<> (position_of[0] == 0) && []<> (position_of[0] == 1) }
#endif
