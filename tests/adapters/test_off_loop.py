"""A writing call in a thread: its outcome reaches the caller, whatever happens meanwhile."""

import asyncio
import contextvars
import threading

import pytest

from kalos_ctx.adapters.off_loop import settled

NAME = contextvars.ContextVar("name", default="none")


def test_outcome_and_error_reach_the_caller():
    async def both():
        with pytest.raises(ZeroDivisionError):
            await settled(lambda: 1 // 0)
        return await settled(divmod, 7, 2)

    assert asyncio.run(both()) == (3, 1)


def test_call_runs_in_another_thread_with_the_callers_context():
    async def call():
        NAME.set("caller")
        return await settled(lambda: (threading.get_ident(), NAME.get()))

    thread, name = asyncio.run(call())
    assert thread != threading.get_ident()
    assert name == "caller"


@pytest.mark.parametrize("cancellations", [1, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_cancelled_caller_waits_for_the_outcome(cancellations, fails):
    begun, go, done = threading.Event(), threading.Event(), threading.Event()

    def write():
        begun.set()
        go.wait()
        done.set()
        if fails:
            raise OSError("full")

    async def cancelled():
        task = asyncio.create_task(settled(write))
        await asyncio.to_thread(begun.wait)
        for _ in range(cancellations):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not task.done()
        go.set()
        with pytest.raises(OSError if fails else asyncio.CancelledError):
            await task
        assert done.is_set()

    asyncio.run(cancelled())
