"""Cases of whole kernels, judged: results within the tolerances, and equal bits where they must be."""

from megagen.cache import default_cache
from megagen.emulator.cases import Case, Verdict, check, prepare
from megagen.emulator.layer import Kernel


def require_right(case: Case) -> None:
    verdict = check(case, compare_bits=True)
    assert verdict.right, (case.describe(), verdict.error, verdict.wrong)


def judge_changed(case: Case, source: str, target: str) -> Verdict:
    """What becomes of a case of one rank if its kernel has this source."""
    compiled = default_cache().load_or_compile(source, target, name="broken.cu")
    kernel = Kernel(case.plans[0], source, compiled.ptx, compiled.entry)
    return check(case, prepare(case, [kernel]))
