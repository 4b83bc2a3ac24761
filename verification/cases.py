"""The cases: models as the code has it, and variants with one thing weakened, which must fail."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """One exhaustive search of a model.

    Attributes:
        model: the file, without .pml
        defines: sizes, and the optional events that occur
        liveness: check the model's ltl formula, under weak fairness, instead of its assertions
    """

    model: str
    defines: str
    liveness: bool = False


@dataclass(frozen=True)
class Variant:
    """A model that must fail.

    Attributes:
        name: the place in the code
        weakened: what is different there
        run: the smallest search that shows it, with the macro that weakens the model
        caught_by: the property that must catch it; any other failure is a fault of the model
    """

    name: str
    weakened: str
    run: Run
    caught_by: str


BASES = (
    Run("ring", "CHUNKS=1 READERS=1 CLOSES ABANDONS"),
    Run("ring", "CHUNKS=2 READERS=1 CLOSES ABANDONS HOLDS"),
    Run("ring", "CHUNKS=1 READERS=2 CLOSES ABANDONS"),
    Run("ring", "CHUNKS=2 READERS=2"),
    Run("ring", "CHUNKS=1 READERS=1 SIGNALS"),
    Run("ring", "CHUNKS=1 READERS=1", liveness=True),
    Run("ring", "CHUNKS=2 READERS=1", liveness=True),
    Run("wait", "CAPACITY=1 READERS=1 CLOSES SIGNALS"),
    Run("wait", "CAPACITY=2 READERS=1 CLOSES SIGNALS"),
    Run("wait", "CAPACITY=1 READERS=1 STOPPED"),
    Run("wait", "CAPACITY=1 READERS=2"),
    Run("wait", "CAPACITY=1 READERS=2 CLOSES"),
    Run("wait", "CAPACITY=1 READERS=2 DIES"),
    Run("wait", "CAPACITY=2 READERS=1 BURSTS CLOSES"),
    Run("wait", "CAPACITY=1 READERS=2 BURSTS"),
    Run("wait", "CAPACITY=1 READERS=1", liveness=True),
    Run("wait", "CAPACITY=2 READERS=1 CLOSES", liveness=True),
    Run("watch", "CAPACITY=1"),
    Run("watch", "CAPACITY=2"),
    Run("watch", "CAPACITY=1 BLOCKS"),
    Run("watch", "CAPACITY=2 BLOCKS"),
    Run("death", "PROCESSES=2 FORKS"),
    Run("death", "PROCESSES=3"),
    Run("death", "PROCESSES=2 FORKS", liveness=True),
    Run("death", "PROCESSES=3", liveness=True),
    Run("place", "CHUNKS=1 MESSAGES=3"),
    Run("place", "CHUNKS=2 MESSAGES=3"),
    Run("place", "CHUNKS=1 MESSAGES=3 LATE"),
    Run("place", "CHUNKS=2 MESSAGES=3 LATE"),
    Run("place", "CHUNKS=1 MESSAGES=3 REOPENED_LATE"),
    Run("place", "CHUNKS=2 MESSAGES=2 REOPENED_LATE"),
    Run("latest", "CHUNKS=3 READERS=1 MESSAGES=5 KEEPS"),
    Run("latest", "CHUNKS=4 READERS=2 MESSAGES=3"),
    Run("segment", "CREATORS=1 ATTACHERS=0 SWEEPERS=1 OBSERVED"),
    Run("segment", "CREATORS=1 ATTACHERS=1 SWEEPERS=2"),
    Run("segment", "CREATORS=1 ATTACHERS=2 SWEEPERS=1"),
    Run("segment", "CREATORS=2 ATTACHERS=0 SWEEPERS=2"),
    Run("segment", "CREATORS=2 ATTACHERS=1 SWEEPERS=1"),
    Run("extents", "CHUNKS=1 READERS=1 SPACE=1 MESSAGES=5"),
    Run("extents", "CHUNKS=2 READERS=1 SPACE=1 MESSAGES=5"),
    Run("extents", "CHUNKS=2 READERS=1 SPACE=2 MESSAGES=5"),
    Run("extents", "CHUNKS=1 READERS=2 SPACE=1 MESSAGES=3"),
    Run("extents", "CHUNKS=2 READERS=2 SPACE=1 MESSAGES=3"),
    Run("store", "READERS=1 OBJECTS=3 DIES CLEARS"),
    Run("store", "READERS=1 OBJECTS=2 DIES CLOSES CLEARS GET_CACHED"),
    Run("store", "READERS=2 OBJECTS=2 CLEARS"),
    Run("store", "READERS=2 OBJECTS=1 GET_CACHED DROPS"),
    Run("store", "READERS=1 OBJECTS=2 DIES GET_CACHED DROPS"),
)

RING = "CHUNKS=1 READERS=1"
WAIT = "CAPACITY=1 READERS=1"
DEATH = "PROCESSES=2 FORKS"
PLACE = "CHUNKS=1 MESSAGES=3"
BEGINS = "begins_where_counted"
OPENED = "handle_is_of_the_last_opening"
LATEST = "CHUNKS=3 READERS=1 MESSAGES=5 KEEPS"
ATTACH = "CREATORS=1 ATTACHERS=1 SWEEPERS=1"
CREATORS = "CREATORS=2 ATTACHERS=0 SWEEPERS=2"
SURVIVORS = "CREATORS=1 ATTACHERS=2 SWEEPERS=1"
OBSERVED = "CREATORS=1 ATTACHERS=0 SWEEPERS=1 OBSERVED"
STORE = "READERS=1 OBJECTS=2"
DROPS = "READERS=1 OBJECTS=1 GET_CACHED DROPS"
EXTENTS = "CHUNKS=2 READERS=1 SPACE=2 MESSAGES=5"


def ring(
    name: str, weakened: str, macro: str, caught_by: str = "whole_and_next", size: str = RING
) -> Variant:
    """A weakened ring.pml."""
    return Variant(name, weakened, Run("ring", f"{size} {macro}"), caught_by)


def wait(name: str, weakened: str, macro: str, size: str = WAIT) -> Variant:
    """A weakened wait.pml."""
    return Variant(name, weakened, Run("wait", f"{size} {macro}"), "nobody_left_asleep")


def watch(name: str, weakened: str, macro: str, size: str = "CAPACITY=1") -> Variant:
    """A weakened watch.pml."""
    return Variant(name, weakened, Run("watch", f"{size} {macro}"), "every_message_is_shown")


def death(name: str, weakened: str, macro: str, caught_by: str, size: str = DEATH) -> Variant:
    """A weakened death.pml."""
    return Variant(name, weakened, Run("death", f"{size} {macro}"), caught_by)


def unnoticed(name: str, weakened: str, macro: str) -> Variant:
    """A weakened death.pml in which a process waits for ever."""
    run = Run("death", f"{DEATH} {macro}", liveness=True)
    return Variant(name, weakened, run, "every_death_is_noticed")


def place(
    name: str, weakened: str, macro: str, caught_by: str = "whole_and_next", size: str = PLACE
) -> Variant:
    """A weakened place.pml."""
    return Variant(name, weakened, Run("place", f"{size} {macro}"), caught_by)


def latest(
    name: str, weakened: str, macro: str, caught_by: str = "whole", size: str = LATEST
) -> Variant:
    """A weakened latest.pml."""
    return Variant(name, weakened, Run("latest", f"{size} {macro}"), caught_by)


def segment(name: str, weakened: str, macro: str, size: str, caught_by: str) -> Variant:
    """A weakened segment.pml."""
    return Variant(name, weakened, Run("segment", f"{size} {macro}"), caught_by)


def extents(
    name: str,
    weakened: str,
    macro: str,
    caught_by: str = "extent_is_whole",
    size: str = EXTENTS,
) -> Variant:
    """A weakened extents.pml."""
    return Variant(name, weakened, Run("extents", f"{size} {macro}"), caught_by)


def store(
    name: str, weakened: str, macro: str, caught_by: str = "valid_is_whole", size: str = STORE
) -> Variant:
    """A weakened store.pml."""
    return Variant(name, weakened, Run("store", f"{size} {macro}"), caught_by)


VARIANTS = (
    ring("retract.store", "left out", "NO_RETRACT", "published_to_all"),
    ring("reset.store", "relaxed, not release", "ONLY_DATA RESET_RELAXED"),
    ring("reset.load", "relaxed, not acquire", "ONLY_DATA RESET_LOAD_RELAXED"),
    ring("is_published", "`written` before the own flag", "OWN_FLAG_SECOND", "published_to_all"),
    ring("publish.store", "relaxed, not release", "PUBLISH_RELAXED"),
    ring("publish.load", "relaxed, not acquire", "PUBLISH_LOAD_RELAXED"),
    ring("consume.store", "relaxed, not release", "CONSUME_RELAXED"),
    ring("consume.load", "relaxed, not acquire", "CONSUME_LOAD_RELAXED"),
    ring(
        "leave.store of the writer",
        "relaxed, not release",
        "CLOSES LEAVE_RELAXED",
        "all_before_end",
    ),
    ring("leave.store of a reader", "relaxed, not release", "CLOSES LEAVE_RELAXED_READER"),
    ring(
        "leave.load of a reader",
        "relaxed, or asked after is_published",
        "CLOSES LEAVE_LOAD_RELAXED",
        "all_before_end",
    ),
    ring("leave.load of the writer", "relaxed, not acquire", "CLOSES LEAVE_LOAD_RELAXED_WRITER"),
    ring("holds_next", "not asked", "HOLDS NO_HOLDS_NEXT", size="CHUNKS=2 READERS=1"),
    ring(
        "look_for_signals",
        "after publish.store",
        "SIGNALS LOOKED_AFTER_PUBLISH",
        "raised_is_unsent",
    ),
    wait("wait_until: full_fence", "left out", "NO_FENCE_IN_WAIT"),
    wait("wait_until: ready() after park.store", "left out", "NOT_ASKED_AGAIN"),
    wait("wake.load", "relaxed, not acquire", "WAKE_LOAD_RELAXED"),
    wait("wake.store", "relaxed, not release", "WAKE_RELAXED"),
    wait("wake_parked: full_fence", "left out", "NO_FENCE_IN_WAKE"),
    wait("wake_parked", "before publish.store", "WOKEN_BEFORE_PUBLISHED"),
    wait("wake_parked", "clears `parked` after the increment", "CLEARED_AFTER_INCREMENT"),
    wait(
        "WaitPoint::parked",
        "one byte for all readers",
        "ONE_BYTE_FOR_ALL",
        "CAPACITY=1 READERS=2",
    ),
    wait(
        "give_back: full_fence",
        "behind the look at the others",
        "OTHERS_ASKED_BEFORE_FENCE",
        "CAPACITY=1 READERS=2",
    ),
    wait(
        "give_back",
        "clears `parked` though others still read",
        "CLEARED_BY_ANYBODY",
        "CAPACITY=1 READERS=2",
    ),
    wait(
        "give_back: leave.load",
        "left out for who has closed",
        "CLOSED_IS_WAITED_FOR",
        "CAPACITY=1 READERS=2 CLOSES",
    ),
    wait(
        "give_back: leave.load",
        "left out for who was released",
        "CLOSED_IS_WAITED_FOR",
        "CAPACITY=1 READERS=2 DIES",
    ),
    wait(
        "announce_close of a reader",
        "wakes nobody",
        "CLOSED_READER_WAKES_NOBODY",
        "CAPACITY=1 READERS=2 CLOSES",
    ),
    wait("Burst::wake", "not before a wait", "BURSTS BURST_WAITS_BEFORE_WAKING"),
    wait("Burst::~Burst", "wakes nobody", "BURSTS BURST_ENDS_WITHOUT_WAKING"),
    wait("futex_wait", "does not compare", "FUTEX_COMPARES_NOT"),
    watch("Watch::resume: full_fence", "left out", "NO_FENCE_IN_RESUME"),
    watch("Watch::resume: is_ready() after park.store", "left out", "NOT_ASKED_AGAIN"),
    watch("Watch::pause", "leaves it armed", "NOT_DISARMED", "CAPACITY=1 BLOCKS"),
    watch("Lane::park_all: park.store", "left out", "NOT_PARKED_ANEW"),
    watch("Lane::park_all: full_fence", "left out", "NO_FENCE_IN_THREAD"),
    watch("Lane::park_all: wake.load", "after the look", "WORD_LOADED_LATE"),
    watch("futex_waitv", "does not compare", "FUTEX_COMPARES_NOT"),
    wait("futex_wake_all", "wakes one", "WAKE_ONE", "CAPACITY=1 READERS=2"),
    wait("announce_close", "wakes nobody", "CLOSES CLOSED_WITHOUT_WAKING"),
    wait("stop_waiting", "`closing` after the wake-up", "STOPPED STOPPED_AFTER_WAKING"),
    Variant(
        "wait_until: full_fence",
        "left out",
        Run("wait", f"{WAIT} NO_FENCE_IN_WAIT", liveness=True),
        "every_sleeper_is_woken",
    ),
    death("join.store", "relaxed, not release", "JOIN_RELAXED", "death_has_a_pid"),
    death("join.load", "relaxed, not acquire", "JOIN_LOAD_RELAXED", "death_has_a_pid"),
    death("join", "before the lock is taken", "JOINED_BEFORE_LOCKED", "death_is_true"),
    death("presence", "does not look again", "NO_SECOND_LOOK", "death_is_true"),
    death("finish", "lock dropped before `leave`", "UNLOCKED_BEFORE_LEAVE", "death_is_true"),
    death("begin", "is_published before the look", "LOOKED_AFTER_MESSAGES", "messages_first"),
    death(
        "RingReader",
        "does not ask for the state it finds",
        "STATE_NOT_ASKED",
        "place_is_taken_once",
        "PROCESSES=3",
    ),
    death("release", "without the lock", "RELEASED_WITHOUT_LOCK", "living_are_not_released"),
    death(
        "release", "does not wait for who is ending", "ENDING_NOT_WAITED_FOR", "dead_are_released"
    ),
    unnoticed("wait_until: look", "left out after a slice", "NOT_LOOKED"),
    unnoticed("pthread_atfork", "the child keeps the lock's descriptor", "COPY_STAYS_OPEN"),
    unnoticed("export_handle", "before join", "HANDLE_BEFORE_JOIN"),
    place("readmit", "leaves the flags of the predecessor", "FLAGS_STAY"),
    place("readmit", "opens before it sets the flags", "OPENED_BEFORE_CLEARED", BEGINS),
    place("readmit", "leaves `admitted`", "LATE ADMITTED_STAYS", BEGINS),
    place("attach", "takes no `admitted` for 0", "REOPENED_LATE COUNTED_AT_ONCE", BEGINS),
    place("attach", "compares no generation", "NO_GENERATION", OPENED),
    place(
        "attach", "compares the generation before it has the lock", "GENERATION_BEFORE_LOCK", OPENED
    ),
    place("attach", "compares `admitted`", "ADMITTED_IS_THE_GENERATION", OPENED),
    place("publish", "resets the flags of all places", "LATE RESET_FOR_ALL"),
    place("wake_parked: full_fence", "left out", "LATE NO_FENCE_IN_WAKE"),
    place("admit.load", "relaxed, not acquire", "LATE ADMIT_LOAD_RELAXED"),
    latest("latest.store", "relaxed, not release", "LATEST_RELAXED"),
    latest("take: full_fence", "left out", "NO_FENCE_IN_TAKE"),
    latest("take: latest.load", "not asked again", "NOT_LOADED_AGAIN"),
    latest("finish.store", "relaxed, not release", "FINISH_RELAXED"),
    latest("wake_parked: full_fence", "left out", "NO_FENCE_IN_PUBLISH"),
    latest("next", "does not ask for who reads", "READERS_NOT_ASKED"),
    latest("next", "takes the latest, too", "LATEST_IS_TAKEN"),
    latest("next", "does not ask for marks", "MARKS_NOT_ASKED"),
    latest("next", "of one chunk less", "", "always_free", "CHUNKS=2 READERS=1 MESSAGES=5"),
    latest("is_over", "does not ask for who reads", "EXTENT_NOT_ASKED"),
    latest("is_over", "of the message that is being written", "OVER_BEFORE_PUBLISHED"),
    latest("lease.store", "after finish.store", "MARKED_AFTER_FINISH"),
    latest("drop.store", "before the last look", "DROPPED_BEFORE_LAST_LOOK"),
    segment(
        "header.store", "relaxed, not release", "HEADER_RELAXED", OBSERVED, "complete_by_magic"
    ),
    segment(
        "header.load", "relaxed, not acquire", "HEADER_LOAD_RELAXED", OBSERVED, "complete_by_magic"
    ),
    segment(
        "create: link_name",
        "before the header is filled in",
        "NAMED_BEFORE_FILLED",
        ATTACH,
        "complete_when_named",
    ),
    segment("create: link_name", "before hold", "NAMED_BEFORE_LOCKED", ATTACH, "living_keep_names"),
    segment("create: link_name", "replaces a name", "NAME_REPLACED", CREATORS, "living_keep_names"),
    segment("attach: links", "not looked at", "NOT_LOOKED_AT_LINKS", ATTACH, "attached_has_name"),
    segment(
        "attach: links", "looked at before hold", "LINKS_BEFORE_LOCK", ATTACH, "attached_has_name"
    ),
    segment(
        "attach: links",
        "not looked at before RankTaken",
        "TAKEN_WITHOUT_LOOKING_AT_LINKS",
        ATTACH,
        "taken_is_true",
    ),
    segment(
        "remove_name_as_peer", "of a living writer", "DEATH_NOT_ASKED", ATTACH, "living_keep_names"
    ),
    segment("sweep: take_all", "left out", "SWEPT_WITHOUT_LOCK", ATTACH, "living_keep_names"),
    segment(
        "sweep: take_all",
        "dropped before the name is removed",
        "UNLOCKED_BEFORE_UNLINK",
        ATTACH,
        "living_keep_names",
    ),
    segment("unlink_if_same", "does not compare", "REMOVED_BY_NAME", CREATORS, "living_keep_names"),
    segment(
        "abandon",
        "lock dropped before remove_name",
        "UNLOCKED_BEFORE_REMOVE_NAME",
        CREATORS,
        "living_keep_names",
    ),
    segment(
        "abandon",
        "leaves the name of a dead creator",
        "LEFT_WITHOUT_REMOVING",
        SURVIVORS,
        "last_removes_name",
    ),
    segment(
        "abandon",
        "take_all before its own locks are dropped",
        "TAKEN_BEFORE_GIVEN_UP",
        SURVIVORS,
        "last_removes_name",
    ),
    extents("copy_out", "after finish", "COPIED_AFTER_FINISH"),
    extents("hold", "gives back at once", "HOLD_GIVES_BACK"),
    extents("spill", "published before it is written", "PUBLISHED_BEFORE_WRITTEN"),
    extents("is_over", "a lap early", "OVER_A_LAP_EARLY"),
    extents("is_over", "asked before begin() saw the chunk free", "RECLAIMED_BEFORE_FREE"),
    extents(
        "is_over",
        "asks one reader",
        "ONE_READER_ASKED",
        size="CHUNKS=2 READERS=2 SPACE=2 MESSAGES=5",
    ),
    extents("lease", "marked after the chunk is given back", "LEASED_AFTER_FINISH"),
    extents("lease", "dropped before the last look", "DROPPED_BEFORE_LAST_LOOK"),
    extents("is_kept", "not asked", "LEASES_NOT_ASKED_FOR"),
    extents("is_kept", "waited for", "LEASES_ARE_WAITED_FOR", "all_given_back"),
    extents("is_kept", "of the dead counts", "LEASES_OF_THE_DEAD", "all_given_back"),
    extents("own_leases", "after `closed`", "CLOSED_BEFORE_COPIED"),
    extents("is_done", "`closed` does not count", "CLOSED_IS_NOT_DONE", "all_given_back"),
    extents("release_reader", "of one that lives", "RELEASED_WITHOUT_LOCK"),
    extents("cancel", "leaves the extent in the book", "CANCELLED_STAYS_USED", "all_given_back"),
    store("append.store", "relaxed, not release", "APPEND_RELAXED", "listed_is_complete"),
    store("offer.store", "relaxed, not release", "OFFER_RELAXED"),
    store("offer.load", "relaxed, not acquire", "GRANT_LOAD_RELAXED"),
    store("pin: full_fence", "left out", "NO_FENCE_IN_PIN", "pinned_stays"),
    store("mark: full_fence", "left out", "NO_FENCE_IN_MARK", "pinned_stays"),
    store("retire", "pins not asked for", "PINS_NOT_ASKED", "pinned_stays"),
    store("retire", "pins not asked for again", "PINS_NOT_ASKED_AGAIN", "pinned_stays"),
    store("retire", "reads not asked for", "READS_NOT_ASKED", "evicted_when_read"),
    store("unpin.store", "before the object is read", "UNPINNED_BEFORE_READ"),
    store("mark: full_fence", "left out behind `retired`", "CLOSES NO_FENCE_BEHIND_RETIRED"),
    store("is_valid", "not asked behind the read", "CLOSES NOT_VALIDATED_BEHIND"),
    store(
        "drop_reference",
        "lowers before it looks",
        "LOWERED_BEFORE_IT_LOOKS",
        "reads_are_counted",
        "READERS=2 OBJECTS=1 GET_CACHED DROPS",
    ),
    store("refer", "takes no read back", "SECONDS_STAY_READ", "evicted_when_read", DROPS),
)
