"""Runs experiments: reads suite files, runs their trials on ranks, measures them and writes their records.

A suite is a question and the training runs, called trials, that answer it.
"""
