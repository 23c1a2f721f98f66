"""Files for clusters: read as the cluster reads them, they start the processes that mmjax expects, with its command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mmjax.config import load_config
from mmjax.config.flags import parse_flags
from mmjax.configurable import ConfigError
from mmjax.mesh.process_group import Processes, find_processes
from mmjax.planner.cluster_files import ClusterJob, jobset_file, slurm_file, train_command

CONFIG = str(Path(__file__).parents[2] / "configs" / "digits_vlm.gin")
ENDS = {"requeue": "", "open-mode": "append", "signal": "TERM@55"}
"""How a job is ended and put back into the queue: 25 s for a checkpoint, and 30 more."""
ODD = ("it's", 'two "words"', "$HOME", "$(hostname)", "$$(X)", "a\nb", "#no: comment", "ü", "`id`", "\\", "")


def job(
    *,
    devices: int = 20,
    per_node: int = 8,
    name: str = "mine",
    command: tuple[str, ...] = ("train",),
    process_per: str = "node",
) -> ClusterJob:
    return ClusterJob(name=name, devices=devices, per_node=per_node, command=command, process_per=process_per)


def options(text: str) -> dict[str, str]:
    """The options that sbatch reads: its comments before the first command."""
    head = text.partition("\ntrain() {")[0]
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", head, re.MULTILINE))


def started(text: str, folder: Path) -> list[str]:
    """The words that `srun` gets when bash runs a batch file."""
    file, fake = folder / "job.sh", folder / "srun"
    file.write_text(text)
    fake.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    fake.chmod(0o755)
    subprocess.run(["bash", "-n", str(file)], check=True)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": "/nowhere"}
    done = subprocess.run(["bash", str(file)], capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


def container(text: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A JobSet, its one Job and that one's container."""
    read = yaml.safe_load(text)
    (replicated,) = read["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    jobs = replicated["template"]["spec"]
    (main,) = jobs["template"]["spec"]["containers"]
    return read, jobs, main


def expanded(word: str) -> str:
    """A word of a command as Kubernetes gives it on: $(NAME) is replaced, and $$ is a dollar."""
    return re.sub(r"\$(\$|\(\w+\))", lambda match: "$" if match[1] == "$" else "replaced", word)


@pytest.mark.parametrize(
    ("devices", "per_node", "nodes", "on_node"),
    [(20, 8, 3, 8), (16, 8, 2, 8), (6, 8, 1, 6), (1, 8, 1, 1), (1296, 8, 162, 8), (3, 1, 3, 1)],
)
def test_slurm_starts_a_task_for_each_device(
    devices: int, per_node: int, nodes: int, on_node: int, tmp_path: Path
) -> None:
    text = slurm_file(job(devices=devices, per_node=per_node, process_per="device"))
    assert text.startswith("#!/bin/bash\n#SBATCH ")
    expected = {
        "nodes": str(nodes),
        "ntasks": str(devices),
        "ntasks-per-node": str(on_node),
        "exclusive": "",
        "mem": "0",
    }
    assert options(text) == {
        "job-name": "mine",
        "output": "%x-%j.out",
        "gpus-per-node": str(on_node),
        **expected,
        **ENDS,
    }
    arguments = [f"--distribution=plane={on_node}", "--cpu-bind=none", "--kill-on-bad-exit=0", "--wait=60"]
    assert started(text, tmp_path) == [*arguments, "train"]
    last = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-9]", "SLURM_NTASKS": options(text)["ntasks"]}
    process = find_processes({}, {**last, "SLURM_PROCID": str(devices - 1), "SLURM_LOCALID": "0"})
    assert process == (
        Processes(coordinator="", count=devices, index=devices - 1, launcher="slurm") if devices > 1 else None
    )


