"""Every exception that megagen raises, in one tree.

A message names the argument, its value, the limit it breaks and the way out. Classes that also derive from a
built-in (``ValueError``, ``TimeoutError``) can be caught by callers who don't know megagen.
"""


class MegagenError(Exception):
    """Base of all errors raised by megagen."""


class ShapeError(MegagenError, ValueError):
    """A MoE shape (hidden, intermediate, experts, top-k, ranks) that no kernel can be made for."""


class PlanError(MegagenError, ValueError):
    """No plan exists for a valid shape, or a forced plan breaks a limit; says which constraint fails."""


class InputError(MegagenError, ValueError):
    """An argument of a layer call, of weight loading or of a command that doesn't fit."""


class CompileError(MegagenError):
    """NVRTC rejected the source, or the result spills or carries a ptxas performance note."""


class CacheError(MegagenError):
    """The kernel cache can't be read, written or locked, or an ahead-of-time folder doesn't fit."""


class DeviceError(MegagenError):
    """No GPU, an unsupported GPU or driver, or a driver call that failed."""


class NVLinkDomainError(MegagenError):
    """The group's GPUs are not in one NVLink domain, so their memory can't be mapped into each other."""


class ContractMismatch(MegagenError):
    """Ranks disagree on the contract (shape, format, buffer layout or protocol version)."""


class MegaMoETimeout(MegagenError, TimeoutError):
    """A wait inside the kernel exceeded its limit; names the rank, SM, role and what was awaited."""


class PeerAborted(MegagenError):
    """Another rank stopped this launch; names that rank."""


class EmulatorError(MegagenError):
    """Base of what the emulator finds: who, where, what."""


class Deadlock(EmulatorError):
    """Nothing asynchronous is pending and every live warp polls unchanged memory."""


class DataRace(EmulatorError):
    """A weak access that is not ordered after a conflicting one."""


class MemoryFault(EmulatorError):
    """An access outside an allocation, misaligned, or to memory of the wrong space."""


class ProxyViolation(EmulatorError):
    """An async-proxy access to memory written through the generic proxy without a proxy fence between."""


class UninitializedUse(EmulatorError):
    """An undefined value reached an address, a branch, a barrier or a defined output."""


class Trap(EmulatorError):
    """The kernel executed ``trap``."""


class UnsupportedInstruction(EmulatorError):
    """An instruction form that the emulator doesn't implement; gives its text, line and PTX ISA section."""


class StepLimit(EmulatorError):
    """The run took more steps than it was allowed."""
