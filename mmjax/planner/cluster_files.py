"""Files that start a run on a cluster: a Slurm batch file and a Kubernetes JobSet. Pure text, nothing is submitted.

Every node has one process with all devices of the node: under Slurm a task, on Kubernetes a pod; the pods meet at the
stable name of the first pod. Under Slurm every device may have a task instead, which sees all devices of its node and
takes the device with its local number: JAX reads Slurm's environment like this. Ranks fill one node after the other, so
that the ranks of a tp group, which are neighbours, stay on one node.

A run on several kinds of device is a heterogeneous job of Slurm, and a JobSet with a replicated job for each kind. The
ranks of a kind must then fill its nodes. Processes are numbered from one kind to the next.

Both schedulers send SIGTERM early enough for a checkpoint, and both files restart a run that has crashed.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from mmjax.configurable import ConfigError, positive, require
from mmjax.flags import REFUSED
from mmjax.mesh.process_group import NAMES, variable
from mmjax.restarts import COUNTED, FINAL, MOST, run_dir_of
from mmjax.sigterm import GRACE

MARGIN = 30
"""Seconds after a run's own time limit until a scheduler kills processes that SIGTERM has not ended."""
PORT = 9876
"""The port of process 0, where pods meet."""
KIND_LABEL = "mmjax/accelerator"
"""The label of Kubernetes nodes that names their kind of device, where a run is on several kinds."""
_POD, _INDEX = "node", "MMJAX_NODE_OF_KIND"
_LONGEST = 40
"""The most letters of a job's name: a pod's name has at most 63, and adds numbers to the job's name."""
_STRAGGLE = 60
"""Seconds that Slurm gives the other tasks when one has ended; they end by themselves, each with its own status."""
_SRUN = f"--cpu-bind=none --kill-on-bad-exit=0 --wait={_STRAGGLE}"
"""Options of every step. If Slurm killed the other tasks, their status would hide the status of the first to end."""
NODE, DEVICE = "node", "device"
PROCESSES_PER = (NODE, DEVICE)
"""What has a process: a node, for all of its devices, or each device."""
_SLURM, _DNS = r"[^A-Za-z0-9_.-]+", r"[^a-z0-9]+"


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A run on a cluster.

    Attributes:
      name: name of the job; characters that a scheduler refuses become dashes.
      devices: number of devices that the run uses; they fill one node after the other.
      per_node: devices of a node.
      command: the command of every process, such as the result of ``train_command``.
      kind: kind of the devices if a run is on several kinds, with a job for each; else empty.
      grace: most seconds that a process takes to end after SIGTERM, ``Checkpoint.grace_seconds``.
      process_per: "node" or, under Slurm alone and with devices of one kind, "device": what has a process.

    Raises:
      ConfigError: a number is below 1, or there is no command.
    """

    name: str
    devices: int
    per_node: int
    command: tuple[str, ...]
    kind: str = ""
    grace: float = GRACE
    process_per: str = NODE

    def __post_init__(self) -> None:
        positive("devices", self.devices, 8)
        positive("devices of a node", self.per_node, 8)
        require(bool(self.command), "command", self.command, "give one, such as ('python', '-m', 'mmjax.train')")

    @property
    def nodes(self) -> int:
        """Number of nodes that the devices need; the last one may have devices to spare."""
        return -(-self.devices // self.per_node)

    @property
    def notice(self) -> int:
        """Seconds between SIGTERM and SIGKILL."""
        return math.ceil(self.grace) + MARGIN

    @property
    def gpus(self) -> str:
        """Devices in use on a node in Slurm's notation: "8", or "h100:8" where the kind has a name."""
        return f"{self.kind}:{self.on_node}" if self.kind else str(self.on_node)

    @property
    def on_node(self) -> int:
        """Devices in use on the first node: all of them where there are several nodes."""
        return min(self.devices, self.per_node)


def train_command(
    gin_files: Sequence[str], bindings: Sequence[str] = (), run_dir: str = "", *, allow_code: bool = False
) -> tuple[str, ...]:
    """The command that trains a configuration, word by word: ("python", "-m", "mmjax.train", "--gin_file=F", ...).

    The flags are ``--gin_file=F`` for each file, ``--gin.KEY=VALUE`` for each binding, ``--allow_code`` and
    ``--run_dir=DIR``, in this order.

    Args:
      gin_files: paths, in the order in which they are loaded.
      bindings: settings that override the files', such as "vision/Layout.tp=2".
      run_dir: value of ``--run_dir``; "" leaves the flag out.
      allow_code: whether the command has ``--allow_code``: settings may then name code of one's own, which is run.
    """
    flags = [*(f"--gin_file={file}" for file in gin_files), *(f"--gin.{binding}" for binding in bindings)]
    options = [*(["--allow_code"] if allow_code else []), *([f"--run_dir={run_dir}"] if run_dir else [])]
    return ("python", "-m", "mmjax.train", *flags, *options)


