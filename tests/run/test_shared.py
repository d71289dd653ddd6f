"""An output folder other than that of rank 0 is refused on its machine, and left empty."""

import json

import pytest

from kit.run import shared
from kit.run.shared import check_shared
from kit.system import lock
from kit.system.errors import UserError

SIGNATURE = {"pid": 1, "at": 5.0}


class Accelerator:
    process_index = 3


@pytest.fixture
def on_another_machine(monkeypatch):
    monkeypatch.setattr(shared, "from_main", lambda make: SIGNATURE)
    monkeypatch.setattr(shared, "leads_other_machine", lambda: True)
    monkeypatch.setattr(shared, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr("accelerate.utils.gather_object", lambda found: found)


def test_the_folder_of_rank_0_is_known_by_its_lock(on_another_machine, tmp_path):
    (tmp_path / lock.NAME).write_text(json.dumps(SIGNATURE))
    check_shared(Accelerator(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [lock.NAME]


@pytest.mark.parametrize("signature", [None, {"pid": 2, "at": 5.0}])
def test_another_folder_is_refused_and_nothing_is_left(on_another_machine, tmp_path, signature):
    folder = tmp_path / "run"
    if signature:
        folder.mkdir()
        (folder / lock.NAME).write_text(json.dumps(signature))
    with pytest.raises(UserError, match=r"output_dir: .* is not that of rank 0; .*\n.*disk that all machines share"):
        check_shared(Accelerator(), folder)
    assert folder.exists() == bool(signature)
    assert not list(tmp_path.rglob(".probe*"))
