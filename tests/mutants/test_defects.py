"""A defect that does not apply any more would prove nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import asyncache
from tests.mutants.defects import DEFECTS

ROOT = Path(asyncache.__file__).parent


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_a_defect_changes_one_place_and_compiles(defect):
    text = (ROOT / defect.path).read_text(encoding="utf-8")
    assert text.count(defect.old) == 1
    assert defect.new != defect.old
    compile(text.replace(defect.old, defect.new), defect.path, "exec")


def test_defects_are_many_and_each_has_a_name_of_its_own():
    names = {defect.name for defect in DEFECTS}
    assert len(names) == len(DEFECTS) >= 25
