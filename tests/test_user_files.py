"""Files of the user's, imported by their path."""

import functools
import pickle
import sys

import pytest

from hjax.errors import ConfigError
from hjax.user_code import file_and_name, import_file, load_object, user_traceback

TEXT = """
import dataclasses

@dataclasses.dataclass
class Outer:
    size: int = 1
    class Inner:
        pass

def function():
    def within():
        pass
    return within
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(TEXT)
    return path


def test_the_same_text_is_the_same_module_and_an_edit_a_new_one(file):
    first = import_file(file, "--config=mine.py")
    assert import_file(file, "algorithm.name=mine.py:Outer") is first
    assert first.__name__.startswith("hjax_user_mine_") and sys.modules[first.__name__] is first
    # An edit of the same length within the same second counts too.
    file.write_text(TEXT.replace("size: int = 1", "size: int = 2"))
    second = import_file(file, "--config=mine.py")
    assert second is not first and (first.Outer().size, second.Outer().size) == (1, 2)


def test_two_files_of_one_name_stand_beside_each_other(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"NAME = {name!r}\n")
    a, b = (import_file(tmp_path / name / "mine.py", "x") for name in ("a", "b"))
    assert (a.NAME, b.NAME) == ("a", "b") and a.__name__ != b.__name__


def test_objects_of_a_file_are_pickled_by_name(file):
    made = load_object(f"{file}:Outer", "algorithm.name")(3)
    again = pickle.loads(pickle.dumps(made))
    assert again == made and type(again) is type(made)


def test_a_file_is_read_as_it_stands_without_our_future_imports(tmp_path):
    (tmp_path / "typed.py").write_text("def f(x: int): pass\nKIND = f.__annotations__['x']\n")
    assert load_object(f"{tmp_path}/typed.py:KIND", "x") is int


@pytest.mark.parametrize("name", ["Outer", "Outer.Inner", "function"])
def test_origin_is_what_finds_the_object_again(file, name):
    thing = load_object(f"{file}:{name}", "x")
    assert file_and_name(thing) == (str(file), name)
    path, found = file_and_name(thing)
    assert load_object(f"{path}:{found}", "x") is thing


def test_what_has_no_name_in_a_users_file_has_no_origin(file):
    within = load_object(f"{file}:function", "x")()
    partial = functools.partial(load_object(f"{file}:function", "x"))
    assert [file_and_name(x) for x in (within, partial, dict, load_object, 3)] == [None] * 5


def test_a_file_named_through_a_link_is_one_file(file, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    assert import_file(tmp_path / "link" / "mine.py", "x") is import_file(file, "x")


def test_hjaxs_own_folders_do_not_enter_the_path():
    before = list(sys.path)
    import hjax.rewards.function as rewards

    rewards.load_function("happy_stories.py:reward")
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\n1 / 0\n", "x='mine.py': mine.py:2: ZeroDivisionError: division by zero"),
        ("def f(:\n", "mine.py:1: SyntaxError"),
        ("\n\nimport sys\nsys.exit(3)\n", "mine.py:4: SystemExit: 3"),
        ("import not_there_at_all\n", "mine.py:1: ModuleNotFoundError"),
        ("def f():\n    return 1 / 0\n\nf()\n", "mine.py:2: ZeroDivisionError"),
        ("raise ValueError('two\\nlines')\n", "mine.py:1: ValueError: two lines"),
    ],
)
def test_a_file_that_fails_is_named_with_its_line(text, says, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(text)
    before = set(sys.modules)
    with pytest.raises(ConfigError) as caught:
        import_file(path, "x='mine.py'")
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not any(name.startswith("hjax_user_") for name in set(sys.modules) - before)


def test_what_is_no_python_file_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("x = 1\n")
    with pytest.raises(ConfigError, match=r"its name must end in .py"):
        import_file(tmp_path / "mine.txt", "--config=mine.txt")
    with pytest.raises(ConfigError, match="No such file"):
        import_file(tmp_path / "none.py", "--config=none.py")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("mine.py", "must look like path.py:name"),
        ("{folder}/none.py:Outer", "there is no file"),
        ("{folder}/mine.py:Outr", "did you mean Outer?"),
        ("{folder}/mine.py:Outer.Iner", "has no Outer.Iner"),
    ],
)
def test_names_that_are_not_there(spec, says, file):
    with pytest.raises(ConfigError) as caught:
        load_object(spec.format(folder=file.parent), "reward.function")
    assert says in str(caught.value) and str(caught.value).startswith("reward.function=")


SHOP = """
import hjax

def step(reward):
    return answer(reward)

def answer(reward):
    return hjax.Step(hjax.Observation("b"), reward=reward)

def fails(reward):
    return exec("1 / 0")
"""


@pytest.mark.parametrize(
    "name, functions, last",
    [
        ("step", ["step", "answer"], "DataError: Step.reward is 'x'; it must be a finite number"),
        # Another error keeps all frames.
        ("fails", ["fails", "<module>"], "ZeroDivisionError: division by zero"),
    ],
)
def test_of_hjaxs_own_errors_only_the_users_frames_are_told(name, functions, last, tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)
    with pytest.raises(Exception) as caught:
        load_object(f"{tmp_path}/shop.py:{name}", "environment.function")("x")
    lines = user_traceback(caught.value, __file__).splitlines()
    frames = [line.rpartition(" in ")[2] for line in lines if line.startswith("  File ")]
    assert frames == functions
    assert lines[0].startswith("Traceback") and lines[-1].endswith(last)
