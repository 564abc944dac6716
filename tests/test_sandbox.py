"""The sandbox's calls, limits and layers, and rewards for programs by their tests."""

import ctypes
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

import hjax
from hjax.errors import ConfigError, DataError
from hjax.rewards.code_tests import (
    CodeTests,
    extract_code,
    program_tests,
    texts_agree,
    values_agree,
)
from hjax.rewards.function import RewardFunction, load_function
from hjax.run.reward_check import sandbox_remark
from hjax.sandbox import local_sandbox, system_call_filter
from hjax.sandbox.local_sandbox import LocalSandbox, SandboxLimits, sandbox_layers
from hjax.sandbox.sandbox_settings import SandboxSettings

PYTHON = [sys.executable, "-I", "-S"]


def works_here() -> bool:
    return "too little" not in sandbox_layers()


needs_sandbox = pytest.mark.skipif(not works_here(), reason=sandbox_layers())


@pytest.fixture(scope="module")
def sandbox():
    return LocalSandbox(SandboxLimits(cpu_seconds=1, wall_seconds=20))


@pytest.fixture
def name(sandbox):
    made = sandbox.create()
    yield made
    sandbox.kill(made)


@needs_sandbox
def test_a_program_reads_stdin_and_files_and_writes_them(sandbox, name):
    sandbox.write(name, "sub/data.txt", b"7")
    code = "n = int(open('sub/data.txt').read()); open('out', 'w').write(input()[::-1] * n)"
    done = sandbox.exec(name, [*PYTHON, "-c", code], stdin=b"ab\n")
    assert (done.status, done.stdout, done.ended_by) == (0, b"", "")
    assert sandbox.read(name, "out") == b"ba" * 7


@needs_sandbox
def test_status_output_and_environment(sandbox, name, monkeypatch):
    monkeypatch.setenv("SECRET", "s3")
    code = "import os, sys; print(sorted(os.environ)); sys.stderr.write('e'); sys.exit(7)"
    done = sandbox.exec(name, [*PYTHON, "-c", code], environment={"A": "1"})
    assert (done.status, done.stderr) == (7, b"e")
    assert done.stdout == b"['A', 'HOME', 'LANG', 'PATH']\n"
    assert sandbox.exec(name, ["nonesuch"]).status == 127
    assert sandbox.exec(name, ["sh", "-c", "kill -9 $$"]).status == -9


@needs_sandbox
def test_common_programs_run(sandbox, name):
    for command in (["ls", "-l", "/usr"], ["sh", "-c", "echo a | sed s/a/b/ | sort"]):
        assert sandbox.exec(name, command).status == 0
    code = "import subprocess, tempfile, threading, ctypes, decimal, hashlib, random\n"
    code += "t = threading.Thread(target=print, args=(1,)); t.start(); t.join()\n"
    code += "print(subprocess.run(['echo', '2'], capture_output=True).stdout)\n"
    code += "tempfile.TemporaryFile(dir='.').write(b'x')\nprint(random.SystemRandom().random() < 1)"
    done = sandbox.exec(name, [sys.executable, "-I", "-c", code])
    assert (done.stdout, done.stderr) == (b"1\nb'2\\n'\nTrue\n", b"")


@needs_sandbox
def test_a_sandbox_of_no_name_and_paths_that_lead_out(sandbox, name):
    with pytest.raises(ConfigError, match="'none' does not exist"):
        sandbox.exec("none", ["true"])
    for path in ("../x", "/etc/passwd", "a//b", ".", ""):
        with pytest.raises(DataError, match="must be a relative path"):
            sandbox.write(name, path, b"")
    with pytest.raises(DataError, match="'missing' cannot be used: No such file"):
        sandbox.read(name, "missing")
    folder = sandbox._folder(name)[0]
    sandbox.kill(name)
    sandbox.kill(name)
    assert not folder.parent.exists()


def found(**layers: int) -> dict[str, int]:
    return {"landlock": 0, "seccomp": 0, "namespaces": 0, "users": 0, **layers}


@pytest.mark.parametrize(
    ("layers", "allowed", "says"),
    [
        (found(), True, "this machine's files; it needs Landlock"),
        (found(seccomp=1), True, "this machine's files; it needs Landlock"),
        (found(landlock=7), False, "Landlock 7, limits do not keep programs from the network"),
        (found(landlock=7), True, None),
        (found(landlock=1, seccomp=1), False, None),
        (found(namespaces=1), False, None),
    ],
)
def test_too_few_layers_are_refused_in_one_line(monkeypatch, layers, allowed, says):
    monkeypatch.setattr(local_sandbox, "probed_layers", lambda: {**layers, "users": 1})
    monkeypatch.setattr(local_sandbox, "_reachable", lambda paths: True)
    if says is None:
        LocalSandbox(allow_network=allowed)
        return
    with pytest.raises(ConfigError, match=says) as caught:
        LocalSandbox(allow_network=allowed)
    assert "\n" not in str(caught.value)
    assert allowed or "too little" in sandbox_layers()


