"""`potstill launch`: what to give a cluster so that a recipe trains on many hosts. It is printed, and nothing is started."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from potstill.config.recipe import load_recipe
from potstill.errors import PotstillError
from potstill.parallel.mesh import checked_sizes
from potstill.recipe_text.plain_yaml import write_yaml

Scheduler = Literal["slurm", "torchrun", "kubernetes"]
PORT = 29400  # of the store at which the hosts meet
NOTICE = 300  # seconds before its end in which a run is asked to stop: a step, and a checkpoint
USERS_ERROR = 64  # what a pod ends with where another one would fail alike
# Workers that share the agent's store meet the addresses of dead ones in it, and every restart fails.
SETTINGS = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


@dataclass(frozen=True)
class Launch:
    """A command of training and where it is to run."""

    name: str  # of the job: letters, digits and hyphens
    run: str  # the run's folder
    command: str  # what every process runs, quoted for a shell
    nodes: int
    gpus: int  # of a node: as many processes
    restarts: int
    time: str | None  # as SLURM has it: [days-]hours:minutes:seconds
    image: str
    volume: str | None  # claim:folder

    def torchrun(self, endpoint: str, meeting: str, is_first: str) -> str:
        """The agent of one host. It is told whether it holds the store: names of hosts do not always tell."""
        where = f"--nnodes {self.nodes} --nproc-per-node {self.gpus} --max-restarts {self.restarts}"
        if self.nodes == 1:
            return f"torchrun --standalone {where} {self.command}"
        meet = f"--rdzv-backend c10d --rdzv-endpoint {endpoint} --rdzv-id {meeting}"
        return f"torchrun {where} {meet} --rdzv-conf is_host={is_first} {self.command}"

    def threads(self, cores: str) -> str:
        return f"OMP_NUM_THREADS=$((({cores} + {self.gpus - 1}) / {self.gpus}))"


def launch(
    recipe: Path,
    overrides: Sequence[str],
    scheduler: Scheduler,
    *,
    nodes: int,
    gpus: int,
    time: str | None,
    restarts: int,
    image: str | None,
    volume: str | None,
) -> str:
    """The text to hand to a scheduler. The recipe is read, so that what is wrong with it is said before a queue is."""
    checked = load_recipe(recipe, overrides)
    checked_sizes(checked.parallel, nodes * gpus, checked.train.batch_size)
    _check(scheduler, time=time, image=image, volume=volume)
    name = re.sub(r"[^a-z0-9]+", "-", Path(checked.run).name.lower()).strip("-")[:40].strip("-") or "run"
    command = shlex.join(["-m", "potstill", "train", str(recipe), *overrides])
    job = Launch(f"potstill-{name}", checked.run, command, nodes, gpus, restarts, time, image or "", volume)
    return PRINTED[scheduler](job)


def _check(scheduler: Scheduler, **given: str | None) -> None:
    if scheduler == "kubernetes" and not given["image"]:
        raise PotstillError(
            "--for kubernetes runs in a container: name an image in which potstill is installed, with --image"
        )
    takes = {"slurm": ("time",), "torchrun": (), "kubernetes": ("time", "image", "volume")}[scheduler]
    for option, value in given.items():
        if value is not None and option not in takes:
            raise PotstillError(f"--{option} means nothing with --for {scheduler}: leave it out")
    if given["time"] is not None:
        seconds(given["time"])
    if given["volume"] is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*:/[^:]*", given["volume"]):
        raise PotstillError(f"--volume: {given['volume']} should be CLAIM:/FOLDER, a claim and where it is mounted")


def seconds(time: str) -> int:
    """Of a time as SLURM has it."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", time)
    if found is None:
        raise PotstillError(
            f"--time: {time} should be hours:minutes:seconds, such as 24:00:00, or with days, 2-00:00:00"
        )
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def lines_of_hosts(job: Launch) -> str:
    """One line a host; each can be pasted there, where the recipe and its data are."""
    endpoint = f'"${{FIRST_HOST:?set it to a name or address of the first host that all hosts reach}}:{PORT}"'
    settings = f"{SETTINGS} {job.threads('$(nproc)')}"
    told = []
    for host in range(job.nodes):
        if job.nodes > 1:
            told.append(f"# host {host + 1} of {job.nodes}")
        told.append(f"{settings} {job.torchrun(endpoint, job.name, str(int(host == 0)))}")
    return "\n".join(told) + "\n"


