"""A metric of the user gets both texts and the row, and what is wrong with it is said at its own line."""

import pytest

from kit.config.recipe_file import read_recipe_file
from kit.scoring import own_metric
from kit.scoring.own_metric import MetricError, load, score
from kit.system.errors import UserError


@pytest.fixture
def written(tmp_path):
    """Writes a file with the lines, and returns ``FILE.py:f``."""

    def written(*lines):
        path = tmp_path / "mine.py"
        path.write_text("\n".join(lines) + "\n")
        load.cache_clear()
        return f"{path}:f"

    yield written
    load.cache_clear()


def message(call, *args):
    with pytest.raises(UserError) as caught:
        call(*args)
    return str(caught.value)


def scored(name, row=None):
    return score(name, "yes", "no", row or {}, "eval.jsonl:17")


def test_it_gets_the_expected_text_the_answer_and_a_copy_of_the_row(written):
    name = written("def f(expected, answer, row):", "    row['k'] += 1", "    return len(expected) * 10 + row['k']")
    row = {"k": 1}
    assert (scored(name, row), scored(name, row), row) == (32.0, 32.0, {"k": 1})


def test_it_gets_the_messages_and_the_environment_if_it_names_them(written):
    name = written(
        "def f(expected, answer, row, *, environment, completion=()):",
        "    return environment[completion[0]['content']]",
    )
    assert score(name, "yes", "no", {}, "", environment={"no": 2}) == 2.0
    completion = [{"role": "assistant", "content": "Wait."}, {"role": "tool", "name": "add", "content": "4"}]
    assert score(name, "yes", "no", {}, "", completion, {"Wait.": 3}) == 3.0


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("def f(answer, row, factor=2): return len(answer) * factor + row['k']", 5.0),
        ("def f(completion, *, environment): return len(completion) + environment", 4.0),
        ("def f(row, **more): return len(more)", 0.0),
    ],
)
def test_one_without_expected_gets_what_it_names_and_needs_no_reference_answer(written, line, expected):
    name = written(line)
    assert not own_metric.takes_expected(name)
    assert score(name, None, "no", {"k": 1}, "", environment=3) == expected


def test_one_with_another_first_parameter_takes_the_reference_answer(written):
    assert own_metric.takes_expected(written("def f(wanted, answer, row): return 1"))


@pytest.mark.parametrize(
    ("lines", "where", "found"),
    [
        (["import json", "import no_such_library"], "mine.py:2", "no_such_library"),
        (["def f(a, b, c):", "    return 1 +"], "mine.py:2", "SyntaxError"),
        (["x = 1", "raise SystemExit(3)"], "mine.py:2", "SystemExit"),
        (["def f(answer, k):", "    return 1"], "mine.py:1", "missing a required argument: 'k'"),
        (["", "def f(a, b):", "    return 1"], "mine.py:2", "too many positional arguments"),
        (["def f(answer, expected, row):", "    return 1"], "mine.py:1", "answer before expected"),
        (["def g(a, b, c):", "    return 1"], "mine.py:f", "no function 'f'"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_line(written, lines, where, found):
    text = message(load, written(*lines))
    assert where in text and found in text


@pytest.mark.parametrize("value", ["'0.5'", "None", "float('nan')", "[1]"])
def test_only_a_finite_number_is_a_result(written, value):
    text = message(scored, written("def f(a, b, c):", f"    return {value}"))
    assert "mine.py:1: f returned" in text and "eval.jsonl:17" in text


def test_an_error_names_the_line_of_the_user_and_the_row(written):
    name = written("import json", "def f(a, b, c):", "    x = 1", "    return json.loads('{')")
    with pytest.raises(MetricError) as caught:
        scored(name)
    text = str(caught.value)
    assert "mine.py:4: JSONDecodeError" in text and "eval.jsonl:17" in text and "'no'" in text


def test_a_recipe_may_not_name_code(tmp_path, monkeypatch):
    path = tmp_path / "mine.yaml"
    path.write_text("seed: 1\nmetrics: number,mine.py:f\n")
    monkeypatch.setattr(own_metric, "load", lambda name: pytest.fail("it was run"))
    file = read_recipe_file(str(path))
    (problem,) = file.problems
    assert problem.where.endswith("mine.yaml:2 metrics") and "--metrics number,mine.py:f" in problem.fix
    assert "metrics" not in file.values