def test_root_without_users_for_programs_is_refused(monkeypatch):
    """The kernel does not limit the number of root's processes."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    on_the_host = found(landlock=7, seccomp=1, users=1)
    for layers, reachable in ((on_the_host, False), (found(namespaces=1), True)):
        monkeypatch.setattr(local_sandbox, "probed_layers", lambda layers=layers: layers)
        monkeypatch.setattr(local_sandbox, "_reachable", lambda paths, known=reachable: known)
        with pytest.raises(ConfigError, match="counts no processes of root"):
            LocalSandbox()


def test_unknown_layers_are_refused():
    with pytest.raises(ConfigError, match="without='selinux'.*landlock, seccomp, namespaces"):
        LocalSandbox(without=("selinux",))


def verdict(program: bytes, architecture: int, number: int, first: int = 0) -> int:
    """What a BPF program returns for a system call, by a machine of its own."""
    data = struct.pack("<iIQ6Q", number, architecture, 0, first, 0, 0, 0, 0, 0)
    steps = list(struct.iter_unpack("HBBI", program))
    at = value = 0
    while True:
        code, yes, no, constant = steps[at]
        at += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            value = struct.unpack_from("<I", data, constant)[0]
        else:
            tests = {0x15: value == constant, 0x35: value >= constant, 0x45: value & constant}
            at += yes if tests[code] else no


@pytest.mark.parametrize(
    ("machine", "architecture", "numbers"),
    [
        ("x86_64", 0xC000003E, {"socket": 41, "read": 0, "clone": 56, "kill": 62, "ptrace": 101}),
        ("aarch64", 0xC00000B7, {"socket": 198, "read": 63, "clone": 220, "kill": 129}),
    ],
)
def test_the_filter_of_system_calls(machine, architecture, numbers):
    program = system_call_filter.filter_program(on_the_host=True, machine=machine)
    allowed, refused, unknown, killed = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
    assert verdict(program, architecture, numbers["read"]) == allowed
    assert verdict(program, architecture, numbers["socket"]) == refused
    assert verdict(program, architecture, numbers["clone"], 17) == allowed  # fork
    assert verdict(program, architecture, numbers["clone"], 0x10000000) == refused  # CLONE_NEWUSER
    assert verdict(program, architecture, 435) == unknown  # clone3
    assert verdict(program, architecture, numbers["kill"], os.getpid()) == allowed
    assert verdict(program, architecture, numbers["kill"], os.getppid()) == refused
    assert verdict(program, architecture, numbers["kill"], 0xFFFFFFFF) == refused  # kill(-1)
    assert verdict(program, 0x40000003, numbers["read"]) == killed  # i386
    if machine == "x86_64":
        assert verdict(program, architecture, 0x40000000) == unknown  # x32
    inside = system_call_filter.filter_program(on_the_host=False, machine=machine)
    assert verdict(inside, architecture, numbers["kill"], os.getppid()) == allowed


def named_calls():
    """Each call of the filter's tables with its numbers for x86_64 and aarch64."""
    tables = ("_ALWAYS_DENIED", "_DENIED_ON_THE_HOST", "_OWN_PROCESS_ONLY")
    found = {}
    for table in tables:
        found |= getattr(system_call_filter, table)
    own = {"clone": "_CLONE", "clone3": "_CLONE3", "seccomp": "_SECCOMP"}
    return found | {name: getattr(system_call_filter, held) for name, held in own.items()}


@pytest.mark.parametrize(("column", "audit"), [(0, 0xC000003E), (1, 0xC00000B7)])
def test_numbers_of_system_calls_are_those_of_libseccomp(column, audit):
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("no libseccomp")
    resolve, checked = library.seccomp_syscall_resolve_name_arch, 0
    for name, numbers in named_calls().items():
        known = resolve(audit, name.encode())
        if known != -1:  # -1: a call that is newer than the library; below: not on this machine
            assert numbers[column] == (known if known >= 0 else None), name
            checked += 1
    assert checked > 80


