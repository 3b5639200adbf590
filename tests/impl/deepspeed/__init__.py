"""Tests of impl/deepspeed."""
