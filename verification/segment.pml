/* The life of a segment: create, attach, leave, sweep, remove_name and abandon (core/segment.hpp, core/sweep.hpp).
 *
 * Modelled: CREATORS creators, one after the other or at once, that even use one name (memlane's own names never come
 * twice, but nothing here relies on that), ATTACHERS processes that attach to the same place, SWEEPERS sweeps at once,
 * and (OBSERVED) somebody who comes to the file without its name (/proc/PID/fd) and goes by the magic. The first
 * creator and one of those who attach may be killed between any two steps; their locks go in that step. The header's
 * stores are buffered (memory.pml). Every system call is one step, and linkat is a barrier; comparing a name with a
 * file and removing it are two.
 *
 * Abstracted: sizes, reservations, owner, mode and geometry; what is in a header is one word; the second name of a ring
 * whose caller chose the first, which is linked before it and unlinked after it. Locks are the bytes
 * of the writer, of one reader, and the users' one.
 *
 * Proven:
 *   complete_when_named   whoever finds the name finds a complete header
 *   complete_by_magic     whoever sees the magic sees a complete header
 *   living_keep_names     a name is removed by its own living creator, by who finds that dead, or when no process uses
 *                         the segment
 *   attached_has_name     nobody attaches to a segment that was swept
 *   taken_is_true         RankTaken is said only of a place that somebody else holds or has held
 *   last_removes_name     the last to leave a segment whose creator was killed removes the name
 *   nothing_left_behind   when all have ended, however they ended, one more sweep leaves no name
 *   everybody_ends        no deadlock
 */
#define OWNERS 1
#define DEPTH 2
#define SECTIONS 0
#define MAGIC 1
#define LOCATIONS 2

#include "memory.pml"

/* Processes, as holders of locks. The first file is creator 1's, the second creator 2's. */
#define CREATOR 1
#define ATTACHER 3
#define SWEEPER 5
bit killed[5];
bit ended[5];
byte sweeps_ended;

byte name;                  /* of which file; 0: there is no such name */
byte writer_lock[3];        /* by file: who holds it */
byte reader_lock[3];
byte user_locks[3];         /* bit 0: the first attacher, bit 1: the second */
byte whole_lock[3];
bit was_survived[3];        /* a process left it after its creator was killed */
bit place_was_taken[3];
bit swept[3];
bit is_wanted[3];           /* by a living creator who has not begun to remove the name */

bit complete_when_named = 1;
bit complete_by_magic = 1;
bit living_keep_names = 1;
bit attached_has_name = 1;
bit taken_is_true = 1;
bit last_removes_name = 1;
bit nothing_left_behind = 1;
bit everybody_ends;

#define IS_USED(file) (writer_lock[file] || reader_lock[file] || user_locks[file])
#define IS_COMPLETE(file) (file == 2 || (memory[MAGIC] && memory[SECTIONS]))

#ifdef HEADER_RELAXED
#define STORE_HEADER store_relaxed
#else
#define STORE_HEADER store_release
#endif

inline fill_in() {
    if
    :: file == 1 ->
        store_relaxed(0, SECTIONS, 1);
        STORE_HEADER(0, MAGIC, 1)                   /* SYNC header.store */
    :: else
    fi
}

inline link_name() {
    (file == 2 || buffer[0].count == 0);
    d_step {
#ifdef NAME_REPLACED
        true -> is_named = 1;
        living_keep_names = (!name || !IS_USED(name));
        assert(living_keep_names);
        name = file
#else
        if
        :: !name -> name = file; is_named = 1
        :: else
        fi
#endif
    }
}

/* os::unlink_if_same: `who` removes the name, if it is still that of `file`. */
inline unlink_if_same(file, may_remove) {
#ifndef REMOVED_BY_NAME
    is_same = (name == file);
#else
    is_same = (name != 0);
#endif
    if
    :: is_same ->
        d_step {
            living_keep_names = (!name || may_remove);
            assert(living_keep_names);
            name = 0;
            is_same = 0
        }
    :: else
    fi
}