@pytest.mark.parametrize(
    ("column", "header"),
    [(0, "x86_64-linux-gnu/asm/unistd_64.h"), (1, "asm-generic/unistd.h")],
)
def test_numbers_of_system_calls_are_those_of_the_kernels_headers(column, header):
    """The generic table is aarch64's."""
    path = Path("/usr/include", header)
    if not path.exists():
        pytest.skip(f"no {path}")
    known = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)$", path.read_text(), re.MULTILINE)
    known = {name: int(number) for name, number in known}
    checked = [n for n, numbers in named_calls().items() if known.get(n) == numbers[column]]
    wrong = [
        n
        for n, numbers in named_calls().items()
        if known.get(n, numbers[column]) != numbers[column]
    ]
    assert not wrong and len(checked) > 80


SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
ADD = {"inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]], "fn_name": "add"}


def fenced(code: str) -> str:
    return f"So:\n```python\n{code}\n```\n"


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "tests", "reward", "kinds"),
    [
        ("print(sum(map(int, input().split())))", SUM, 1.0, ["passed", "passed"]),
        ("print(3)", SUM, 0.5, ["passed", "wrong"]),
        ("print(3); raise ValueError", SUM, 0.0, ["error", "error"]),
        ("def add(a, b: List[int]): return a + b", ADD, 1.0, ["passed", "passed"]),
        ("class Solution:\n def add(self, a, b): return 3", ADD, 0.5, ["passed", "wrong"]),
        ("def add(a, b): print(a + b)", ADD, 0.0, ["wrong", "wrong"]),
        ("def add(a, b", ADD, 0.0, ["syntax", "syntax"]),
        ("x = [0] * 10**10", SUM, 0.0, ["memory", "memory"]),
        ("import ctypes; ctypes.string_at(0)", SUM, 0.0, ["crash", "crash"]),
    ],
)
def test_partial_credit_and_kinds(code, tests, reward, kinds):
    judge = CodeTests(seconds=1, total_seconds=5)
    found = judge([""], [fenced(code)], tests=[tests])
    shares = {f"tests_{kind}": [kinds.count(kind) / 2] for kind in kinds}
    assert found == [reward] and {n: x for n, x in found.metrics.items() if x != [0]} == shares


def test_programs_in_responses():
    assert extract_code("```python\na\n``` then ```cpp\nb\n``` and ```\nc\n```") == "c\n"
    assert extract_code("```python\na\n```\n```text\nb\n```\nDone") == "a\n"
    assert extract_code("```Python3\na") == "a"
    assert extract_code("print(1)") is None


def test_tests_in_the_columns_of_public_data_sets():
    apps = '{"inputs": ["1\\n"], "outputs": ["2\\n"]}'
    assert program_tests({"input_output": [apps]})[0].inputs == ("1\n",)
    verl = {"ground_truth": '{"inputs": ["[1]\\n2"], "outputs": ["[3]"], "fn_name": "f"}'}
    found = program_tests({"reward_model": [verl]})[0]
    assert (found.inputs, found.outputs, found.function) == (([[1], 2],), ([3],), "f")
    live = '[{"input": "\\"a\\"", "output": "true", "testtype": "functional"}]'
    found = program_tests({"public_test_cases": [live], "metadata": ['{"func_name": "g"}']})[0]
    assert (found.inputs, found.outputs, found.function) == ((["a"],), (True,), "g")


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"answer": ["1"]}, "no column with tests, one of tests, .*; there are answer"),
        ({"tests": [{"inputs": ["1"], "outputs": []}]}, "tests of row 1 is .* as many"),
        ({"tests": [SUM, "no JSON"]}, "tests of row 2 is 'no JSON'"),
        ({"tests": [None]}, "tests of row 1 is None"),
        ({"tests": [{"inputs": [1], "outputs": ["1"]}]}, "without `fn_name` .* must be texts"),
        ({"tests": [{**ADD, "fn_name": "a b"}]}, "fn_name='a b' must be the name"),
        ({"tests": [{**ADD, "inputs": ["x", "1"]}]}, "the input 'x' must be a list of arguments"),
    ],
)
def test_rows_of_another_form_are_named(columns, says):
    with pytest.raises(DataError, match=says):
        program_tests(columns)


def test_outputs_are_compared_by_lines_words_and_numbers():
    assert texts_agree("1 2\n3\n", "1  2 \n3\n\n", 1e-6)
    assert not texts_agree("1 2\n3\n", "1 2 3\n", 1e-6)
    assert texts_agree("0.3333333", "0.33333334", 1e-6)
    assert not texts_agree("1000000", "1000001", 1e-6) and not texts_agree("1", "1.0", 1e-6)
    assert not texts_agree("0.5", "nan", 1e-6) and not texts_agree("0.5", "9" * 5000, 1e-6)
    assert values_agree([1, {"a": 0.5}], [1, {"a": 0.5000001}], 1e-6)
    assert not values_agree(True, 1, 1e-6) and not values_agree(1, "1", 1e-6)
    assert values_agree(3, 3.0, 1e-6) and not values_agree(0.5, 10**400, 1e-6)


