"""Figures of a report, as declarations."""
