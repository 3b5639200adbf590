"""Declares the figures of a page: question, data, mark and caption of each (:class:`report.draw.figure.Figure`)."""
