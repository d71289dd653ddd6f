"""``kit doctor`` as a user types it: lines while it works, and an exit status."""

from types import SimpleNamespace

from kit.cli.main import main


def test_without_arguments_it_checks_this_machine_for_the_recipe_tiny(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok    launch ") and lines[-1].endswith(" 0 fail")
    names = [line.split()[1] for line in lines[:-1]]
    assert names == ["launch", "driver", "precision", "model", "data", "GPUs", "memory", "disk"]
    assert list(tmp_path.iterdir()) == []


def test_a_failed_check_is_status_2(capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=0))
    assert main(["doctor"]) == 2
    assert "\nfail  disk              output_dir: 0 bytes free" in capsys.readouterr().out
    assert main(["doctor", "--timeout", "0"]) == 2
    assert "--timeout: " in capsys.readouterr().err
