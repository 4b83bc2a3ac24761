"""The parts that all systems share and none owns. Each file opens with what may live in it.

Native code imports nothing by name: this package gives it what memlane.errors and `arguments` have,
because they must not import native code; other modules install their functions themselves.
"""

import memlane.errors
from memlane._base.arguments import integer
from memlane._base.deadline import seconds_of
from memlane._base.handlers import raised_by_handler
from memlane._native import install, install_errors

install_errors(vars(memlane.errors))
install(
    foreign_segment=memlane.errors.foreign_segment,
    system_fault=memlane.errors.system_fault,
    integer=integer,
    raised_by_handler=raised_by_handler,
    seconds_of=seconds_of,
)
