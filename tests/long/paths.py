"""Imported by scripts: lets them find what they share with the tests, as pytest's `pythonpath` does."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
folders = [folder for folder in TESTS.rglob("*") if folder.is_dir()]
sys.path[1:1] = map(str, [TESTS.parent, TESTS, *folders])