proctype creator(byte file) {
    bit is_named, is_same;
    {
        is_wanted[file] = 1;
#ifdef NAMED_BEFORE_LOCKED
        fill_in();
        link_name();
        d_step {
            if
            :: !whole_lock[file] -> writer_lock[file] = file
            :: else
            fi
        }
#else
        writer_lock[file] = file;
#ifdef NAMED_BEFORE_FILLED
        link_name();
        fill_in();
#else
        fill_in();
        link_name();
#endif
#endif
        if
        :: is_named ->
            is_wanted[file] = 0;
#ifdef UNLOCKED_BEFORE_REMOVE_NAME
            writer_lock[file] = 0;
#endif
            unlink_if_same(file, name == file)          /* when all have attached, or at abandon */
        :: else
        fi;
        d_step { writer_lock[file] = 0; is_wanted[file] = 0; ended[file] = 1 }
    } unless { killed[file] }
}

/* Does not tell whether there was anything to drop. */
inline give_up(who) {
    reader_lock[file] = (reader_lock[file] == who -> 0 : reader_lock[file]);
    user_locks[file] = user_locks[file] & (3 - (who - 2))
}

/* Segment::leave_as_last, then all its locks go. */
inline leave(who) {
    if
#ifndef LEFT_WITHOUT_REMOVING
    :: file && name == file ->
        d_step {
            if
            :: (reader_lock[file] == who || (user_locks[file] & (who - 2))) && killed[file] -> was_survived[file] = 1
            :: else
            fi;
#ifndef TAKEN_BEFORE_GIVEN_UP
            give_up(who)
#endif
        }
        d_step {
            if
#ifdef TAKEN_BEFORE_GIVEN_UP
            :: !writer_lock[file] && (!reader_lock[file] || reader_lock[file] == who) &&
               !(user_locks[file] & (3 - (who - 2))) && !whole_lock[file] -> whole_lock[file] = who
#else
            :: !IS_USED(file) && !whole_lock[file] -> whole_lock[file] = who
#endif
            :: else
            fi
        }
        if
        :: whole_lock[file] == who ->
            unlink_if_same(file, !is_wanted[name]);
            swept[file] = (name != file)
        :: else
        fi
#else
    :: d_step {
            file && (reader_lock[file] == who || (user_locks[file] & (who - 2))) && killed[file] -> was_survived[file] = 1
       }
#endif
    :: else
    fi;
    d_step {
        give_up(who);
        whole_lock[file] = (whole_lock[file] == who -> 0 : whole_lock[file]);
        ended[who] = 1
    }
}

proctype attacher(byte who) {
    byte file;
    bit has_place, is_same;
    {
        (name || (ended[1] && ended[2]));
        file = name;
        if
        :: !file -> goto over                           /* SegmentMissing */
        :: else
        fi;
        d_step {
            complete_when_named = IS_COMPLETE(file);
            assert(complete_when_named)
        }
#ifdef LINKS_BEFORE_LOCK
        if
        :: name != file -> goto over
        :: else
        fi;
#endif
        d_step {
            if
            :: !whole_lock[file] && !reader_lock[file] -> reader_lock[file] = who; has_place = 1; place_was_taken[file] = 1
            :: else
            fi
        }
        if
        :: !has_place ->
            if
            :: d_step { !whole_lock[file] -> user_locks[file] = user_locks[file] | (who - 2) };
#ifndef TAKEN_WITHOUT_LOOKING_AT_LINKS
                if
                :: name != file -> goto over            /* SegmentMissing */
                :: else
                fi;
#endif
                d_step {
                    taken_is_true = place_was_taken[file];
                    assert(taken_is_true)               /* RankTaken */
                }
            :: whole_lock[file]                         /* SegmentMissing: it is being removed */
            fi;
            goto over
        :: else
        fi;
#if !defined(NOT_LOOKED_AT_LINKS) && !defined(LINKS_BEFORE_LOCK)
        if
        :: name != file -> goto over                    /* SegmentMissing */
        :: else
        fi;
#endif
        d_step {
            attached_has_name = !swept[file];
            assert(attached_has_name)
        }
        if
#ifdef DEATH_NOT_ASKED
        :: unlink_if_same(file, !is_wanted[name])
#else
        :: !writer_lock[file] && killed[file] -> unlink_if_same(file, !is_wanted[name])    /* it finds the writer dead */
#endif
        :: true
        fi;
over:
        leave(who)
    } unless { killed[who] }
}