@pytest.mark.parametrize(("devices", "nodes", "on_node"), [(20, 3, 8), (16, 2, 8), (6, 1, 6), (1, 1, 1)])
def test_a_jobset_starts_a_pod_for_each_node(devices: int, nodes: int, on_node: int) -> None:
    read, jobs, main = container(jobset_file(job(devices=devices), image="here/mmjax:1", claim="disk"))
    assert (read["apiVersion"], read["kind"], read["metadata"]) == (
        "jobset.x-k8s.io/v1alpha2", "JobSet", {"name": "mine"},
    )  # fmt: skip
    assert read["spec"]["network"] == {"enableDNSHostnames": True, "subdomain": "mine"}
    refused = {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    assert read["spec"]["failurePolicy"] == {"maxRestarts": 3, "rules": [refused]}
    never = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
    assert jobs["podFailurePolicy"] == {"rules": [never]}
    assert jobs["template"]["spec"]["terminationGracePeriodSeconds"] == 55
    assert (jobs["completionMode"], jobs["completions"], jobs["parallelism"]) == ("Indexed", nodes, nodes)
    assert jobs["backoffLimit"] == 0 and jobs["template"]["spec"]["restartPolicy"] == "Never"
    assert (main["image"], main["workingDir"], main["command"]) == ("here/mmjax:1", "/shared", ["train"])
    assert main["resources"] == {"limits": {"nvidia.com/gpu": on_node}}
    volumes = {volume["name"]: volume for volume in jobs["template"]["spec"]["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in main["volumeMounts"]}
    assert mounts["/shared"]["persistentVolumeClaim"] == {"claimName": "disk"}
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    index = nodes - 1
    process = find_processes({}, environment(main, index))
    # Pods are called <JobSet>-<replicated job>-<its number>-<index>, below the subdomain.
    coordinator = "mine-node-0-0.mine:9876"
    assert process == (Processes(coordinator=coordinator, count=nodes, index=index) if nodes > 1 else None)
    assert main["ports"] == [{"containerPort": 9876}]


def environment(main: dict[str, Any], index: int) -> dict[str, str]:
    """The environment variables of the pod with that index."""
    environ = {}
    for entry in main["env"]:
        path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        assert ("value" in entry) or path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        environ[entry["name"]] = entry["value"] if "value" in entry else str(index)
    assert all(isinstance(value, str) for value in environ.values())  # Kubernetes takes no numbers here
    return environ


def test_odd_words_arrive_as_they_are(tmp_path: Path) -> None:
    assert started(slurm_file(job(command=ODD, process_per="device")), tmp_path)[4:] == list(ODD)
    assert started(slurm_file(job(command=ODD)), tmp_path)[-len(ODD) :] == list(ODD)
    _, _, main = container(jobset_file(job(command=ODD), image="a: b #c", claim='"'))
    assert [expanded(word) for word in main["command"]] == list(ODD)
    assert main["image"] == "a: b #c"


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=12), min_size=1, max_size=4))
def test_any_words_of_a_jobset(words: list[str]) -> None:
    _, _, main = container(jobset_file(job(command=tuple(words))))
    assert [expanded(word) for word in main["command"]] == words


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.text(max_size=80))
def test_any_name_becomes_a_legal_one(name: str) -> None:
    read, _, main = container(jobset_file(job(name=name)))
    label = read["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", label) and len(f"{label}-node-0-99999-abcde") <= 63
    assert read["spec"]["network"]["subdomain"] == label
    assert environment(main, 0)["MMJAX_COORDINATOR"] == f"{label}-node-0-0.{label}:9876"
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", options(slurm_file(job(name=name)))["job-name"])


def test_known_names() -> None:
    names = {"My plan_1.gin": ("My-plan_1.gin", "my-plan-1-gin"), "72B": ("mmjax-72B", "mmjax-72b"), "": ("mmjax",) * 2}
    for name, (slurm, dns) in names.items():
        assert options(slurm_file(job(name=name)))["job-name"] == slurm
        assert container(jobset_file(job(name=name)))[0]["metadata"]["name"] == dns


def test_the_command_is_one_that_train_reads() -> None:
    bindings = ["llm/Layout.layers=(2, 1)", "Data.task='digits'"]
    python, dash, module, *flags = train_command([CONFIG], bindings, "/shared/runs/a b")
    assert (python, dash, module, flags[-1]) == ("python", "-m", "mmjax.train", "--run_dir=/shared/runs/a b")
    read = parse_flags(flags[:-1], (), "python -m mmjax.train")
    config = load_config(read.gin_files, read.bindings)
    assert config.model["llm"].layout.layers == (2, 1) and tuple(read.gin_files) == (CONFIG,)
    assert train_command(["a.gin", "b.gin"])[3:] == ("--gin_file=a.gin", "--gin_file=b.gin")
    assert train_command(["a.gin"], allow_code=True)[3:] == ("--gin_file=a.gin", "--allow_code")


