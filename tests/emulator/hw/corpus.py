"""All groups of hardware cases by name; each group is one file of records."""

from collections.abc import Callable

from . import elementwise, memory_cases, more_cases, scalar_cases, tensor_copy_cases, wgmma_cases
from .cases import Case


def groups() -> dict[str, Callable[[], list[Case]]]:
    return {
        **wgmma_cases.GROUPS,
        **elementwise.GROUPS,
        **scalar_cases.GROUPS,
        **memory_cases.GROUPS,
        **tensor_copy_cases.GROUPS,
        **more_cases.GROUPS,
    }


PENDING: tuple[str, ...] = ()
"""Groups that no GPU has run yet: scripts/record_hardware.py --group NAME, then take the name out of here."""


def recorded_groups() -> dict[str, Callable[[], list[Case]]]:
    return {name: build for name, build in groups().items() if name not in PENDING}
