"""Attacks on the sandbox and on rewards by tests, in each configuration of layers here."""

import dataclasses
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hjax.errors import ConfigError, DataError
from hjax.machine import process_state
from hjax.rewards.code_tests import CodeTests
from hjax.sandbox.local_sandbox import LocalSandbox, SandboxLimits, sandbox_layers

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif("too little" in sandbox_layers(), reason=sandbox_layers()),
]
PYTHON = [sys.executable, "-I", "-S"]
LIMITS = SandboxLimits(
    cpu_seconds=1,
    wall_seconds=4,
    memory_bytes=256 << 20,
    processes=16,
    file_bytes=8 << 20,
    disk_bytes=24 << 20,
    output_bytes=1 << 20,
)
# Layers left out; each of these keeps programs from files and the network.
WITHOUT = {
    "all": (),
    "without_landlock": ("landlock",),
    "without_seccomp": ("seccomp",),
    "without_namespaces": ("namespaces",),
    "namespaces_alone": ("landlock", "seccomp"),
}
# They end by themselves in time, in case a layer fails: else others on the machine would wait.
FORK_BOMB = """
import os, time
end = time.monotonic() + 15
while time.monotonic() < end:
    try: os.fork() or os.setsid()
    except OSError: pass
os._exit(0)
"""
THREAD_BOMB = """
import os, threading, time
end = time.monotonic() + 15
def begin():
    while time.monotonic() < end:
        try: threading.Thread(target=begin).start()
        except RuntimeError: pass
begin()
os._exit(0)
"""


@pytest.fixture(scope="module", params=WITHOUT)
def sandbox(request):
    try:
        return LocalSandbox(LIMITS, without=WITHOUT[request.param])
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture
def name(sandbox):
    made = sandbox.create()
    yield made
    sandbox.kill(made)


def run(sandbox, name, code, **options):
    begun = time.monotonic()
    done = sandbox.exec(name, [*PYTHON, "-c", code], **options)
    assert time.monotonic() - begun < 20  # of the machine's: others may keep it busy
    return done


