"""Two hosts, which are network namespaces with names of their own: one dies, and the link between them is cut."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes_torchrun import Torchrun, exported, step_reached
from tiny_runs import TinyRuns, metrics, steps_on_disk

from potstill.files import damage

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]  # minutes become many on a busy machine
TIMEOUT = 15  # train.timeout
# No dropout: what it draws depends on the number of ranks.
OPTIONS = ("train.steps=30", "checkpoint.every=3", f"train.timeout={TIMEOUT}", "student.config.attention_dropout=0.0")
NAMED = [
    "unshare",
    "--uts",
    "sh",
    "-c",
    'hostname "$0" && exec "$@"',
]  # the command's process is the one that is started


@dataclass(frozen=True)
class Host:
    space: str
    name: str
    link: str
    address: str

    def start(self, recipe: Path, run: Path, *options: str, meets_at: Host) -> Torchrun:
        meet = f"is_host={int(self == meets_at)},join_timeout=200,last_call_timeout=1"
        return Torchrun(
            recipe,
            run,
            *("--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "hosts"),
            *("--rdzv-endpoint", f"{meets_at.address}:29400", "--local-addr", self.address, "--rdzv-conf", meet),
            *options,
            before=["ip", "netns", "exec", self.space, *NAMED, self.name],
            name=self.name,
            environment={"GLOO_SOCKET_IFNAME": self.link},
        )

    def cut(self) -> None:
        _ip("-n", self.space, "link", "set", self.link, "down")

    def mend(self) -> None:
        _ip("-n", self.space, "link", "set", self.link, "up")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Ranks are numbered by addresses: those of the first come first."""
    mark = f"{os.getpid():x}"
    one, two = (Host(f"ps{n}-{mark}", f"host-{n}", f"ps{n}{mark}", f"10.77.0.{n}") for n in (1, 2))
    made = []
    try:
        try:
            for host in (one, two):
                _ip("netns", "add", host.space)
                made.append(host.space)
                _ip("-n", host.space, "link", "set", "lo", "up")
                subprocess.run(["ip", "netns", "exec", host.space, *NAMED, host.name, "true"], check=True)
            _ip("-n", one.space, "link", "add", one.link, "type", "veth", "peer", "name", two.link, "netns", two.space)
            for host in (one, two):
                _ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", host.link)
                host.mend()
        except (OSError, AssertionError, subprocess.CalledProcessError) as error:
            pytest.skip(f"two hosts cannot be made here, which takes root and network namespaces: {error}")
        yield one, two
    finally:
        for space in made:
            _ip("netns", "del", space)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_teacher: Path, tiny_text: Path) -> Path:
    """Four processes on one host."""
    runs = TinyRuns(tmp_path_factory.mktemp("whole"), tiny_teacher, tiny_text)
    run = runs.folder / "whole"
    with Torchrun(runs.file("whole", *OPTIONS), run, "--standalone", "--nproc-per-node", "4") as torchrun:
        code, said = torchrun.end()
    assert code == 0, said
    return run


def assert_ended_as(run: Path, undisturbed: Path) -> None:
    assert metrics(run) == metrics(undisturbed)
    assert exported(run) == exported(undisturbed)
    assert_nothing_is_left(run)


def assert_nothing_is_left(run: Path) -> None:
    assert steps_on_disk(run)[-1] == 30 and damage(run / "checkpoints" / "latest") is None
    assert not list(run.rglob(".unfinished-*"))
    assert (run / "finished").exists() and not (run / "error.json").exists()


def test_a_host_that_dies_and_comes_back(hosts: tuple[Host, Host], runs: TinyRuns, undisturbed: Path) -> None:
    one, two = hosts
    recipe, run = runs.file("run", *OPTIONS), runs.folder / "run"
    with one.start(recipe, run, "--nnodes", "2", meets_at=one) as first:
        with two.start(recipe, run, "--nnodes", "2", meets_at=one) as second:
            first.wait_for(lambda: step_reached(run) >= 5)
            old = first.ranks()
            assert (sorted(old), sorted(second.ranks())) == ([0, 1], [2, 3])
            second.kill()
        with two.start(recipe, run, "--nnodes", "2", meets_at=one) as second:
            first.wait_for(lambda: not {*old.values()} & {*first.ranks().values()})
            for agent in (first, second):
                code, said = agent.end()
                assert code == 0, said
    assert re.search(r"step \d+: (of )?.*rank [23] \(process \d+ on host-2\).* left", first.said()), first.said()
    assert_ended_as(run, undisturbed)


def test_a_link_that_is_cut_and_mended(hosts: tuple[Host, Host], runs: TinyRuns, undisturbed: Path) -> None:
    one, two = hosts
    recipe, run = runs.file("run", *OPTIONS), runs.folder / "run"
    with (
        one.start(recipe, run, "--nnodes", "2", meets_at=one) as first,
        two.start(recipe, run, "--nnodes", "2", meets_at=one) as second,
    ):
        first.wait_for(lambda: step_reached(run) >= 5)
        two.cut()
        first.wait_for(lambda: "error: step" in first.said())
        second.wait_for(lambda: "error: rank 2: step" in second.said() or "error: rank 3: step" in second.said())
        two.mend()
        for agent in (first, second):
            code, said = agent.end()
            assert code == 0, said
    assert re.search(
        rf"waited \d+ s \(train\.timeout is {TIMEOUT}\) for rank 2 \(process \d+ on host-2\)", first.said()
    )
    assert re.search(r"lost rank 0 \(process \d+ on host-1\), at which all ranks meet", second.said())
    assert_ended_as(run, undisturbed)


@pytest.mark.parametrize("cut_off", ["others", "first rank"])
def test_a_link_that_is_cut_for_good(cut_off: str, hosts: tuple[Host, Host], runs: TinyRuns, undisturbed: Path) -> None:
    """The host that the agents meet at goes on alone. The other's processes end, and what they had begun is not put in place:
    not even where the first rank was among them, which wrote the checkpoints."""
    stays, leaves = hosts if cut_off == "others" else reversed(hosts)
    recipe, run = runs.file("run", *OPTIONS), runs.folder / "run"
    with (
        stays.start(recipe, run, "--nnodes", "1:2", meets_at=stays) as there,
        leaves.start(recipe, run, "--nnodes", "1:2", meets_at=stays) as gone,
    ):
        there.wait_for(lambda: step_reached(run) >= 5)
        assert sorted(gone.ranks()) == ([2, 3] if cut_off == "others" else [0, 1])
        old, owner = {**there.ranks(), **gone.ranks()}, (run / ".owner").read_text()
        assert len(old) == 4
        leaves.cut()
        code, said = there.end()
        assert code == 0, said
        gone.wait_for(lambda: not gone.ranks())
        assert re.search(r"error: (rank \d: )?step \d+: ", gone.said()), gone.said()
        # Its agent waits for a store that does not answer: a scheduler would kill it.
    assert (run / ".owner").read_text() != owner
    assert_nothing_is_left(run)
    mine, its = metrics(run), metrics(undisturbed)
    assert [line["step"] for line in mine] == list(range(1, 31))
    assert mine[:3] == its[:3]  # of the checkpoint that it resumed at, at least
    assert max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(mine, its, strict=True)) < 1e-4
