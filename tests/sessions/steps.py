"""The steps that random sequences are made of, and how many sequences there are."""

import os
import random

import pytest

from tests.sessions.world import World

COUNT = int(os.environ.get("MEMLANE_EXAMPLES", "5000"))
LONG = pytest.mark.soak(seconds=COUNT // 100)  # ten times what they take on an idle machine


def step(world: World, what: int, reader: "World.Reader", how: int, dice: random.Random) -> None:
    match what:
        case 0 | 1 | 2:
            world.send((5, 5, 25, 70)[how % 4])
        case 3:
            world.send_together(2 + how % 3)
        case 4:
            world.send(fate=("before", "after")[how % 2])
        case 5 | 6 | 7:
            world.dequeue(reader)
        case 8 | 9:
            world.advance((0.02, 0.1, 0.2, 0.3)[how % 4])
        case 10:
            world.reset(reader, how % 3)
        case 11:
            world.cut(reader.host, ("up", "down")[how % 2])
        case 12:
            world.heal(reader.host)
        case 13:
            reader.is_stopped = not reader.is_stopped
        case 14:
            world.is_writer_stopped = not world.is_writer_stopped
        case 15:
            world.interrupt = ("hear", "flush", "receive", "say")[how % 4]
        case 16:
            world.delay = (0, 0.05, 0.1, 0.3)[how % 4]
        case 17:
            world.close(reader)
        case 18 if how % 3 == 0:
            world.kill(reader)
        case 19 if how % 8 == 0:
            world.close_writer()
        case 19 if how % 8 == 1:
            world.kill_writer()
        case 20:
            world.fail_relay(reader, holds_message=how % 2 == 0)
        case 23:
            world.replace(reader.rank)
        case 21 | 22 if reader.lies or (how % 8 == 2 and reader is not world.readers[-1]):
            world.lie(reader, dice)