SLURM = """\
#!/bin/bash
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={job.gpus}
#SBATCH --exclusive
{time}#SBATCH --signal=B:TERM@{notice}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Add what your cluster asks for (--partition, --account), and submit from where the recipe is, with potstill on the PATH.

run={run}
export {settings}
export {threads}
endpoint=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 10000))
export endpoint
reached() {{ readlink "$run/checkpoints/latest"; }}
before=$(reached)

# SLURM tells this shell {notice} seconds before the end; the file tells the run, which saves and ends with 0.
trap 'touch "$run/stop"' TERM

srun --kill-on-bad-exit=1 bash -c {agent} &
step=$!
code=143
while [ "$code" -gt 128 ] && kill -0 "$step" 2> /dev/null; do
    wait "$step" # the trap ends it early
    code=$?
done

# Not a mistake that the next job would find as well, and not a job that came no further.
if [ ! -e "$run/finished" ] && [ ! -e "$run/error.json" ] && [ "$(reached)" != "$before" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def slurm_script(job: Launch) -> str:
    agent = job.torchrun('"$endpoint"', '"$SLURM_JOB_ID"', "$((SLURM_NODEID == 0))")
    return SLURM.format(
        job=job,
        notice=NOTICE,
        time="" if job.time is None else f"#SBATCH --time={job.time}\n",
        run=shlex.quote(job.run),
        settings=SETTINGS,
        threads=job.threads("${SLURM_CPUS_ON_NODE:-1}"),
        agent=shlex.quote(f"exec {agent}"),
    )


def kubernetes_job(job: Launch) -> str:
    """An indexed Job, and a Service without an address of its own, by which its pods have names."""
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": job.nodes * (job.restarts + 1),  # where a pod is lost, the others may fail with it
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [USERS_ERROR]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": _pod(job)},
    }
    if job.time is not None:
        spec["activeDeadlineSeconds"] = seconds(job.time)
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # pods meet before any of them is ready
        "selector": {"batch.kubernetes.io/job-name": job.name},
        "ports": [{"name": "store", "port": PORT}],
    }
    metadata = {"name": job.name}
    parts = [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec},
    ]
    return "---\n".join(write_yaml(part) for part in parts)


def _pod(job: Launch) -> dict[str, Any]:
    """One host. It succeeds only with the run: one that was asked to stop is to be followed by another."""
    run = shlex.quote(job.run)
    agent = job.torchrun(f"{job.name}-0.{job.name}:{PORT}", job.name, "$((JOB_COMPLETION_INDEX == 0))")
    ended = f"[ -e {run}/finished ] && exit 0; [ -e {run}/error.json ] && exit {USERS_ERROR}; exit 1"
    asked = f"touch {run}/stop; while kill -0 1; do sleep 1; done"  # before a pod is taken away, the run may save
    container: dict[str, Any] = {
        "name": "train",
        "image": job.image,
        "command": ["bash", "-c", f"export {SETTINGS} {job.threads('$(nproc)')}; {agent}; {ended}"],
        "resources": {"limits": {"nvidia.com/gpu": job.gpus}},
        "lifecycle": {"preStop": {"exec": {"command": ["bash", "-c", asked]}}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if job.volume is not None:
        claim, folder = job.volume.split(":")
        container["workingDir"] = folder
        container["volumeMounts"].append({"name": "work", "mountPath": folder})
        volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": claim}})
    return {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": NOTICE,
        "containers": [container],
        "volumes": volumes,
    }


PRINTED = {"slurm": slurm_script, "torchrun": lines_of_hosts, "kubernetes": kubernetes_job}
