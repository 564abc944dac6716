"""An interpreter that keeps its variables, in a sandbox: cells, and what they may do to it."""

import concurrent.futures
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from hjax.errors import ConfigError, DataError, RunError
from hjax.sandbox.local_sandbox import ExecResult, LocalSandbox, SandboxLimits, sandbox_layers
from hjax.sandbox.python_session import PythonSession

needs_sandbox = pytest.mark.skipif("too little" in sandbox_layers(), reason=sandbox_layers())


class FolderSandbox:
    """The five calls of the protocol and no more, as a hosted sandbox has them; it confines
    nothing."""

    def __init__(self):
        self.programs = {}

    def create(self):
        name = tempfile.mkdtemp()
        self.programs[name] = []
        return name

    def exec(self, name, command, *, stdin=b"", environment=None, limits=None):
        program = subprocess.Popen(
            command, cwd=name, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        self.programs[name].append(program)
        out, err = program.communicate(stdin)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)  # nothing that it has started outlives it
        return ExecResult(program.returncode, out, err, "", 0.0)

    def write(self, name, path, content):
        Path(name, path).write_bytes(content)

    def read(self, name, path, limit=1 << 24):
        try:
            return Path(name, path).read_bytes()[:limit]
        except OSError as error:
            raise DataError(str(error)) from None

    def kill(self, name):
        for program in self.programs.pop(name):
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
        shutil.rmtree(name)


@pytest.fixture(
    scope="module", params=["local", pytest.param("folder", marks=pytest.mark.extended)]
)
def sandbox(request):
    if request.param == "folder":
        return FolderSandbox()
    if "too little" in sandbox_layers():
        pytest.skip(sandbox_layers())
    return LocalSandbox()


@pytest.fixture(scope="module")
def session(sandbox):
    made = PythonSession(sandbox, output_bytes=1500)
    yield made
    made.close()


@pytest.fixture
def short(sandbox):
    """Its cells may take half a second of the processor, and two by the clock."""
    made = PythonSession(sandbox, cell_seconds=0.5)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("cells", "text"),
    [
        (["x = 2", "print(x)\nx + 1"], "2\n3"),
        (["x = 2; x"], "2"),
        (["print(1, end='')\n'a'"], "1\n'a'"),
        (["None"], ""),
        ([""], ""),
        (["# nothing"], ""),
        (["for i in range(2): i"], ""),
        (["import sys; x = sys.stdout.buffer.write(b'\\xff\\xfe\\n')"], "\ufffd\ufffd\n"),
        (["print('\\ud800')"], "\\ud800\n"),
        (["'\\ud800\u20ac'"], "'\\ud800\u20ac'"),
        (["print('a' * 3000)\n7"], "a" * 1500 + "\n[1501 bytes more were printed]\n7"),
        (["import os; x = os.system('echo 5')"], "5\n"),
        (["def f(): global y; y = 1", "f()", "y"], "1"),
        (["import sys; sys.stdout.close(); sys.stdin.close()", "print(1)"], "1\n"),
        (["import os; os.close(1); os.close(2)", "print(1)"], "1\n"),
        (["import os; os.mkdir('d'); os.chdir('d')", "x = os.chdir('..')", "2"], "2"),
        (
            ["import threading\ne = threading.Event()\n"
             "t = threading.Thread(target=lambda: print('late', e.wait()))\nt.start()",
             "e.set(); t.join()"],
            "late True\n",
        ),
        (["import os\nif os.fork(): os.wait()\nelse: print('child')", "3"], "3"),
        (["import pickle\nclass A: pass", "type(pickle.loads(pickle.dumps(A()))) is A"], "True"),
        (
            ["open('f', 'w').write('1')", "import os, shutil\nfor n in os.listdir('.'):\n"
             " shutil.rmtree(n) if os.path.isdir(n) else os.unlink(n)", "os.listdir('.')"],
            "[]",
        ),
        (["import os; os.chmod(os.getcwd(), 0)", "4"], "4"),
        (["open('mine.py', 'w').write('a = 6'); import mine; mine.a"], "6"),
        (["open('json.py', 'w').write('1/0'); import os; os._exit(0)", "8"], "8"),
        (
            ["import builtins, sys; del sys.modules['json']; r = repr; builtins.repr = 0", "9",
             "builtins.repr = r", "9"],
            "9",
        ),
    ],
)  # fmt: skip
def test_what_cells_print_and_return(session, cells, text):
    found = [session.run(cell) for cell in cells]
    assert found[-1] == text


