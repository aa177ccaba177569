"""Assertions of the shared checker explain themselves."""

import pytest

pytest.register_assert_rewrite("tests.samplers.marked")
