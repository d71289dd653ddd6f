"""A path in the folder of a run is known to be of that run."""

from kit.run.opening import run_of


def test_final_and_checkpoints_belong_to_their_run(tmp_path):
    run = tmp_path / "run"
    for path in (run / "final", run / "checkpoints/step-00000001", tmp_path / "other/final"):
        path.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    assert run_of(str(run / "final")) == run_of(str(run / "checkpoints/step-00000001")) == run / "run.json"
    assert run_of(str(tmp_path / "other/final")) is None and run_of("owner/model") is None
