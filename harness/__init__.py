"""Runs experiments: reads suite files, runs their trials on ranks, measures them and writes their records."""
