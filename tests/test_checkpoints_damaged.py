"""Checkpoints that are not what was saved: each is found, by name, and repaired by an older one."""

import json
import os
import shutil

import pytest

from hjax.errors import DataError, RunError
from hjax.models import checkpoint
from hjax.models.checkpoint import Checkpoints


class Done:
    """A worker's answer when its state is on the disk."""

    def result(self):
        return None


def write(folder):
    """Two items, as workers write them."""
    for name, files in (("actor.params", ["d/1", "d/2"]), ("actor.optimizer", ["d/1"])):
        for file in files:
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(range(200)))
    return [Done()]


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path / "checkpoints", keep=3)
    for step in (1, 2, 3):
        made.save(step, write, {"step": step, "algorithm": {}})
    made.wait()
    return made


def flip(path):
    """One bit of the last byte."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def named(folder, item):
    """Another item among the checksums."""
    content = json.loads((folder / "checksums.json").read_text())
    content["items"][item] = {"bytes": 1, "blake2b": "0"}
    (folder / "checksums.json").write_text(json.dumps(content))


DAMAGE = {
    "a bit of an array": lambda c: flip(c / "actor.params" / "d" / "2"),
    "a bit of the optimizer's": lambda c: flip(c / "actor.optimizer" / "d" / "1"),
    "a bit of what the controller wrote": lambda c: flip(c / "controller.json"),
    "a file is missing": lambda c: (c / "actor.params" / "d" / "2").unlink(),
    "a file too many": lambda c: (c / "actor.params" / "d" / "3").write_bytes(b"x"),
    "an item is missing": lambda c: shutil.rmtree(c / "actor.optimizer"),
    "the controller's part is missing": lambda c: (c / "controller.json").unlink(),
    "the checksums are cut": lambda c: os.truncate(c / "checksums.json", 30),
    "the checksums are of another kind": lambda c: (c / "checksums.json").write_text("[1]"),
    "the checksums are without end": lambda c: os.truncate(c / "checksums.json", 2**40),
    "the checksums are of all folders": lambda c: named(c, "../../../../../../../../../.."),
    "the checksums are of the folders above": lambda c: named(c, ".."),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_and_repaired(what, checkpoints):
    folder = checkpoints.folder(3)
    assert checkpoints.verify(3)
    DAMAGE[what](folder)
    with pytest.raises(DataError, match="checkpoints/3: this checkpoint cannot be read") as caught:
        checkpoints.verify(3)
    assert "\n" not in str(caught.value) and "--repair" in str(caught.value)
    [said] = checkpoints.repair()
    assert said.startswith("checkpoint 3 is damaged (") and said.endswith("and now 3.damaged")
    assert checkpoints.latest() == 2 and checkpoints.verify(2)
    # It is kept for whoever wants to look, and in nobody's way.
    checkpoints.save(3, write, {"step": 3})
    checkpoints.wait()
    assert sorted(p.name for p in checkpoints.directory.iterdir()) == ["1", "2", "3", "3.damaged"]


@pytest.mark.extended
@pytest.mark.parametrize("gone", ["before its checksums are read", "after that"])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_called_damaged(
    gone, checkpoints, monkeypatch
):
    def verified(folder, names):
        shutil.rmtree(folder)
        if gone != "after that":
            raise FileNotFoundError(folder)

    monkeypatch.setattr(checkpoint, "verify_checksums", verified)
    with pytest.raises(DataError, match="checkpoints/3: .* removed while it was read.*keep") as at:
        checkpoint.restore_params(checkpoints.folder(3), "actor")
    assert "--repair" not in str(at.value)
    # Of a single one it can only be damage.
    for step in (1, 2):
        shutil.rmtree(checkpoints.folder(step))
    only = checkpoint.damaged_error(checkpoints.folder(2), FileNotFoundError("2"))
    assert "--repair" in str(only)


def test_a_checkpoint_under_another_number_is_refused(checkpoints):
    checkpoints.folder(3).rename(checkpoints.folder(7))
    with pytest.raises(DataError, match="/7: .*saved as step 3"):
        checkpoints.verify(7)
    # Without checksums too, as earlier versions wrote them.
    (checkpoints.folder(7) / "checksums.json").unlink()
    with pytest.raises(DataError, match=r"its controller\.json is not of this step"):
        checkpoints.verify(7)


def test_one_of_an_earlier_version_is_read_and_known_for_it(checkpoints):
    (checkpoints.folder(3) / "checksums.json").unlink()
    assert checkpoints.verify(3) is False


def test_repair_without_a_sound_one_touches_nothing(checkpoints):
    for step in (1, 2, 3):
        flip(checkpoints.folder(step) / "controller.json")
    before = sorted(p.name for p in checkpoints.directory.iterdir())
    with pytest.raises(DataError, match="none of the checkpoints 3, 2, 1 is sound"):
        checkpoints.repair()
    assert sorted(p.name for p in checkpoints.directory.iterdir()) == before


def test_repair_of_what_is_sound_does_nothing(checkpoints):
    assert checkpoints.repair() == [] and checkpoints.latest() == 3


def test_a_failed_write_is_said_without_the_next_save(checkpoints):
    # Even root cannot make a folder of a file.
    checkpoints.folder(4).write_text("")
    checkpoints.save(4, write, {"step": 4})
    checkpoints._completing.join()
    with pytest.raises(RunError, match="checkpoint 4 could not be written: .*Not a dir") as caught:
        checkpoints.check()
    assert "\n" not in str(caught.value)
    checkpoints.check()  # said once
    assert checkpoints.latest() == 3
    checkpoints.folder(4).unlink()
    checkpoints.save(4, write, {"step": 4})
    checkpoints.wait()
    assert checkpoints.verify(4)


def test_what_is_being_removed_has_no_number(checkpoints, monkeypatch):
    """A kill while an old checkpoint is removed leaves none that is half there."""

    removes = shutil.rmtree

    def killed(path, **options):
        if path.name == ".1.removing":
            raise KeyboardInterrupt
        removes(path, **options)

    monkeypatch.setattr(shutil, "rmtree", killed)
    checkpoints.save(4, write, {"step": 4})
    checkpoints._completing.join()
    monkeypatch.undo()
    again = Checkpoints(checkpoints.directory, keep=3)
    assert sorted(p.name for p in again.directory.iterdir()) == ["2", "3", "4"]


def test_a_file_where_checkpoints_go_is_one_line(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(RunError, match="checkpoints: File exists; checkpoints go there"):
        Checkpoints(tmp_path / "checkpoints")


def test_the_sums_stand_in_the_checkpoint(checkpoints):
    found = json.loads((checkpoints.folder(3) / "checksums.json").read_text())
    assert found["step"] == 3
    sizes = {name: item["bytes"] for name, item in found["items"].items()}
    written = (checkpoints.folder(3) / "controller.json").stat().st_size
    assert sizes == {"actor.params": 400, "actor.optimizer": 200, "controller.json": written}
