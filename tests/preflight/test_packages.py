"""What a run does not use is not imported, though libraries would import it wherever it is installed."""

import gc
import os
import subprocess
import sys

import pytest
from helpers import ROOT, matrix

from kit.preflight.packages import leave_out_packages

PACKAGES = ["bitsandbytes", "scipy", "torchao"]


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({"method": "lora"}, PACKAGES),
        ({"method": "qlora"}, ["scipy", "torchao"]),
        ({"optim": "adamw_8bit"}, ["scipy", "torchao"]),
        ({"objective": "distil", "teacher": "someone/model", "teacher_in_4bit": True}, ["scipy", "torchao"]),
        ({"qat": "int4_weight_only"}, ["bitsandbytes", "scipy"]),
        ({"metrics": ["mine.py:count"], "predict_with_generate": True}, []),  # it may import anything
        ({"trust_remote_code": True}, []),
    ],
)
def test_packages_that_a_run_does_not_use_count_as_not_installed(changes, left_out, recipe, monkeypatch):
    settings, modules = recipe(**changes), {}
    monkeypatch.setattr(sys, "modules", modules)
    leave_out_packages(settings)
    assert modules == {}  # in a process that is not the kit's own
    monkeypatch.setattr(gc, "isenabled", lambda: False)
    leave_out_packages(settings)
    assert modules == dict.fromkeys(left_out)
    modules |= dict.fromkeys(left_out, "imported")
    leave_out_packages(settings)
    assert modules == dict.fromkeys(left_out, "imported")


@pytest.mark.slow
@pytest.mark.parametrize("method", matrix(["lora", "full"]))
def test_a_run_imports_what_it_uses_and_collects_garbage_afterwards(method, tmp_path):
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    flags = ["--config", "single", "--method", method, "--max_steps", "1", "--predict_with_generate", "false"]
    code = f"""
import gc, runpy, sys
sys.argv = {["finetune.py", *flags, "--output_dir", str(tmp_path / "run")]}
sys.path.insert(0, {str(ROOT)!r})
from kit.system import interrupt
interrupt.leave_on_ctrl_c()
runpy.run_path({str(ROOT / "recipes/finetune.py")!r})["main"]()
print(gc.isenabled(), gc.get_freeze_count() > 100_000, *sorted(name for name in sys.modules if sys.modules[name]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=own)
    assert result.returncode == 0, result.stderr
    collects, keeps, *imported = result.stdout.splitlines()[-1].split()
    assert (collects, keeps) == ("True", "True")
    assert ("peft" in imported) == (method == "lora")
    assert not {*PACKAGES, "pandas", "pyarrow", "datasets", "torch._inductor.compile_fx"} & set(imported)