def test_longer_checkpoints_are_waited_for() -> None:
    job = ClusterJob(name="mine", devices=8, per_node=8, command=("train",), grace=90.5)
    assert options(slurm_file(job))["signal"] == "TERM@121"
    assert container(jobset_file(job))[1]["template"]["spec"]["terminationGracePeriodSeconds"] == 121


@pytest.mark.parametrize(
    ("ends", "starts"),
    [
        ([0], 1),
        ([2, 0], 1),  # refused
        ([130, 0], 1),  # ended by SIGTERM
        ([1, 75, 137, 3, 0], 4),  # given up after three restarts that bring nothing
        (["1+", 1, 1, "137+", 1, 1, 1, 0], 7),  # two of them leave a line: a checkpoint or a step
        (["3+", 0], 2),
    ],
)
def test_a_slurm_file_starts_a_crashed_run_again(ends: list[Any], starts: int, tmp_path: Path) -> None:
    """As `Restarts` decides for `mmjax.launch`."""
    run = tmp_path / "a run"
    run.mkdir()
    command = ("python", "-m", "mmjax.train", f"--run_dir={run}")
    (tmp_path / "job.sh").write_text(slurm_file(job(command=command)))
    (tmp_path / "ends").write_text("\n".join(map(str, ends)) + "\n")
    (tmp_path / "srun").write_text(
        f"#!/bin/bash\ncd {tmp_path}\nend=$(head -n1 ends)\nsed -i 1d ends\necho started\n"
        f'[[ $end != *+ ]] || echo row >> "a run/metrics.jsonl"\nexit ${{end%+}}\n'
    )
    (tmp_path / "sleep").write_text("#!/bin/sh\n")
    for program in ("srun", "sleep"):
        (tmp_path / program).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(tmp_path / "job.sh")], capture_output=True, text=True, env=environment, check=False
    )
    assert done.stdout == "started\n" * starts
    assert done.returncode == int(str(ends[starts - 1]).rstrip("+")), done.stderr
    assert ("given up: 3 restarts" in done.stderr) == (starts > 3)


def mixed(*kinds: tuple[str, int]) -> list[ClusterJob]:
    """A run whose every process says which one it is."""
    command = (sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))", *ODD)
    return [ClusterJob(name="mine", kind=kind, devices=count, per_node=8, command=command) for kind, count in kinds]


HET_SRUN = """
import itertools, os, subprocess, sys
# One step over the components of a heterogeneous job. The numbers of tasks go on from one component to the next;
# everything else that Slurm says is of a task's own component.
number, words = 0, sys.argv[1:]
for group in itertools.count():
    own, (_, *words) = words[: (words + [":"]).index(":")], [*words[(words + [":"]).index(":") :], ":"]
    flags = list(itertools.takewhile(lambda word: word.startswith("--"), own))
    asked = dict(flag[2:].split("=") for flag in flags)
    assert asked.get("het-group", "0") == str(group) and asked["ntasks-per-node"] == "1"
    assert asked["nodes"] == asked["ntasks"]
    assert asked["gpus-per-node"] == os.environ["GPUS"].split()[group] and asked["kill-on-bad-exit"] == "0"
    assert asked["wait"] == "60"
    for node in range(int(asked["nodes"])):
        said = dict(SLURM_JOB_ID="7", SLURM_STEP_NODELIST=f"kind{group}-[1-9]", SLURM_NTASKS=asked["ntasks"])
        said |= dict(SLURM_PROCID=str(number), SLURM_LOCALID="0")
        subprocess.run(own[len(flags) :], env={**os.environ, **said}, check=True)
        number += 1
    if not [word for word in words if word != ":"]:
        break
"""


KINDS = [(("h100", 64), ("l20", 12)), (("l20", 4), ("h100", 16), ("a40", 1)), (("", 20),), (("h100", 8),)]