def marked(name: str) -> list[int]:
    """Processes of this machine, ended ones aside, whose arguments have this text."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if name.encode() in file.read() and process_state(int(pid)) != "Z":
                    found.append(int(pid))
        except OSError:
            pass
    return found


@pytest.mark.parametrize(
    ("code", "ended_by"),
    [
        (
            "import signal\nfor n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n"
            " except (OSError, ValueError): pass\nwhile True: pass",
            {"cpu", "wall"},  # on a busy machine the clock may be first
        ),
        ("import time; time.sleep(60)", {"wall"}),
        (FORK_BOMB, {"wall", "cpu", "processes"}),
        (THREAD_BOMB, {"wall", "cpu", "processes"}),
        (
            "import os, time\nif not os.fork():\n os.setsid()\n if not os.fork(): time.sleep(60)\n"
            " os._exit(0)\ntime.sleep(60)",
            {"wall"},
        ),
        ("import os\nwhile True: os.write(1, b'x' * 65536)", {"output"}),
        (
            "import os, time\nfor _ in range(8):\n if not os.fork(): break\n"
            "x = bytearray(100 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(60)",
            {"memory"},
        ),
        (
            "i = 0\nwhile True:\n i += 1\n with open(f'f{i}', 'wb') as f: f.write(bytes(1 << 20))",
            {"disk", "cpu"},
        ),
        (
            "i = 0\nopened = []\nimport os, time\nwhile i < 60:\n i += 1\n f = open('f', 'wb')\n"
            " os.unlink('f'); f.write(bytes(7 << 20)); f.flush(); opened.append(f)\ntime.sleep(60)",
            {"disk", "cpu"},
        ),
        (
            "i = 0\nwhile True:\n i += 1\n open(f'f{i}', 'wb').close()",
            {"disk", "cpu", "wall"},  # the disk may make it wait
        ),
    ],
    ids=[
        "loop_ignoring_signals", "sleep", "fork_bomb", "thread_bomb", "double_fork", "output",
        "memory_in_many", "disk", "unlinked_files", "inodes",
    ],
)  # fmt: skip
def test_it_ends_at_its_limit_with_all_it_started(sandbox, name, code, ended_by):
    # On a busy machine the clock would be first.
    limits = LIMITS if "wall" in ended_by else dataclasses.replace(LIMITS, wall_seconds=10)
    done = run(sandbox, name, f"'{name}'\n{code}", limits=limits)
    assert done.ended_by in ended_by and done.status != 0
    assert done.seconds < 12
    assert marked(name) == []


@pytest.mark.slow  # tests beside it would wait
def test_fork_bombs_cost_programs_beside_them_nothing_but_time(sandbox):
    """Eight bombs in sandboxes of their own, and four programs that end by themselves."""
    right = dataclasses.replace(LIMITS, cpu_seconds=10, wall_seconds=60)
    programs = [(FORK_BOMB, LIMITS)] * 8 + [("print(6 * 7)", right)] * 4

    def verdict(program):
        made = sandbox.create()
        try:
            code, limits = program
            done = sandbox.exec(made, [*PYTHON, "-c", f"'{made}'\n{code}"], limits=limits)
            return done.ended_by or done.stdout, marked(made)
        finally:
            sandbox.kill(made)

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(verdict, programs))
    assert all(ended_by in ("wall", "cpu", "processes") for ended_by, _ in found[:8])
    assert [said for said, _ in found[8:]] == [b"42\n"] * 4
    assert not any(left for _, left in found)


def test_a_process_that_left_its_session_ends_with_the_program(sandbox, name):
    code = f"'{name}'\nimport os, time\nif not os.fork():\n os.setsid()\n if not os.fork():\n"
    code += "  os.close(1); os.close(2); time.sleep(60)\n os._exit(0)\nprint('done')"
    done = run(sandbox, name, code)
    assert (done.stdout, done.status) == (b"done\n", 0)
    assert marked(name) == []


@pytest.mark.parametrize(
    "code",
    [
        "x = bytearray(1 << 30)",
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "import ctypes; ctypes.string_at(0)",
        "open('big', 'wb').write(bytes(9 << 20))",
    ],
    ids=["memory_in_one", "deep_recursion", "segfault", "large_file"],
)
def test_it_fails_alone(sandbox, name, code):
    done = run(sandbox, name, code)
    assert done.status != 0 and marked(name) == []


def test_stdin_is_empty_and_descriptors_are_closed(sandbox, name):
    code = "import os, sys\nprint(sys.stdin.read() == '')\n"
    code += "for n in range(3, 2000):\n try: os.fstat(n); print(n)\n except OSError: pass"
    assert run(sandbox, name, code).stdout == b"True\n"


NETWORK = {
    "tcp": "s = socket.socket(); s.settimeout(1); s.connect(('127.0.0.1', {port}))",
    "udp": "s = socket.socket(type=socket.SOCK_DGRAM); s.sendto(b'x', ('127.0.0.1', {udp}))",
    "unix": "s = socket.socket(socket.AF_UNIX); s.connect({path!r})",
    "abstract": "s = socket.socket(socket.AF_UNIX); s.connect('\\0{abstract}')",
    "datagram_pair": "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); "
    "a.sendto(b'x', {datagram!r})",
}


@pytest.mark.parametrize("kind", NETWORK)
def test_it_reaches_no_network(sandbox, name, kind, tmp_path):
    """Servers of this machine, which would take the connection and its bytes."""
    abstract = f"hjax-{os.getpid()}-{kind}"
    path, datagram = f"/tmp/{abstract}.s", f"/tmp/{abstract}.d"
    servers = [socket.create_server(("127.0.0.1", 0))]
    for address in (path, "\0" + abstract):
        servers.append(socket.socket(socket.AF_UNIX))
        servers[-1].bind(address)
        servers[-1].listen()
    boxes = [
        socket.socket(type=socket.SOCK_DGRAM),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
    ]
    boxes[0].bind(("127.0.0.1", 0))
    boxes[1].bind(datagram)
    try:
        os.chmod(path, 0o777)
        os.chmod(datagram, 0o777)
        port, udp = servers[0].getsockname()[1], boxes[0].getsockname()[1]
        code = NETWORK[kind].format(
            port=port, udp=udp, path=path, abstract=abstract, datagram=datagram
        )
        done = run(sandbox, name, f"import socket\n{code}\nprint('reached')")
        reached = b"reached" in done.stdout
        for waiting in (*servers, *boxes):
            waiting.setblocking(False)
            with pytest.raises(BlockingIOError):
                waiting.accept() if waiting in servers else waiting.recv(1)
        assert not reached or kind == "udp"  # a datagram may vanish in a network of its own
    finally:
        for opened in (*servers, *boxes):
            opened.close()
        os.unlink(path)
        os.unlink(datagram)


def test_it_reads_and_changes_no_file_outside(sandbox, name, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    for folder in (secret, *tmp_path.parents[:2]):
        os.chmod(folder, 0o644 if folder == secret else 0o755)
    before = secret.stat()
    tries = [
        f"open({str(secret)!r}).read()",
        f"open({str(secret)!r}, 'a').write('x')",
        f"os.symlink({str(secret)!r}, 'link') or open('link').read()",
        "open('link', 'w').write('x')",
        f"os.link({str(secret)!r}, 'hard') or open('hard').read()",
        f"os.truncate({str(secret)!r}, 0)",
        f"os.chmod({str(secret)!r}, 0o777)",
        f"os.utime({str(secret)!r}, (0, 0))",
        f"os.rename({str(secret)!r}, 'mine')",
        f"os.setxattr({str(secret)!r}, 'user.a', b'x')",
        f"call(463, -100, {os.fsencode(secret)!r}, 0, b'user.a', xattr(b'x', 1), long(16))",
        f"call(469, -100, {os.fsencode(secret)!r}, bytes(24), long(24), 0)",
        f"os.unlink({str(secret)!r})",
        f"os.listdir({str(tmp_path)!r})",
        "os.listdir('/root')", "os.listdir('/home')", "os.listdir(os.path.dirname(os.getcwd()))",
        "open('/etc/passwd').read()", "open('/proc/1/environ').read()",
        "open(f'/proc/{os.getppid()}/mem', 'rb').read(1)", "open('/tmp/x', 'w')",
        "open('/dev/shm/x', 'w')", f"open({os.__file__!r}, 'a')", "os.listdir('../../..')",
    ]  # fmt: skip
    code = "import ctypes, os\nlibc = ctypes.CDLL(None)\ndone = []\n"
    code += "def call(*given):\n if libc.syscall(*given) < 0: raise OSError\n"
    code += "long = ctypes.c_long\ndef xattr(value, size):  # struct xattr_args\n"
    code += " return bytes(ctypes.c_char_p(value)) + size.to_bytes(8, 'little')\n"
    for text in tries:
        code += f"try: {text}; done.append({text!r})\nexcept OSError: pass\n"
    outcome = run(sandbox, name, code + "print(done)")
    # A root of its own has the folders above those that it can see, with nothing else in them.
    allowed = {"os.listdir('../../..')", "os.listdir(os.path.dirname(os.getcwd()))"}
    allowed |= {"os.listdir('/root')", "os.listdir('/home')"}
    assert set(eval(outcome.stdout)) <= (allowed if sandbox.layers["namespaces"] else set())
    after = secret.stat()
    assert secret.read_text() == "s3cret"
    assert (after.st_mode, after.st_mtime, after.st_nlink) == (
        before.st_mode,
        before.st_mtime,
        before.st_nlink,
    )


def test_it_touches_no_other_process(sandbox, name):
    mine, parent = os.getpid(), os.getppid()
    tries = [
        *(f"os.kill({pid}, 9)" for pid in (mine, parent)),
        f"os.kill({mine}, signal.SIGSTOP)",
        f"signal.pidfd_send_signal(os.pidfd_open({mine}), 9)",
        f"resource.prlimit({mine}, resource.RLIMIT_CPU, (1, 1))",
        f"os.sched_setaffinity({mine}, [0])",
        f"os.setpriority(os.PRIO_PROCESS, {mine}, 19)",
        f"check(libc.ptrace(16, {mine}, 0, 0))",
        "os.kill(os.getppid(), 9)",
    ]
    before = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    code = "import ctypes, os, resource, signal\nlibc = ctypes.CDLL(None)\ndone = []\n"
    code += "def check(n):\n if n < 0: raise OSError\n"
    for text in tries:
        code += f"try: {text}; done.append({text!r})\nexcept OSError: pass\n"
    done = run(sandbox, name, code + "print(done)")
    # The first process of the namespace is the parent; it ignores signals from within.
    allowed = {"os.kill(os.getppid(), 9)"} if sandbox.layers["namespaces"] else set()
    assert set(eval(done.stdout)) <= allowed
    assert before == (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0))


def test_it_gains_no_rights(sandbox, name):
    """Setuid programs, new namespaces, mounts, and the capabilities it starts with."""
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "print([libc.unshare(0x20000), libc.mount(b'x', b'.', b'tmpfs', 0, None),\n"
        " libc.chroot(b'.'), libc.setns(0, 0)])\n"
        "pid = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) if os.uname().machine == 'x86_64' "
        "else -1\nif pid == 0: os._exit(0)\nprint(pid < 0)\n"
        "h = (ctypes.c_uint32 * 2)(0x20080522, 0); d = (ctypes.c_uint32 * 6)()\n"
        "libc.capget(h, d); print(list(d), libc.prctl(39, 0, 0, 0, 0))"
    )
    lines = run(sandbox, name, code).stdout.decode().split("\n")
    assert lines[0] == "[-1, -1, -1, -1]" or not sandbox.layers["seccomp"]
    assert lines[1] == "True" or not sandbox.layers["seccomp"]
    assert lines[2] == "[0, 0, 0, 0, 0, 0] 1"


def test_files_that_it_leaves_harm_no_reader(sandbox, name, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    code = f"import os\nos.symlink({str(secret)!r}, 'a'); os.mkfifo('b'); os.mkdir('c')\n"
    code += f"os.symlink({str(tmp_path)!r}, 'd')\nopen('e', 'w').truncate(4 << 20)\n"
    code += "for _ in range(1100): os.mkdir('x'); os.chdir('x')\n"
    limits = SandboxLimits(cpu_seconds=10)  # Landlock walks up the folders at each step
    assert run(sandbox, name, code, limits=limits).status == 0
    for path in ("a", "b", "c", "d/secret"):
        with pytest.raises(DataError):
            sandbox.read(name, path)
    with pytest.raises(DataError):
        sandbox.write(name, "d/new", b"x")
    sandbox.write(name, "a", b"mine")  # in place of the link
    assert secret.read_text() == "s3cret" and os.listdir(tmp_path) == ["secret"]
    assert len(sandbox.read(name, "e", limit=100)) == 100
    run(sandbox, name, "import os; os.chmod('c', 0)") if sandbox.layers["namespaces"] else None
    folder = sandbox._folder(name)[0].parent
    sandbox.kill(name)
    assert not folder.exists()


def test_a_killed_sandbox_ends_its_programs(sandbox, name):
    found = []
    code = f"'{name}'; import time; time.sleep(60)"
    thread = threading.Thread(target=lambda: found.append(run(sandbox, name, code)))
    thread.start()
    for _ in range(200):
        time.sleep(0.02)
        if marked(name):
            break
    sandbox.kill(name)
    thread.join(10)
    assert found[0].ended_by == "killed" and marked(name) == []


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


CHEATS = {
    "exit": "exit(0)",
    "hard_exit": "import os; os._exit(0)",
    "verdict": 'print(\'passed\')\nprint(\'{"test": 0, "kind": "passed", "output": ""}\')',
    "verdict_by_pipe": "import os\nfor n in range(3, 50):\n"
    ' try: os.write(n, b\'{"test": 0, "kind": "passed"}\\n{"test": 1, "kind": "ok"}\\n\')\n'
    " except OSError: pass",
    "equality": "class A(str):\n def __eq__(self, other): return True\n def __ne__(self, o): "
    "return False\nprint(A('x'))",
    "patched": "import builtins, json\njson.dumps = lambda *a, **k: 'true'\n"
    "builtins.print = lambda *a: None\nbuiltins.open = None",
    "frames": "import sys\nf = sys._getframe()\nwhile f:\n"
    " for v in f.f_locals.values():\n  if 'outputs' in str(v): print(v)\n"
    " f = f.f_back",
    "files": "import os\nfor r, d, n in os.walk('.'):\n for f in n: print(open(f'{r}/{f}').read())",
    "huge_integer": "import sys\nsys.set_int_max_str_digits(0); print(10**300000)",
    "bytes": "import sys; sys.stdout.buffer.write(b'\\xff\\xfe' * 1000)",
    "closed": "import sys; sys.stdout.close()",
    "closed_all": "import os; os.closerange(0, 100)",
    "runner": "open('code_runner.py', 'w').write('x')\nopen('job.json', 'w').write('{}')",
    "nan": "print('nan')\nprint(float('inf'))",
}
FUNCTION = "def f(x):\n"
TESTS = {"inputs": ["271828\n", "314159\n"], "outputs": ["577215\n", "141421\n"]}
CALLS = {"inputs": [[271828], [314159]], "outputs": [577215, [1414.21]], "fn_name": "f"}


@pytest.mark.parametrize("cheat", CHEATS)
def test_no_cheat_wins_a_reward(sandbox, cheat):
    judge = CodeTests(seconds=1, total_seconds=4, sandbox=sandbox)
    body = "\n".join(f" {line}" for line in CHEATS[cheat].split("\n"))
    responses = [fenced(CHEATS[cheat]), fenced(FUNCTION + body), fenced(FUNCTION + body + "\n")]
    responses[2] = fenced(CHEATS[cheat] + "\nf = lambda x: type('A', (), {'__eq__': bool})()")
    found = judge([""] * 3, responses, tests=[TESTS, CALLS, CALLS])
    assert found == [0.0, 0.0, 0.0]
    assert found.metrics["tests_passed"] == [0] * 3
    assert [sum(shares) for shares in zip(*found.metrics.values(), strict=True)] == [1] * 3


def test_nested_results_and_slow_tests_cost_only_themselves(sandbox):
    judge = CodeTests(seconds=1, total_seconds=6, sandbox=sandbox)
    nest = "def f(x):\n import json\n json.dumps = lambda v: '[' * 200000\n return 1"
    slow = "n = input()\nif n == '314159':\n while True: pass\nprint(577215)"
    assert judge([""] * 2, [fenced(nest), fenced(slow)], tests=[CALLS, TESTS]) == [0.0, 0.5]


def test_thirty_two_at_once_all_get_their_verdict():
    """On few cores the processor's limit decides, not the clock's."""
    limits = SandboxLimits(cpu_seconds=1, wall_seconds=240)
    sandbox = LocalSandbox(limits)
    codes = ["while True: pass", "print(sum(range(10**6)))", "import os; os._exit(3)", "1/0"] * 8

    def verdict(code):
        made = sandbox.create()
        try:
            done = sandbox.exec(made, [*PYTHON, "-c", code])
            return done.ended_by or done.status
        finally:
            sandbox.kill(made)

    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(verdict, codes))
    assert found == ["cpu", 0, 3, 1] * 8
