"""A rank that waits for a word sleeps until it is written."""

from __future__ import annotations

import mmap
import multiprocessing
import threading
import time

import pytest
import torch

from impl.transport.shared_memory import futex_wait, futex_wake

pytestmark = pytest.mark.needs("futex")


def test_a_changed_word_is_not_waited_for() -> None:
    """If the word is not what was last seen, waiting returns at once."""
    word = torch.tensor([7], dtype=torch.int64)
    begin = time.monotonic()
    futex_wait(word.data_ptr(), 6, 60.0)
    assert time.monotonic() - begin < 30


def _write(name: int, ready: object) -> None:
    """In a process: write the shared word, then wake."""
    with mmap.mmap(name, 4096) as memory:
        ready.wait()  # type: ignore[attr-defined]
        word = torch.frombuffer(memory, dtype=torch.int64)
        word[0] = 1
        futex_wake(word.data_ptr())
        del word


def test_another_process_wakes_it() -> None:
    """A waiter in one process goes on when another has written and told."""
    import os

    handle = os.memfd_create("word")
    os.ftruncate(handle, 4096)
    memory = mmap.mmap(handle, 4096)
    word = torch.frombuffer(memory, dtype=torch.int64)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    writer = context.Process(target=_write, args=(handle, ready))
    writer.start()
    threading.Timer(0.2, ready.set).start()
    while int(word[0]) == 0:
        futex_wait(word.data_ptr(), 0, 60.0)
    writer.join()
    assert int(word[0]) == 1
    os.close(handle)