def _starts(jobs: Sequence[ClusterJob]) -> list[int]:
    """The number of processes before the job of each of several kinds, and last the number of all processes.

    Raises:
      ConfigError: the ranks of a kind do not fill its nodes although another kind follows.
    """
    for job in jobs[:-1]:
        if job.devices % job.on_node:
            full = f"{job.kind}:{job.devices // job.on_node * job.on_node}"
            raise ConfigError(
                f"--devices: {job.devices} {job.kind} do not fill nodes of {job.per_node}, after which the ranks of "
                f"the next kind begin; give whole nodes, such as {full}, or leave --slurm and --jobset out"
            )
    return [sum(job.nodes for job in jobs[:at]) for at in range(len(jobs) + 1)]


def slurm_file(*jobs: ClusterJob) -> str:
    """The text of a Slurm batch file.

    It is submitted in a folder that all nodes share; relative paths of the command start there.

    jobs: one, or one for each kind of device, in the order of ranks, each with its `kind`, such as
      `ClusterJob(name="train", devices=16, per_node=8, command=train_command(["run.gin"]))`. The name and the command
      are those of the first.

    Raises:
      ConfigError: the ranks of a kind do not fill its nodes although another kind follows.
    """
    job, head = jobs[0], _slurm_head(jobs[0])
    if len(jobs) > 1 or job.process_per == NODE:
        return head + _task_for_each_node(jobs)
    return f"""\
{head}\
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks={job.devices}
#SBATCH --ntasks-per-node={job.on_node}
#SBATCH --gpus-per-node={job.gpus}
#SBATCH --exclusive
#SBATCH --mem=0

# A task for each device: it sees all of its node's and takes the one of its number there. Tasks fill node after node,
# and share its cores. When one ends badly all do, and the same file continues from the last checkpoint.
train() {{
srun --distribution=plane={job.on_node} {_SRUN} {shlex.join(job.command)}
}}

{_restarting(job.command)}"""


def _slurm_head(job: ClusterJob) -> str:
    """The options of a job. When Slurm requeues the job, it continues its output file."""
    return f"""\
#!/bin/bash
#SBATCH --job-name={_label(job.name, _SLURM)}
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@{job.notice}
"""


def _restarting(command: Sequence[str]) -> str:
    """Lines of bash that call ``train`` until it succeeds or must not be restarted, as ``Restarts`` decides."""
    run_dir = run_dir_of(command)
    files = " ".join(shlex.quote(str(run_dir / name)) for name in COUNTED) if run_dir else "/dev/null"
    final = "|".join(str(status) for status in FINAL if status)
    return f"""\
# After a crash the run starts again, until {MOST} restarts in a row have brought no newer checkpoint and no further
# step. A refused configuration (status {REFUSED}) is not started again, nor what Ctrl-C or SIGTERM has ended.
progress() {{ cat -- {files} 2>/dev/null | wc -l; }}
best=$(progress) vain=0 stopped=
trap 'stopped=1' TERM INT
until train; do
  status=$?
  case $status in {final}) exit $status ;; esac
  [ -z "$stopped" ] || exit $status
  now=$(progress)
  [ "$now" -le "$best" ] || {{ best=$now; vain=0; }}
  if [ "$vain" -ge {MOST} ]; then
    echo "given up: {MOST} restarts have brought no newer checkpoint and no further step" >&2
    exit $status
  fi
  vain=$((vain + 1))
  echo "starting again, restart $vain of {MOST} without progress" >&2
  sleep 1
done
"""


def _task_for_each_node(jobs: Sequence[ClusterJob]) -> str:
    *_, processes = _starts(jobs)
    groups = [f"--het-group={group} " for group in range(len(jobs))] if len(jobs) > 1 else [""]
    parts = "#SBATCH hetjob\n".join(
        f"#SBATCH --nodes={job.nodes}\n#SBATCH --ntasks-per-node=1\n"
        f"#SBATCH --gpus-per-node={job.gpus}\n#SBATCH --exclusive\n#SBATCH --mem=0\n"
        for job in jobs
    )
    # For an option that a component lacks, srun may use that of the first component; so each component has all.
    steps = " : \\\n".join(
        f"  {group}--nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1 "
        f'--gpus-per-node={job.gpus} \\\n  {_SRUN} "${{run[@]}}"'
        for group, job in zip(groups, jobs, strict=True)
    )
    numbered = f'export {variable(NAMES[2])}=$SLURM_PROCID; exec "$@"'
    return f"""\
{parts}
# A task for each node, which has all of its devices. Slurm numbers the tasks in the order above, and this file runs on
# the first node, where task 0 is. JAX's own reading of Slurm gives a task one device, so tasks are told where they
# meet, how many they are and which each is. When one ends badly all do, and the same file continues from the last
# checkpoint.
export {variable(NAMES[0])}="$(hostname):{PORT}" {variable(NAMES[1])}={processes}
run=(bash -c {shlex.quote(numbered)} task {shlex.join(jobs[0].command)})
train() {{
srun \\
{steps}
}}

{_restarting(jobs[0].command)}"""


