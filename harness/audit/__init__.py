"""Audits any program that uses torch.distributed: runs it unchanged and reports what its ranks send.

:mod:`harness.audit.witness` runs inside the program's processes and imports nothing of this project; all other
modules run in ``zeropp audit`` or, with :func:`harness.audit.inside.audit`, in the process of a notebook.
"""
