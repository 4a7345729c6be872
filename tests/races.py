"""The tests with processes, signals, sockets or threads, and how they are run many times on a busy machine:

    python tests/races.py 20

prints a line for each file with how often its tests passed and failed. `make test-races N=20` is the same. Five rounds go on
at once, so that each has four busy processes beside it; when there are fewer rounds, busy loops are the others.
benchmarks/results/reliability.json keeps the figures of 20 rounds or more, and docs/reliability.md shows them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parent
BUSY = 4  # processes beside each round: other rounds, or loops
ENOUGH = 20  # rounds whose figures are kept
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # it ends with whoever started it
# File → which of its tests (a regular expression of their names; empty: all): those whose outcome may depend on what another
# process, a client, a thread or a signal does meanwhile, and when. None: it only asks a server or other ranks, waits for the
# answer and compares numbers. conftest.py marks them `races`.
RACES = {
    "distributed/test_cache_build.py": "processes|fill_one",
    "distributed/test_channel.py": "",
    "distributed/test_equality.py": None,
    "distributed/test_kd_loss_dtensor.py": None,
    "distributed/test_mesh.py": "pool_goes_on|dead_process",
    "distributed/test_stored_on_ranks.py": None,
    "distributed/test_vocabulary_slices.py": "refused_on_every_rank",
    "distributed/test_watch.py": "",
    "e2e/test_async_save.py": "",
    "e2e/test_cache_command.py": "told_to_stop",
    "e2e/test_cache_kill.py": "",
    "e2e/test_commands.py": "reader_that_leaves",
    "e2e/test_doctor.py": None,
    "e2e/test_hosts.py": "",
    "e2e/test_kill.py": "",
    "e2e/test_killed_ranks.py": "",
    "e2e/test_launch.py": "time_is_over",
    "e2e/test_on_policy.py": "killed|signal",
    "e2e/test_on_policy_served.py": "",
    "e2e/test_remote_kill.py": "",
    "e2e/test_resume.py": "signal|interrupt_does_not_wait",
    "e2e/test_trouble.py": "signal|clock",
    "unit/config/test_compatibility.py": None,
    "unit/training/test_devices.py": None,
    "unit/training/test_transfer.py": None,
    "unit/losses/test_kernels.py": None,
    "unit/cache/test_cache_store.py": "threads|processes|while_another",
    "unit/teachers/test_stored_teacher.py": "threads",
    "unit/serving/test_http.py": "close_ends|hangs|other_threads|now_and_then|waited",
    "unit/evals/test_eval_command.py": None,
    "unit/evals/test_fidelity.py": "server|fails|failure|loses",
    "unit/data/test_loader.py": "prefetched",
    "unit/evals/test_reference.py": "server",
    "unit/teachers/test_remote_teacher.py": "ahead_of_the_step|at_once|while_the_present|threads|ctrl_c",
    "unit/serving/test_openai.py": "was_away",
    "unit/teachers/test_rollout_teachers.py": None,
    "unit/serving/test_serve.py": (
        "concurrent|sigterm|taken|hold_up|when_the_server_ends|let_go|cancelled|waited_out|patience|nobody|run_that_ends|"
        "lives_on"
    ),
    "unit/serving/test_serve_clients.py": (
        "do_not_read|unfinished|idle|leaves|made_anew|keeps?_nobody_out|for_later|without_room|let_go|make_room"
    ),
    "unit/rollouts/test_vllm_away.py": "nobody|under_way",
}
# What a test file that is in the table, and only such a one, reaches for
RACING = re.compile(
    r"^import (?:signal|socket|threading|multiprocessing)|^from (?:served|threaded|warm|processes\w*|concurrent\.\w+) |Popen\(",
    re.MULTILINE,
)


def is_race(path: Path, name: str) -> bool:
    wanted = RACES.get(path.relative_to(TESTS).as_posix()) if path.is_relative_to(TESTS) else None
    return wanted is not None and re.search(wanted, name.split("[")[0]) is not None


def main(rounds: int, *options: str) -> int:
    """Give 1 when anything failed."""
    passed, failed, begin, seconds = Counter[str](), Counter[str](), time.monotonic(), 0.0
    loops: list[subprocess.Popen[bytes]] = []
    try:
        pool = ThreadPoolExecutor(BUSY + 1)
        under_way = [pool.submit(_round, *options) for _ in range(rounds)]
        _fill(loops, rounds)
        for number, one in enumerate(as_completed(under_way), 1):
            _fill(loops, rounds - number)
            for file, name, well in one.result():
                (passed if well else failed)[file] += 1
                if not well:
                    print(f"{file} {name} failed", flush=True)
            seconds = time.monotonic() - begin
            print(f"{number} of {rounds} rounds: {failed.total()} failed so far, {seconds:.0f} s", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C too, which the rounds under way have heard themselves
        for loop in loops:
            loop.kill()
    for file in sorted(passed | failed):
        print(f"{file}: {passed[file]} passed, {failed[file]} failed")
    if rounds >= ENOUGH and passed and not failed:
        _keep(rounds, passed, round(seconds))
    return 1 if failed or not passed else 0


def _fill(loops: list[subprocess.Popen[bytes]], left: int) -> None:
    """Busy loops in the place of rounds, where so few of them are left."""
    while len(loops) < min(BUSY, BUSY + 1 - left):
        loops.append(subprocess.Popen([sys.executable, "-c", LOOP]))


def _keep(rounds: int, passed: Counter[str], seconds: int) -> None:
    sys.path.insert(0, str(TESTS / "hard"))
    from campaign import keep

    keep("races", {"cases": rounds, "outcomes": {"passed": passed.total()}, "files": len(passed), "seconds": seconds})
    subprocess.run([sys.executable, TESTS / "hard" / "figures.py"], check=True)


def _round(*options: str) -> list[tuple[str, str, bool]]:
    """File, test, and whether it passed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.xml"
        line = [sys.executable, "-m", "pytest", "-q", "-m", "races and not slow and not vllm", f"--junitxml={out}"]
        files = [str(TESTS / name) for name, wanted in RACES.items() if wanted is not None]
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