HOSTED = """
import os, pathlib, subprocess, tempfile
from hjax.sandbox.local_sandbox import ExecResult

class Mine:
    '''Elsewhere, say; it counts its programs.'''
    def create(self): return tempfile.mkdtemp()
    def exec(self, name, command, *, stdin=b"", environment=None, limits=None):
        with open({log!r}, "a") as file:
            print(*command, file=file)
        done = subprocess.run(command, cwd=name, capture_output=True)
        return ExecResult(done.returncode, done.stdout, done.stderr, "", 0.0)
    def write(self, name, path, content): pathlib.Path(name, path).write_bytes(content)
    def read(self, name, path, limit=0): return pathlib.Path(name, path).read_bytes()
    def kill(self, name): pass

class Lacking:
    create = exec = write = read = print

class Raising:
    def __init__(self): raise OSError("no key")
"""


@pytest.mark.parametrize("runs_in", ["process", "thread"])
def test_rewards_run_programs_in_a_users_sandbox(tmp_path, monkeypatch, runs_in):
    (tmp_path / "hosted.py").write_text(HOSTED.format(log=str(tmp_path / "log")))
    monkeypatch.chdir(tmp_path)
    section = {"function": "hosted.py:Mine", "allow_network": False}
    settings = SandboxSettings.of_config(section)
    assert settings.describe() == f"sandbox: {tmp_path}/hosted.py:Mine"
    judge = RewardFunction(load_function("code_tests.py:reward"), 60.0, runs_in, settings)
    try:
        result = judge([""], [fenced("print(3)")], {"tests": [SUM]}, [[1]], [[1]])
    finally:
        judge.close()
    assert result.rewards.tolist() == [0.5], result.first_traceback
    assert len(result.metrics) == 10
    assert [float(result.metrics[f"tests_{x}"][0]) for x in ("passed", "wrong")] == [0.5, 0.5]
    assert (tmp_path / "log").read_text() == "python3 -I code_runner.py\n"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Lacking", "hosted.py:Lacking: its objects have no call kill; a sandbox has create, exec"),
        ("Raising", "hosted.py:Raising, called without arguments: OSError: no key"),
        ("None_", "hosted.py has no None_"),
    ],
)
def test_a_class_that_is_no_sandbox_is_refused(tmp_path, name, says):
    (tmp_path / "hosted.py").write_text(HOSTED.format(log=""))
    with pytest.raises(ConfigError, match=says) as caught:
        SandboxSettings(f"{tmp_path}/hosted.py:{name}").describe()
    assert "\n" not in str(caught.value)


def test_a_run_says_its_sandbox_and_refuses_too_little(monkeypatch):
    """A run whose reward runs programs, and one whose reward does not."""
    config = hjax.get_config("grpo.py")
    judge = RewardFunction(load_function("code_tests.py:reward"))
    plain = RewardFunction(load_function("happy_stories.py:reward"))
    assert sandbox_remark(config, {"reward": plain}) == ""
    monkeypatch.setattr(local_sandbox, "probed_layers", lambda: found(landlock=7, users=1))
    monkeypatch.setattr(local_sandbox, "_reachable", lambda paths: True)
    says = "from the network; it needs seccomp or namespaces, or sandbox.allow_network=true"
    with pytest.raises(ConfigError, match=says):
        sandbox_remark(config, {"cost": plain, "reward": judge})
    judge.sandbox = SandboxSettings(allow_network=True)
    assert sandbox_remark(config, {"reward": judge}) == (
        "sandbox: Landlock 7, limits; programs may reach the network (sandbox.allow_network)"
    )
    monkeypatch.setattr(local_sandbox, "probed_layers", lambda: found(namespaces=1, users=1))
    assert sandbox_remark(config, {"reward": judge}) == "sandbox: namespaces, limits"
    code = "hjax.environments.code_blocks:CodeBlocks"
    assert sandbox_remark(config, {}, code) == "sandbox: namespaces, limits"
    assert sandbox_remark(config, {}, "hjax.environments.maze:Maze") == ""


def test_the_launcher_ends_with_its_process():
    code = "from hjax.sandbox import local_sandbox as s; s.sandbox_layers(); "
    code += "print(s._launcher._process.pid)"
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert not os.path.exists(f"/proc/{done.stdout.strip()}")


def test_it_is_there_by_name():
    assert type(load_function("code_tests.py:reward")).__name__ == "CodeTests"
    with pytest.raises(ConfigError, match="seconds=0 must be a positive integer"):
        CodeTests(seconds=0)
