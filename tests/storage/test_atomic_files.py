"""Files that are whole or absent, at whichever step a writer is killed or finds no room."""

import os
from contextlib import suppress

import pytest

from ecrl.storage import atomic_files as durable
from ecrl.storage.atomic_files import (
    append,
    complete_folder,
    remove_folder,
    remove_leftovers,
    replace_file,
    write_folder,
)

OLD, NEW = {"a": b"old", "b": b"1"}, {"a": b"new", "b": b"2", "c": b""}


def content(path):
    return {p.name: p.read_bytes() for p in complete_folder(path).iterdir()}


class Killed(BaseException):
    """Stands for SIGKILL: nothing runs after it, not even cleaning up."""


def steps(monkeypatch, stop, error):
    """Raise `error` in the place of the `stop`-th thing that is done to the disk; all that is done is counted."""
    done = []

    def counted(module, name):
        do = getattr(module, name)

        def step(*args, **kwargs):
            done.append(name)
            if len(done) == stop or (isinstance(error, Killed) and len(done) > stop):
                raise error
            return do(*args, **kwargs)

        monkeypatch.setattr(module, name, step)

    for module, name in ((os, "fsync"), (os, "rename"), (os, "mkdir"), (durable.shutil, "rmtree")):
        counted(module, name)
    return done


@pytest.mark.parametrize("error", [Killed(), OSError(28, "No space left on device")], ids=["killed", "full"])
@pytest.mark.parametrize("stop", range(1, 12))
def test_a_folder_is_the_old_or_the_new_one_wherever_writing_ends(tmp_path, stop, error):
    path = tmp_path / "saved"
    write_folder(path, OLD)
    with pytest.MonkeyPatch.context() as patched:
        done = steps(patched, stop, error)
        with suppress(Killed, OSError):
            write_folder(path, NEW)
        ended = len(done) < stop
    assert content(path) in ((NEW,) if ended else (OLD, NEW))
    remove_leftovers(tmp_path)
    write_folder(path, NEW)
    assert content(path) == NEW and [p.name for p in tmp_path.iterdir()] == ["saved"]


def test_the_old_one_stays_until_the_new_one_is_synced(tmp_path, monkeypatch):
    path = tmp_path / "saved"
    write_folder(path, OLD)
    done = steps(monkeypatch, 0, None)
    write_folder(path, NEW)
    last = len(done) - done[::-1].index("fsync")
    assert done.count("fsync") == 5  # three files, their folder, and the one that names it
    assert done[last:] == ["rmtree"] and "rename" in done[:last]


def test_nothing_is_left_of_a_folder_under_its_name_when_removing_it_is_cut_short(tmp_path, monkeypatch):
    write_folder(tmp_path / "saved", OLD)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(durable.shutil, "rmtree", lambda *a, **k: None)
        remove_folder(tmp_path / "saved")
    assert not (tmp_path / "saved").exists() and len(list(tmp_path.iterdir())) == 1
    remove_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    replace_file(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_append_adds_to_the_end(tmp_path):
    for part in (b"a", b"bc", b""):
        append(tmp_path / "log", part)
    assert (tmp_path / "log").read_bytes() == b"abc"
    with pytest.raises(OSError, match="No space left"):
        append(tmp_path.__class__("/dev/full"), b"a")
