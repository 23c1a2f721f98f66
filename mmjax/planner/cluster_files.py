"""Files that start a run on a cluster: a Slurm batch file and a Kubernetes JobSet. Pure text, nothing is submitted.

Under Slurm every device has a task, which sees all devices of its node and takes the one of its number there: that is
how JAX reads Slurm's environment. On Kubernetes every node has a pod, whose one process has all of the node's devices;
the pods meet at the first one's stable name. In both, ranks fill one node after the other, so that tp groups, which are
neighbours, stay inside nodes.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from mmjax.configurable import positive, require
from mmjax.mesh.processes import NAMES, variable

PORT = 9876
"""Of process 0, where pods meet."""
_POD = "node"
_LONGEST = 40
"""Letters of a job's name: those of a pod are at most 63, with its own numbers behind the job's."""
_SLURM, _DNS = r"[^A-Za-z0-9_.-]+", r"[^a-z0-9]+"


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A run on a cluster.

    Attributes:
      name: of the job; characters that a scheduler does not take become a dash.
      devices: that the run uses, in the order of nodes.
      per_node: devices of a node.
      command: what every process runs, such as ``train_command``'s.

    Raises:
      ConfigError: a number is below 1, or there is no command.
    """

    name: str
    devices: int
    per_node: int
    command: tuple[str, ...]

    def __post_init__(self) -> None:
        positive("devices", self.devices, 8)
        positive("devices of a node", self.per_node, 8)
        require(bool(self.command), "command", self.command, "give one, such as ('python', '-m', 'mmjax.train')")

    @property
    def nodes(self) -> int:
        """As many as it takes; the last one may have devices to spare."""
        return -(-self.devices // self.per_node)

    @property
    def on_node(self) -> int:
        """Devices that are used of the first node: all, where there are several nodes."""
        return min(self.devices, self.per_node)


def train_command(gin_files: Sequence[str], bindings: Sequence[str] = (), run_dir: str = "") -> tuple[str, ...]:
    """The command that trains a configuration: gin files in order, then bindings (``vision/Layout.tp=2``)."""
    flags = [*(f"--gin_file={file}" for file in gin_files), *(f"--gin.{binding}" for binding in bindings)]
    return ("python", "-m", "mmjax.train", *flags, *([f"--run_dir={run_dir}"] if run_dir else []))


def slurm_file(job: ClusterJob) -> str:
    """The text of a batch file, to submit where the command's paths are; the folder is one that all nodes see."""
    return f"""\
#!/bin/bash
#SBATCH --job-name={_label(job.name, _SLURM)}
#SBATCH --output=%x-%j.out
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks={job.devices}
#SBATCH --ntasks-per-node={job.on_node}
#SBATCH --gpus-per-node={job.on_node}
#SBATCH --exclusive
#SBATCH --mem=0

# A task for each device: it sees all of its node's and takes the one of its number there. Tasks fill node after node,
# and share its cores. When one ends badly all do, and the same file continues from the last checkpoint.
srun --distribution=plane={job.on_node} --cpu-bind=none --kill-on-bad-exit=1 {shlex.join(job.command)}
"""


def jobset_file(
    job: ClusterJob, *, image: str = "mmjax:latest", claim: str = "mmjax", resource: str = "nvidia.com/gpu"
) -> str:
    """The text of a JobSet (jobset.x-k8s.io/v1alpha2) of a pod for each node.

    Args:
      job: the run.
      image: with Python and mmjax.
      claim: a PersistentVolumeClaim for configurations, data and run directories, which all pods see as /shared; the
        command runs there.
      resource: what a node's devices are called.
    """
    name, coordinator, count, index = _label(job.name.lower(), _DNS), *(variable(one) for one in NAMES)
    return f"""\
# A pod for each node, whose one process has all of its devices. The pods meet at the first one's name.
# When one ends badly all start again, from the last checkpoint.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {_text(name)}
spec:
  network:
    enableDNSHostnames: true
    subdomain: {_text(name)}
  failurePolicy:
    maxRestarts: 3
  replicatedJobs:
  - name: {_POD}
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        completions: {job.nodes}
        parallelism: {job.nodes}
        backoffLimit: 0
        template:
          spec:
            restartPolicy: Never
            containers:
            - name: mmjax
              image: {_text(image)}
              workingDir: /shared
              command: [{", ".join(_text(word.replace("$", "$$")) for word in job.command)}]
              env:
              - name: {coordinator}
                value: {_text(f"{name}-{_POD}-0-0.{name}:{PORT}")}
              - name: {count}
                value: "{job.nodes}"
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
    """A YAML string: JSON's, but for characters that JSON writes as two."""
    return re.sub(r"[^ -~]", lambda found: f"\\U{ord(found[0]):08x}", json.dumps(value, ensure_ascii=False))


def _label(name: str, other: str) -> str:
    """A name without the characters that match `other`; it starts with a letter and ends with none of its dashes."""
    label = re.sub(other, "-", name)[:_LONGEST].strip("-._")
    return label if label[:1].isalpha() else f"mmjax-{label}".strip("-")
