"""What pip installs without a clone: the scripts, recipes and configs are in the wheel, and the commands find them."""

import os
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from helpers import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this clone, built from a copy in which nothing stands that git does not know."""
    folder = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.rstrip("\0").split("\0"):
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/")):
            (folder / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "clone" / name)
    code = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=folder / "clone", check=True, timeout=120)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder for ``PYTHONPATH`` with the files of the wheel, as pip puts them into site-packages."""
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
    return folder


@pytest.fixture
def call(installed, tmp_path):
    """Run ``kit WORDS`` where there is no clone; return what was printed."""

    def run(*words):
        environment = {**os.environ, "PYTHONPATH": str(installed)}
        command = [sys.executable, "-P", "-m", "kit.cli.main", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_a_wheel_has_every_file_that_the_kit_opens_and_no_other_package(wheel):
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"kit"}
    for folder, inside in (("kit", "kit"), ("recipes", "kit/shipped/recipes")):
        tracked = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True).stdout.split()
        wanted = {inside + name.removeprefix(folder) for name in tracked if (ROOT / name).is_file()}
        assert wanted and wanted - names == set()
    assert "kit/shipped/accelerate_configs/fsdp.yaml" in names


def test_the_pages_that_messages_name_are_found(call, installed):
    *_, line = call("--help").splitlines()
    assert line.endswith(f" are in {installed / 'kit/shipped'}")
    named = {
        page
        for path in [*installed.glob("kit/**/*.py")]
        for page in re.findall(r"\bdocs/[a-z-]+\.md", path.read_text())
    }
    assert len(named) > 5 and all((installed / "kit/shipped" / page).is_file() for page in named)


def test_the_first_commands_run_from_a_wheel(call, tmp_path):
    assert "--recipe llama-8b-qlora" in call("plan", "--recipe", "llama-8b-qlora", "--gpu", "rtx4090")
    call("train", "--config", "single", "--max_steps", "2", "--max_eval_samples", "2")
    assert (tmp_path / "runs/tiny-single/final/model.safetensors").is_file()
    assert (tmp_path / "runs/tiny-single/report.html").is_file()
