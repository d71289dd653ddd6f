"""Command lines, read: what is accepted, and what is wrong with them."""

from kit.config.command_line import read_command_line


def problems(argv):
    """Each problem as ``where -> whole text``."""
    return {problem.where: str(problem) for problem in read_command_line(argv).problems}


def accepted(argv):
    request = read_command_line(argv)
    assert request.problems == []
    return request.recipe
