"""Tests of report/further."""
