"""Audits any program that uses torch.distributed: runs it unchanged and reports what its ranks send.

:mod:`harness.audit.on_path` and :mod:`harness.audit.witness` run inside the program's processes and import nothing of
this project.  They record what the processes send.  All other modules run in ``zeropp audit``.  With
:func:`harness.audit.inside.audit`, an audit runs in the process of a notebook or script.
"""
