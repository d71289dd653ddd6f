"""The picture of ``--scale`` is one SVG with the numbers of the table."""

import xml.etree.ElementTree as ElementTree

from kit.memory.workload import Workload
from kit.tools.plan.hardware import GPUS
from kit.tools.plan.models import find_shape
from kit.tools.plan.picture import picture
from kit.tools.plan.search import scaling

SVG = "{http://www.w3.org/2000/svg}"


def test_each_number_of_gpus_is_a_point_of_both_lines_and_a_higher_share_lies_higher():
    workload = Workload(shape=find_shape("llama-8b"), method="full", length=4096)
    rows = scaling(workload, GPUS["h100"])
    root = ElementTree.fromstring(picture(rows, "a <model> & more"))
    alone, grouped = (
        [tuple(map(float, point.split(","))) for point in line.get("points").split()]
        for line in root.iter(f"{SVG}polyline")
    )
    assert len(alone) == len(grouped) == len(rows) == 10
    assert alone[-1][1] < grouped[-1][1], "4,096 GPUs send less in groups"
    assert [x for x, _ in alone] == sorted(x for x, _ in alone)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"8", "4,096", "64", "100%", "machines", "512"} <= set(texts) and f"{rows[0].host / 2**30:,.0f}" in texts
    assert any("a <model> & more" in text for text in texts)
