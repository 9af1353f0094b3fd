"""GPU tests: skipped where there is no GPU; their counts can be kept as JSON (``--gpu-results DIR``).

``run.sh`` runs them all. The option exists where tests/gpu is named on the command line.
"""

import json
import os
import subprocess
import time
from pathlib import Path

# Before torch starts CUDA; child processes inherit them.
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ["NCCL_NVLS_ENABLE"] = "0"
os.environ["NVSHMEM_DISABLE_NVLS"] = "1"
os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"

import pytest
import torch

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-results", metavar="DIR", help="write the counts of the GPU tests into DIR")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        needed = next((mark.args[0] for mark in item.iter_markers("gpu") if mark.args), 1)
        if gpus < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), has {gpus}"))


class Results:
    """Counts outcomes; a test counts once, as failed if any of its phases failed."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.start = directory, time.time()
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self.outcomes.get(report.nodeid)
        if before != "failed" and (report.when == "call" or report.outcome != "passed"):
            self.outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        of = {
            kind: [n for n, o in self.outcomes.items() if o == kind]
            for kind in ("passed", "failed", "skipped")
        }
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        record = {
            "schema_version": 1,
            "commit": commit(),
            "gpus": [torch.cuda.get_device_name(index) for index in range(gpus)],
            "torch": torch.__version__,
            "seconds": round(time.time() - self.start),
            **{kind: len(names) for kind, names in of.items()},
            "failed_tests": of["failed"],
            "skipped_tests": of["skipped"],
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f"gpu-tests-{gpus}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")


def commit() -> str:
    """The commit under test (``MEGAGEN_COMMIT`` where there is no git), "+changes" if the tree differs."""
    if named := os.environ.get("MEGAGEN_COMMIT"):
        return named

    def git(*arguments: str) -> str:
        ran = subprocess.run(["git", *arguments], cwd=HERE.parents[1], capture_output=True, text=True)
        return ran.stdout.strip() if ran.returncode == 0 else ""

    head = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--", "megagen", "templates", "tests")
    return f"{head or 'unknown'}{'+changes' if changed else ''}"


def pytest_configure(config: pytest.Config) -> None:
    if directory := config.getoption("--gpu-results", default=None):
        config.pluginmanager.register(Results(Path(directory)))