def jobset_file(
    *jobs: ClusterJob, image: str = "mmjax:latest", claim: str = "mmjax", resource: str = "nvidia.com/gpu"
) -> str:
    """The YAML text of a JobSet (jobset.x-k8s.io/v1alpha2) with a pod for each node.

    Args:
      jobs: one, or one for each kind of device, in the order of ranks, such as
        `ClusterJob(name="train", devices=16, per_node=8, command=train_command(["run.gin"]))`; a kind's pods are on
        nodes whose label `KIND_LABEL` has its name. The JobSet has the name of the first.
      image: an image with Python and mmjax.
      claim: a PersistentVolumeClaim for configurations, data and run directories, which all pods see as /shared; the
        command runs there.
      resource: Kubernetes' name of a node's devices.

    Raises:
      ConfigError: the ranks of a kind do not fill its nodes although another kind follows.
    """
    name, starts = _label(jobs[0].name.lower(), _DNS), _starts(jobs)
    address = f"{name}-{jobs[0].kind or _POD}-0-0.{name}:{PORT}"
    pods = "".join(
        _replicated_job(
            job, first=start, processes=starts[-1], address=address, image=image, claim=claim, resource=resource
        )
        for job, start in zip(jobs, starts, strict=False)
    )
    return f"""\
# A pod for each node, whose one process has all of its devices. The pods meet at the first one's name.
# When one ends badly all start again, from the last checkpoint; but not where the configuration is refused.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {_text(name)}
spec:
  network:
    enableDNSHostnames: true
    subdomain: {_text(name)}
  failurePolicy:
    maxRestarts: {MOST}
    rules:
    - name: refused
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
{pods}"""


def _replicated_job(
    job: ClusterJob, *, first: int, processes: int, address: str, image: str, claim: str, resource: str
) -> str:
    """The replicated job of one kind of device; its processes are numbered from `first`, process 0 is at `address`."""
    coordinator, count, index = map(variable, NAMES)
    command, nodes = job.command, ""
    if job.kind:
        # Kubernetes numbers the pods of each kind from 0.
        numbered = f'export {index}=$(({first} + {_INDEX})); exec "$@"'
        command, index = ("sh", "-c", numbered, "pod", *job.command), _INDEX
        nodes = f"            nodeSelector: {{{_text(KIND_LABEL)}: {_text(job.kind)}}}\n"
    return f"""\
  - name: {job.kind or _POD}
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        completions: {job.nodes}
        parallelism: {job.nodes}
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes: {{operator: In, values: [{REFUSED}]}}
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: {job.notice}
{nodes}\
            containers:
            - name: mmjax
              image: {_text(image)}
              workingDir: /shared
              command: [{", ".join(_text(word.replace("$", "$$")) for word in command)}]
              env:
              - name: {coordinator}
                value: {_text(address)}
              - name: {count}
                value: "{processes}"
              - name: {index}
                valueFrom:
                  fieldRef:
                    fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
              ports:
              - containerPort: {PORT}
              resources:
                limits:
                  {_text(resource)}: {job.on_node}
              volumeMounts:
              - {{name: shared, mountPath: /shared}}
              - {{name: memory, mountPath: /dev/shm}}
            volumes:
            - name: shared
              persistentVolumeClaim:
                claimName: {_text(claim)}
            - name: memory
              emptyDir: {{medium: Memory}}
"""


def _text(value: str) -> str:
    """A YAML string: a JSON string, but with one escape for characters that JSON escapes as two."""
    return re.sub(r"[^ -~]", lambda match: f"\\U{ord(match[0]):08x}", json.dumps(value, ensure_ascii=False))


def _label(name: str, illegal: str) -> str:
    """A name with a dash for each match of `illegal`; it starts with a letter and does not end with a dash."""
    label = re.sub(illegal, "-", name)[:_LONGEST].strip("-._")
    return label if label[:1].isalpha() else f"mmjax-{label}".strip("-")
