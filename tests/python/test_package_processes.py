# SPDX-License-Identifier: Apache-2.0
"""The package under threads, fork and spawn."""

import multiprocessing
import os
import sys
import threading
import time

import numpy
import pytest
from package_support import TINY, random_tokens

import espalier

X, IDS, WEIGHTS = random_tokens(40, 256, 16, 4)


@pytest.fixture(scope="module")
def layer0():
    return espalier.prepare(espalier.Checkpoint(TINY), 0)


@pytest.fixture(scope="module")
def plan(layer0):
    return espalier.plan(layer0, max_tokens=40, top_k=4)


def compute(plan, experts):
    return numpy.asarray(espalier.run(plan, experts, X, IDS, WEIGHTS))


def start(functions):
    """Runs each in a thread of its own; what one raises is raised here."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_threads_share_a_plan(plan, layer0):
    expected = compute(plan, layer0)
    results = [[] for _ in range(6)]

    def work(mine):
        for _ in range(20):
            mine.append(compute(plan, layer0))

    start([lambda mine=mine: work(mine) for mine in results])
    assert all(numpy.array_equal(found, expected) for mine in results for found in mine)
    assert sum(len(mine) for mine in results) == 120


def test_threads_load_at_once():
    checkpoint = espalier.Checkpoint(TINY)
    found = {}

    def load(position):
        seen = []
        experts = espalier.prepare(checkpoint, position, hash=True, progress=lambda done, total: seen.append(done))
        found.setdefault(position, set()).add(experts.content_sha256)
        checkpoint.read("lm_head.trellis")
        assert seen

    start([lambda position=position: load(position) for position in (0, 1, 2, 3, 0, 1)])
    assert [len(found[position]) for position in range(4)] == [1, 1, 1, 1]
    assert len(set().union(*found.values())) == 4


def test_the_gil_is_released():
    """A thread goes on counting while another is inside one long call."""
    experts = espalier.prepare(espalier.Checkpoint(TINY), 0)
    x, ids, weights = random_tokens(400, 256, 16, 4)
    plan = espalier.plan(experts, max_tokens=400, top_k=4, executor="reference")
    # Otherwise the interpreter would have to take the GIL from a thread that never gives it.
    before = sys.getswitchinterval()
    counted = []
    inside, done = threading.Event(), threading.Event()

    def count():
        inside.wait()
        while not done.is_set():
            counted.append(1)
            time.sleep(0)

    def call():
        inside.set()
        espalier.run(plan, experts, x, ids, weights)
        counted_inside = len(counted)
        done.set()
        assert counted_inside > 100

    try:
        sys.setswitchinterval(1000)
        start([count, call])
    finally:
        sys.setswitchinterval(before)


def test_closing_while_others_run(plan):
    """A run keeps the memory of a package that is closed under it."""
    expected = compute(plan, espalier.prepare(espalier.Checkpoint(TINY), 0))
    for _ in range(10):
        experts = espalier.prepare(espalier.Checkpoint(TINY), 0)
        ended = []

        def work(experts=experts, ended=ended):
            try:
                for _ in range(1000):
                    assert numpy.array_equal(compute(plan, experts), expected)
            except espalier.UsageError as error:
                ended.append(str(error))

        closer = threading.Timer(0.02, experts.close)
        closer.start()
        start([work, work, work])
        closer.join()
        assert len(ended) == 3 and all("used after close()" in text for text in ended)


def child(queue, expected, plan=None, experts=None):
    """In another process: with what was inherited, or with what it makes itself."""
    try:
        if plan is None:
            experts = espalier.prepare(espalier.Checkpoint(TINY), 0)
            plan = espalier.plan(experts, max_tokens=40, top_k=4)
        same = all(numpy.array_equal(compute(plan, experts), expected) for _ in range(3))
        try:
            espalier.Checkpoint("/absent")
        except espalier.IoError:
            queue.put("same" if same else "different")
    except BaseException as error:  # noqa: BLE001
        queue.put(repr(error))


def ends_well(process, queue):
    process.start()
    try:
        return queue.get(timeout=120)
    finally:
        process.join(60)
        if process.is_alive():
            process.kill()
        assert process.exitcode == 0


def test_fork_with_what_was_inherited(plan, layer0):
    context = multiprocessing.get_context("fork")
    expected = compute(plan, layer0)  # the parent's threads exist by now
    for _ in range(3):
        queue = context.Queue()
        assert ends_well(context.Process(target=child, args=(queue, expected, plan, layer0)), queue) == "same"
    assert numpy.array_equal(compute(plan, layer0), expected)


def test_fork_that_loads_itself(plan, layer0):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    assert ends_well(context.Process(target=child, args=(queue, compute(plan, layer0))), queue) == "same"


def test_fork_while_threads_run(plan, layer0):
    expected = compute(plan, layer0)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            compute(plan, layer0)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if numpy.array_equal(compute(plan, layer0), expected) else 1)
            for _ in range(600):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    break
                time.sleep(0.1)
            else:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
            assert ended == pid and status == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_spawn(plan, layer0):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    assert ends_well(context.Process(target=child, args=(queue, compute(plan, layer0))), queue) == "same"


def test_handles_are_not_pickled(plan, layer0):
    """They hold memory of this process: another makes its own."""
    import pickle

    for thing in (plan, layer0, espalier.Checkpoint(TINY)):
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(thing)


def test_interpreter_ends_with_packages_alive():
    import subprocess

    code = (
        "import espalier, threading, numpy\n"
        f"checkpoint = espalier.Checkpoint({str(TINY)!r})\n"
        "experts = espalier.prepare(checkpoint, 0)\n"
        "plan = espalier.plan(experts, max_tokens=4, top_k=4)\n"
        "x, ids, w = numpy.ones((4, 256), 'f4'), numpy.zeros((4, 4), 'i4'), numpy.ones((4, 4), 'f4')\n"
        "keep = [numpy.asarray(espalier.run(plan, experts, x, ids, w)) for _ in range(3)]\n"
        "def forever():\n"
        "    while True: espalier.run(plan, experts, x, ids, w)\n"
        "threading.Thread(target=forever, daemon=True).start()\n"
        "keep.append(keep)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
