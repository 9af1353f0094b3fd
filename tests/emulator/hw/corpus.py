"""All groups of hardware cases by name; each group is one file of records."""

from collections.abc import Callable

from . import elementwise, memory_cases, scalar_cases, tensor_copy_cases, wgmma_cases
from .cases import Case


def groups() -> dict[str, Callable[[], list[Case]]]:
    return {
        **wgmma_cases.GROUPS,
        **elementwise.GROUPS,
        **scalar_cases.GROUPS,
        **memory_cases.GROUPS,
        **tensor_copy_cases.GROUPS,
    }
