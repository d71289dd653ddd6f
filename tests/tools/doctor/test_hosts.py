"""Machines are compared with that of rank 0, fact by fact."""

import pytest

from kit.tools.doctor.hosts import compare_clocks, compare_facts, machine_facts


def test_another_version_or_code_on_a_rank_is_named_with_both(recipe):
    own = machine_facts(recipe, "cpu")
    assert compare_facts([own, dict(own)], ["a", "a"]).status == "ok"
    other = own | {"torch": "1.0", "code of kit/": "abc"}
    result = compare_facts([own, own, other], ["a", "a", "b"])
    assert result.status == "fail" and "pip install" in result.fix
    assert f"torch 1.0 on rank 2 (b), {own['torch']} on rank 0" in result.found
    assert "code of kit/ abc on rank 2 (b)" in result.found


def test_another_gpu_is_only_a_warning(recipe):
    own = machine_facts(recipe, "H100")
    result = compare_facts([own, own | {"device": "A100"}], ["a", "b"])
    assert result.status == "warn" and "device A100 on rank 1 (b), H100 on rank 0" in result.found


def test_another_recipe_is_found_by_what_identifies_a_run(recipe):
    changed = recipe.model_copy(update={"seed": 5})
    assert compare_facts([machine_facts(recipe, "cpu"), machine_facts(changed, "cpu")], ["a", "b"]).status == "fail"
    changed = recipe.model_copy(update={"logging_steps": 5})
    assert compare_facts([machine_facts(recipe, "cpu"), machine_facts(changed, "cpu")], ["a", "b"]).status == "ok"


@pytest.mark.parametrize(("other", "status"), [(104.0, "ok"), (1000.0, "warn")])
def test_clocks_that_differ_are_named(other, status):
    result = compare_clocks([100.0, other, 100.5], ["a", "b", "a"])
    assert result.status == status
    assert status == "ok" or result.found == "b is 900.0 s ahead of a"