@pytest.mark.parametrize("kinds", KINDS)
def test_a_slurm_job_with_a_task_for_each_node_numbers_processes_as_ranks_are(
    kinds: tuple[tuple[str, int], ...], tmp_path: Path
) -> None:
    text, nodes = slurm_file(*mixed(*kinds)), [-(-count // 8) for _, count in kinds]
    head, *tails = text.partition("\n\n")[0].split("#SBATCH hetjob\n")
    for part, (kind, count), of_kind in zip((head, *tails), kinds, nodes, strict=True):
        requested = options(part)
        assert requested.pop("job-name", "mine") == "mine" and requested.pop("output", "%x-%j.out") == "%x-%j.out"
        assert {name: requested.pop(name, value) for name, value in ENDS.items()} == ENDS
        each = {"gpus-per-node": f"{kind}:{min(8, count)}".lstrip(":"), "exclusive": "", "mem": "0"}
        assert requested == {"nodes": str(of_kind), "ntasks-per-node": "1", **each}
    file, fake = tmp_path / "job.sh", tmp_path / "srun"
    file.write_text(text)
    fake.write_text(f"#!{sys.executable}\n{HET_SRUN}")
    (tmp_path / "hostname").write_text("#!/bin/sh\necho first\n")
    for program in (fake, tmp_path / "hostname"):
        program.chmod(0o755)
    gpus = " ".join(f"{kind}:{min(8, count)}".lstrip(":") for kind, count in kinds)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GPUS": gpus}
    done = subprocess.run(["bash", str(file)], capture_output=True, text=True, check=True, env=environment)
    assert_numbered([json.loads(line) for line in done.stdout.splitlines()], "first:9876", nodes)


def assert_numbered(environs: list[dict[str, str]], coordinator: str, nodes: list[int]) -> None:
    """Every process finds the same coordinator and the number of its node, counted from one kind to the next."""
    processes = [find_processes({}, environ) for environ in environs]
    count = sum(nodes)
    expected = [Processes(coordinator=coordinator, count=count, index=index) for index in range(count)]
    assert processes == (expected if count > 1 else [None])


@pytest.mark.parametrize("kinds", [(("h100", 16), ("l20", 12)), (("l20", 4), ("h100", 16), ("a40", 1))])
def test_a_jobset_of_several_kinds_numbers_pods_as_ranks_are(kinds: tuple[tuple[str, int], ...]) -> None:
    read = yaml.safe_load(jobset_file(*mixed(*kinds)))
    environs, nodes = [], [-(-count // 8) for _, count in kinds]
    for replicated, (kind, count), of_kind in zip(read["spec"]["replicatedJobs"], kinds, nodes, strict=True):
        jobs, pod = replicated["template"]["spec"], replicated["template"]["spec"]["template"]["spec"]
        assert (replicated["name"], replicated["replicas"]) == (kind, 1)
        assert (jobs["completionMode"], jobs["completions"], jobs["parallelism"]) == ("Indexed", of_kind, of_kind)
        assert pod["nodeSelector"] == {"mmjax/accelerator": kind}
        (main,) = pod["containers"]
        assert main["resources"] == {"limits": {"nvidia.com/gpu": min(8, count)}}
        words = [expanded(word) for word in main["command"]]
        assert words[-len(ODD) :] == list(ODD)
        for index in range(of_kind):
            there = {"PATH": os.environ["PATH"], **environment(main, index)}
            done = subprocess.run(words, capture_output=True, text=True, check=True, env=there)
            environs.append(json.loads(done.stdout))
    assert_numbered(environs, f"mine-{kinds[0][0]}-0-0.mine:9876", nodes)


def test_one_kind_of_several_is_asked_for_by_name(tmp_path: Path) -> None:
    (kind,) = mixed(("l20", 12))
    text = slurm_file(kind)
    requested = options(text)
    assert (requested["gpus-per-node"], requested["nodes"]) == ("l20:8", "2") and "het" not in text
    assert started(text, tmp_path)[-len(kind.command) :] == list(kind.command)
    (replicated,) = yaml.safe_load(jobset_file(kind))["spec"]["replicatedJobs"]
    assert replicated["template"]["spec"]["template"]["spec"]["nodeSelector"] == {"mmjax/accelerator": "l20"}


@pytest.mark.parametrize("made", [slurm_file, jobset_file])
def test_a_kind_that_does_not_fill_its_nodes_is_refused_where_another_follows(made: Any) -> None:
    message = r"^--devices: 12 h100 do not fill nodes of 8, .* give whole nodes, such as h100:8, or leave --slurm"
    with pytest.raises(ConfigError, match=message) as caught:
        made(*mixed(("h100", 12), ("l20", 8)))
    assert "\n" not in str(caught.value)
    assert made(*mixed(("l20", 8), ("h100", 12)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 0}, r"^devices=0: must be above 0, such as 8$"),
        ({"per_node": -1}, r"^devices of a node=-1: must be above 0, such as 8$"),
        ({"command": ()}, r"^command=\(\): give one, such as "),
    ],
)
def test_what_is_no_job_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job(**changes)
