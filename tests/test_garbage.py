"""What is made while the collector is held back for imports is old afterwards, and what others froze stays frozen."""

import gc
import sys

import pytest

import ecrl
from ecrl.garbage import importing, uncollected


def _is_old(made):
    return any(found is made for found in gc.get_objects(generation=2))


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)


def test_no_collection_of_the_young_goes_through_what_was_imported(capsys):
    before = [[]]
    with importing():
        import this  # noqa: F401

        made = [[]]
        assert not _is_old(made)
    assert _is_old(made) and _is_old(before) and not _is_old([[]]) and not gc.get_freeze_count()
    assert gc.isenabled()


def test_what_became_garbage_is_found_later():
    freed = []

    class Noted:
        def __del__(self):
            freed.append(True)

    with importing():
        import this  # noqa: F401

        ring = [Noted()]
        ring.append(ring)
        del ring
        assert not freed
    gc.collect()
    assert freed


def test_a_collector_that_is_off_and_what_is_frozen_stay_so():
    gc.disable()
    gc.freeze()
    try:
        with importing():
            import this  # noqa: F401
        with pytest.raises(ZeroDivisionError), uncollected():
            raise ZeroDivisionError
        assert gc.get_freeze_count() and not gc.isenabled()
    finally:
        gc.unfreeze()
        gc.enable()


def test_what_is_imported_already_leaves_the_young_young():
    assert ecrl.save
    young = [[]]
    assert ecrl.save and not _is_old(young)
