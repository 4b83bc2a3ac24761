/* Weak memory for the models: Promela's own memory is sequentially consistent, the processors' is not.
 *
 * Every process puts its stores into a buffer of its own, from which they reach the memory later and in any order
 * that the C++ orders leave open on a multi-copy atomic machine (x86-64, aarch64):
 *
 *   store_relaxed   may overtake every earlier store to another location, a release store too
 *   store_release   reaches the memory after all earlier stores of its process
 *   full_fence      waits until the buffer is empty
 *   load            the latest own store to the location, else the memory
 *
 * Loads happen where they are written: that is what acquire says. A variant that weakens a load (or the release
 * after a load) therefore writes the load down where it could come to happen without it, earlier or later.
 *
 * A model defines OWNERS (buffers), DEPTH (stores that one holds; a full one makes its owner wait) and LOCATIONS, and
 * runs one reaches_memory() for every buffer.
 */
typedef Store { byte at; byte value; bit release };
typedef StoreBuffer { byte count; Store store[DEPTH] };

StoreBuffer buffer[OWNERS];
byte memory[LOCATIONS];
byte scan;

inline append(who, where, what, is_release) {
    d_step {
        buffer[who].count < DEPTH ->
        buffer[who].store[buffer[who].count].at = where;
        buffer[who].store[buffer[who].count].value = what;
        buffer[who].store[buffer[who].count].release = is_release;
        buffer[who].count++
    }
}

inline store_relaxed(who, where, what) { append(who, where, what, 0) }
inline store_release(who, where, what) { append(who, where, what, 1) }

inline full_fence(who) { buffer[who].count == 0 }

#define OWN(who, where, i, or) \
    (buffer[who].count > i && buffer[who].store[i].at == (where) -> buffer[who].store[i].value : (or))
#define OWN_0(who, where) OWN(who, where, 0, memory[where])
#define OWN_1(who, where) OWN(who, where, 1, OWN_0(who, where))
#if DEPTH > 2
#define OWN_2(who, where) OWN(who, where, 2, OWN_1(who, where))
#else
#define OWN_2 OWN_1
#endif
#if DEPTH > 3
#define OWN_3(who, where) OWN(who, where, 3, OWN_2(who, where))
#else
#define OWN_3 OWN_2
#endif
#if DEPTH > 4
#define OWN_4(who, where) OWN(who, where, 4, OWN_3(who, where))
#else
#define OWN_4 OWN_3
#endif
#if DEPTH > 5
#define OWN_5(who, where) OWN(who, where, 5, OWN_4(who, where))
#else
#define OWN_5 OWN_4
#endif

inline load(who, where, into) { into = OWN_5(who, where) }

inline commit(who, which) {
    memory[buffer[who].store[which].at] = buffer[who].store[which].value;
    scan = which;
    do
    :: scan + 1 >= buffer[who].count -> break
    :: else ->
        buffer[who].store[scan].at = buffer[who].store[scan + 1].at;
        buffer[who].store[scan].value = buffer[who].store[scan + 1].value;
        buffer[who].store[scan].release = buffer[who].store[scan + 1].release;
        scan++
    od;
    buffer[who].count--;
    buffer[who].store[scan].at = 0;
    buffer[who].store[scan].value = 0;
    buffer[who].store[scan].release = 0;
    scan = 0
}

#define APART(i, j) (buffer[who].store[i].at != buffer[who].store[j].at)
#define MAY_OVERTAKE(i) (buffer[who].count > i && !buffer[who].store[i].release)

proctype reaches_memory(byte who) {
end:
    do
    :: d_step { buffer[who].count > 0 -> commit(who, 0) }
    :: d_step { MAY_OVERTAKE(1) && APART(1, 0) -> commit(who, 1) }
#if DEPTH > 2
    :: d_step { MAY_OVERTAKE(2) && APART(2, 0) && APART(2, 1) -> commit(who, 2) }
#endif
#if DEPTH > 3
    :: d_step { MAY_OVERTAKE(3) && APART(3, 0) && APART(3, 1) && APART(3, 2) -> commit(who, 3) }
#endif
#if DEPTH > 4
    :: d_step { MAY_OVERTAKE(4) && APART(4, 0) && APART(4, 1) && APART(4, 2) && APART(4, 3) -> commit(who, 4) }
#endif
#if DEPTH > 5
    :: d_step {
        MAY_OVERTAKE(5) && APART(5, 0) && APART(5, 1) && APART(5, 2) && APART(5, 3) && APART(5, 4) -> commit(who, 5)
    }
#endif
    od
}