/* It has the first file, but not by its name. */
proctype observer() {
    byte magic, sections;
#ifdef HEADER_LOAD_RELAXED
    sections = memory[SECTIONS];
    magic = memory[MAGIC];
#else
    magic = memory[MAGIC];                          /* SYNC header.load */
    sections = memory[SECTIONS];
#endif
    d_step {
        complete_by_magic = (!magic || sections);
        assert(complete_by_magic)
    }
}

inline sweep() {
    file = name;
    if
    :: file ->
        d_step {
            if
#ifdef SWEPT_WITHOUT_LOCK
            :: true -> has_all = 1
#else
            :: !IS_USED(file) && !whole_lock[file] -> whole_lock[file] = SWEEPER; has_all = 1
#endif
            :: else
            fi
        }
        if
        :: has_all ->
#ifdef UNLOCKED_BEFORE_UNLINK
            whole_lock[file] = 0;
#endif
            unlink_if_same(file, !IS_USED(name) && !is_wanted[name]);
            d_step {
                swept[file] = (name != file);
                whole_lock[file] = 0;
                has_all = 0
            }
        :: else
        fi
    :: else
    fi;
    file = 0
}

#define ALL_ENDED (ended[1] && ended[2] && ended[3] && ended[4])

proctype sweeper() {
    byte file;
    bit has_all, is_same;
    sweep();
    sweeps_ended++
}

proctype last_sweeper() {
    byte file;
    bit has_all, is_same;
    (ALL_ENDED && sweeps_ended == SWEEPERS);
    d_step {
        last_removes_name = (!name || !was_survived[name] || killed[ATTACHER]);
        assert(last_removes_name)
    }
    sweep();
    d_step {
        nothing_left_behind = !name;
        assert(nothing_left_behind);
        everybody_ends = 1
    }
}

proctype rest() {
end:
    timeout ->
    assert(everybody_ends)
}

/* kill -9: the kernel drops the locks. */
inline kill(who) {
    d_step {
        !ended[who] ->
        killed[who] = 1;
        ended[who] = 1;
        is_wanted[1] = is_wanted[1] && who != CREATOR;
        writer_lock[1] = (writer_lock[1] == who -> 0 : writer_lock[1]);
        reader_lock[1] = (reader_lock[1] == who -> 0 : reader_lock[1]);
        reader_lock[2] = (reader_lock[2] == who -> 0 : reader_lock[2]);
        whole_lock[1] = (whole_lock[1] == who -> 0 : whole_lock[1]);
        whole_lock[2] = (whole_lock[2] == who -> 0 : whole_lock[2]);
        user_locks[1] = (who == ATTACHER -> user_locks[1] & 2 : user_locks[1]);
        user_locks[2] = (who == ATTACHER -> user_locks[2] & 2 : user_locks[2])
    }
}

proctype killer(byte who) {
    if
    :: kill(who)
    :: true
    fi
}

init {
    atomic {
        run creator(CREATOR);
        run killer(CREATOR);
#if CREATORS > 1
        run creator(CREATOR + 1);
#else
        ended[CREATOR + 1] = 1;
#endif
#if ATTACHERS > 0
        run attacher(ATTACHER);
        run killer(ATTACHER);
#else
        ended[ATTACHER] = 1;
#endif
#if ATTACHERS > 1
        run attacher(ATTACHER + 1);
#else
        ended[ATTACHER + 1] = 1;
#endif
#ifdef OBSERVED
        run observer();
#endif
        run sweeper();
#if SWEEPERS > 1
        run sweeper();
#endif
        run last_sweeper();
        run rest();
        run reaches_memory(0)
    }
}
