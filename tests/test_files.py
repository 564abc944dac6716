"""Files are replaced whole, with the permissions of any new file, and nothing else is touched."""

import os
import stat

import pytest

from hjax import files
from hjax.files import remove_parts, replace_file, replacing, saved_steps


@pytest.fixture
def careful():
    """Under a umask that lets nobody else read or write."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_a_files_permissions_need_no_look_at_the_umask(careful, monkeypatch, tmp_path):
    # A look at it is a change of it, in which other threads' files (orbax's) are writable to all.
    monkeypatch.delattr(os, "umask")
    replace_file(tmp_path / "a.json", "{}")
    (tmp_path / "b.json").write_text("{}")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.json", "b.json")]
    assert modes == [0o600, 0o600]


def test_a_replacement_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(OSError, match="full"), replacing(tmp_path / "a") as part:
        part.write_text("half of the n")
        raise OSError("full")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a", "old")]


def test_what_a_kill_left_is_removed(tmp_path):
    with pytest.raises(SystemExit), replacing(tmp_path / "a") as part:
        part.rename(tmp_path / ".a.1234abcd.part")  # as if nobody had been there to remove it
        raise SystemExit
    (tmp_path / "mine.part").write_text("a file of a user's")
    remove_parts(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.part"]


def test_only_whole_checkpoints_count(tmp_path):
    for name in ("3", "12", "007", "²", ".4.saving", "5.damaged"):
        (tmp_path / name).mkdir()
    (tmp_path / "20").write_text("a file in the place of a checkpoint")
    assert saved_steps(tmp_path) == [3, 12]


def test_everything_in_a_workdir_is_written_so(tmp_path, monkeypatch):
    """What design.md promises of all files beside rows: model/, tokenizer, kept batches."""
    import numpy as np

    from hjax.data.tasks import get_task
    from hjax.models.huggingface import write_config
    from hjax.models.model_config import ModelConfig
    from hjax.run.run_metadata import save_skipped_batch

    replaced = []
    replace = os.replace
    monkeypatch.setattr(files.os, "replace", lambda a, b: (replaced.append(b.name), replace(a, b)))
    sizes = {"hidden_size": 8, "mlp_size": 8, "layers": 1, "heads": 1, "kv_heads": 1}
    write_config(tmp_path, ModelConfig(head_dim=8, vocab_size=4, max_length=8, **sizes))
    get_task("sorting").tokenizer().save(tmp_path)
    save_skipped_batch(tmp_path, 3, {"rewards": np.ones(2)})
    found = [p.name for p in tmp_path.rglob("*") if p.is_file()]
    assert sorted(replaced) == sorted(found) and "step-3.npz" in found
    assert np.load(tmp_path / "skipped" / "step-3.npz")["rewards"].tolist() == [1, 1]
