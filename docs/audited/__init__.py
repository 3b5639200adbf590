"""Audits training programs of every kind, and writes what they sent next to closed forms."""
