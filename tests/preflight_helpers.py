"""A topology of one process, and the fields in which the checks find problems."""

import pytest

from kit.preflight import preflight
from kit.strategy.strategies import SINGLE
from kit.strategy.topology import Topology
from kit.system.errors import UserError

ONE_PROCESS = Topology(
    strategy=SINGLE, config_name="single", num_processes=1, mixed_precision="no", device_type="cpu", cpu_dry_run=False
)


def wrong(recipe, *args, **options):
    with pytest.raises(UserError) as caught:
        preflight.check(recipe, *args, **options)
    return [problem.where for problem in caught.value.problems]