@pytest.mark.parametrize(
    ("cell", "ends"),
    [
        ("def f(:", "    def f(:\n          ^\nSyntaxError: invalid syntax"),
        ("1\n  2", "IndentationError: unexpected indent"),
        ("'\0'", "SyntaxError: source code string cannot contain null bytes"),
        ("'\ud800'", "surrogates not allowed"),
        ("x = 1\nx / 0", '<cell 1>", line 2, in <module>\n    x / 0\n    ~~^~~\n'
         "ZeroDivisionError: division by zero"),
        ("print(1)\nraise SystemExit(3)", "SystemExit: 3"),
        ("input()", "EOFError: EOF when reading a line"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("class A:\n def __repr__(self): raise KeyboardInterrupt\nA()", "KeyboardInterrupt"),
        ("class E(Exception):\n def __str__(self): exit()\nraise E", "E: <exception str() failed>"),
    ],
)  # fmt: skip
def test_errors_are_the_end_of_a_traceback(session, cell, ends):
    text = re.sub(r"<cell \d+>", "<cell 1>", session.run(cell))
    assert text.endswith(ends) and "session_runner" not in text and '"<string>"' not in text
    assert len(text.splitlines()) <= 17
    assert session.run("5") == "5"


LOOP = "import signal\nfor n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n"
LOOP += " except (OSError, ValueError): pass\nprint('in')\nwhile True: pass"
LOST = "[the interpreter was ended ({}); its variables are lost]"
LATE = LOST.format("more than 2 s")
SPENT = LOST.format("more than 0.5 s of processor time")


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (LOOP, None),
        pytest.param("import time; time.sleep(60)", LATE, marks=pytest.mark.extended),
        ("print(1); import os; os._exit(7)", "1\n" + LOST.format("exit status 7")),
        ("import ctypes; ctypes.string_at(0)", LOST.format("signal 11")),
        ("import os; os.kill(os.getppid(), 9)", LOST.format("signal 9")),
        ("import os; os.closerange(3, 100)", LOST.format("exit status 1")),
        pytest.param("while True: print('y')", None, marks=pytest.mark.extended),
    ],
)
def test_a_cell_that_ends_its_interpreter(short, cell, text):
    short.run("open('kept', 'w').write('1'); x = 1")
    begun = time.monotonic()
    found = short.run(cell)
    if text is None:  # on a busy machine the clock may be first
        assert found.startswith(("in\n", "y\ny")) and found.endswith((SPENT, LATE))
    else:
        assert found == text
    assert time.monotonic() - begun < 12
    assert short.run("open('kept').read(), 'x' in globals()") == "('1', False)"


@pytest.mark.extended
def test_a_thread_that_spins_between_cells_costs_the_interpreter(short):
    short.run("x = 1; import threading\ndef f():\n while True: pass\n"
              "threading.Thread(target=f).start()")  # fmt: skip
    concurrent.futures.wait([short._program], 20)
    assert short.run("'x' in globals()") == SPENT + "\nFalse"


def test_results_cannot_be_forged_in_advance(session):
    """A name that a cell may guess, content of another form, and one that leads elsewhere."""
    session.run("import os\nfor n in range(9): open(f'.cell-{n}', 'w').write('[' * 100000)")
    assert session.run("2") == "2"
    assert "cell" not in session.run("os.listdir('.')")


def test_the_same_seed_gives_the_same(sandbox):
    cell = "import random; random.random(), hash('a'), list({'a', 'b', 'c', 'd'})"
    found = []
    for seed in (3, 3, -1):
        session = PythonSession(sandbox, seed=seed)
        found.append(session.run(cell))
        session.close()
    assert found[0] == found[1] != found[2]
    assert found[0].startswith(f"({random.Random(3).random()!r}, ")


def test_a_closed_session_and_its_folder(sandbox):
    session = PythonSession(sandbox)
    assert session.run("1") == "1"
    name = session._names[0]
    session.close()
    session.close()
    with pytest.raises(ConfigError, match="this PythonSession is closed; make another"):
        session.run("1")
    with pytest.raises((ConfigError, DataError)):
        sandbox.read(name, "x")


def test_a_session_that_cannot_start(sandbox):
    session = PythonSession(sandbox, command=["false"])
    with pytest.raises(RunError, match=r"Python \(false\) did not start: exit status 1"):
        session.run("1")
    session.close()
    with pytest.raises(ConfigError, match="cell_seconds=0 must be positive"):
        PythonSession(sandbox, cell_seconds=0)


@needs_sandbox
@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("import os, time\nfor _ in range(3):\n if not os.fork(): break\n"
         "x = bytearray(100 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\ntime.sleep(9)",
         "(its limit: memory); its variables are lost"),
        ("while True: open(str(len(__import__('os').listdir('.'))), 'wb').write(bytes(1 << 20))",
         "(its limit: disk); its variables and files are lost"),
    ],
    ids=["memory", "disk"],
)  # fmt: skip
def test_limits_of_all_processes(cell, reason):
    limits = SandboxLimits(memory_bytes=256 << 20, disk_bytes=24 << 20)
    session = PythonSession(LocalSandbox(), limits=limits)
    assert "MemoryError" in session.run("bytearray(1 << 30)")
    assert reason in session.run(cell)
    assert session.run("1") == "1"
    session.close()


@needs_sandbox
@pytest.mark.extended
def test_a_cell_that_stops_the_watcher_costs_its_files_too():
    session = PythonSession(LocalSandbox(), cell_seconds=0.5)
    found = session.run("import os, time; os.kill(os.getppid(), 19); time.sleep(60)")
    assert found == "[the interpreter was ended (it does not answer); " + (
        "its variables and files are lost]"
    )
    assert session.run("1") == "1"
    session.close()


@needs_sandbox
@pytest.mark.extended
def test_sixteen_sessions_at_once():
    sandbox = LocalSandbox()
    sessions = [PythonSession(sandbox, seed=n) for n in range(16)]

    def play(session):
        session.run("total = 0")
        for n in range(10):
            session.run(f"total += sum(range({n} * 10**5))")
        return session.run("total")

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = list(pool.map(play, sessions))
    assert found == [str(sum(sum(range(n * 10**5)) for n in range(10)))] * 16
    for session in sessions:
        session.close()
