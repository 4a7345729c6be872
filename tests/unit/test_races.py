"""The table of racing tests is complete."""

from __future__ import annotations

from races import RACES, RACING, TESTS, is_race

ELSEWHERE = ("hard", "with_vllm")  # campaigns of their own, and a real vLLM


def test_every_file_with_processes_signals_sockets_or_threads_is_in_the_table() -> None:
    found = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("test_*.py")
        if path.relative_to(TESTS).parts[0] not in ELSEWHERE and RACING.search(path.read_text(encoding="utf-8"))
    }
    assert found <= set(RACES), sorted(found - set(RACES))
    assert all((TESTS / name).exists() for name in RACES)


def test_some_of_a_file_or_all_of_it() -> None:
    assert is_race(TESTS / "e2e" / "test_kill.py", "test_anything")
    assert is_race(TESTS / "e2e" / "test_resume.py", "test_a_signal_saves_and_ends_the_run[started-0-1]")
    assert not is_race(TESTS / "e2e" / "test_resume.py", "test_more_steps_go_on_from_the_end")
    assert not is_race(TESTS / "unit" / "test_align.py", "test_anything")
