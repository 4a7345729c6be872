"""The tests with processes, signals, sockets or threads, and how they are run many times on a busy machine:

    python tests/races.py 20

prints a line for each file with how often its tests passed and failed. `make test-races N=20` is the same.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parent
BUSY = 4  # processes beside them
# File → which of its tests (a regular expression of their names; empty: all). conftest.py marks them `races`.
RACES = {
    "distributed/test_cache_build.py": "",
    "distributed/test_kd_loss_dtensor.py": "",
    "distributed/test_vocabulary_slices.py": "",
    "e2e/test_cache_command.py": "told_to_stop",
    "e2e/test_cache_kill.py": "",
    "e2e/test_commands.py": "reader_that_leaves",
    "e2e/test_kill.py": "",
    "e2e/test_on_policy.py": "killed|signal",
    "e2e/test_on_policy_served.py": "",
    "e2e/test_remote_kill.py": "",
    "e2e/test_resume.py": "signal|interrupt_does_not_wait",
    "e2e/test_trouble.py": "signal|clock",
    "unit/config/test_compatibility.py": "takes_a_step",
    "unit/training/test_devices.py": "waits_once",
    "unit/cache/test_cache_store.py": "threads|processes|while_another",
    "unit/teachers/test_stored_teacher.py": "threads",
    "unit/serving/test_http.py": "",
    "unit/evals/test_eval_command.py": "server|served",
    "unit/evals/test_fidelity.py": "server|served|fails|failure|loses",
    "unit/data/test_loader.py": "prefetched",
    "unit/evals/test_reference.py": "server",
    "unit/teachers/test_remote_teacher.py": "",
    "unit/serving/test_openai.py": "",
    "unit/teachers/test_rollout_teachers.py": "",
    "unit/serving/test_serve.py": "",
    "unit/serving/test_serve_clients.py": "",
    "unit/rollouts/test_vllm_away.py": "",
}
# What a test file that is in the table, and only such a one, reaches for
RACING = re.compile(
    r"^import (?:signal|socket|threading|multiprocessing)|^from (?:served|threaded|processes\w*|concurrent\.\w+) |Popen\(",
    re.MULTILINE,
)


def is_race(path: Path, name: str) -> bool:
    wanted = RACES.get(path.relative_to(TESTS).as_posix()) if path.is_relative_to(TESTS) else None
    return wanted is not None and re.search(wanted, name) is not None


def main(rounds: int, *options: str) -> int:
    """Give 1 when anything failed."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    passed, failed, begin = Counter[str](), Counter[str](), time.monotonic()
    try:
        for number in range(1, rounds + 1):
            for file, name, well in _round(*options):
                (passed if well else failed)[file] += 1
                if not well:
                    print(f"round {number}: {file} {name} failed", flush=True)
            spent = time.monotonic() - begin
            print(f"round {number} of {rounds}: {sum(failed.values())} failed so far, {spent:.0f} s", flush=True)
    finally:
        for process in busy:
            process.kill()
    for file in sorted(passed | failed):
        print(f"{file}: {passed[file]} passed, {failed[file]} failed")
    return 1 if failed or not passed else 0


def _round(*options: str) -> list[tuple[str, str, bool]]:
    """File, test, and whether it passed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.xml"
        line = [sys.executable, "-m", "pytest", "-q", "-m", "races and not slow and not vllm", f"--junitxml={out}"]
        files = [str(TESTS / name) for name in RACES]
        log = subprocess.run(
            [*line, "-o", "junit_family=xunit1", *options, *files],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
        )
        if not out.exists():
            raise SystemExit(log.stdout + log.stderr)
        cases = [case for case in ElementTree.parse(out).iter("testcase") if case.find("skipped") is None]
        found = [
            (c.get("file", "?"), c.get("name", "?"), c.find("failure") is None and c.find("error") is None)
            for c in cases
        ]
        if not all(well for _, _, well in found):
            print(log.stdout[-6000:])
        return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if sys.argv[1:] else 20, *sys.argv[2:]))
