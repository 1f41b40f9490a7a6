from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `boards` and `pages`

from boards import Board


@pytest.fixture
def board(tmp_path: Path) -> Board:
    """No fake plugin yet."""
    return Board(tmp_path)
