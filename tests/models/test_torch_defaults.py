"""torch's defaults belong to the process: what sets them has them alone."""

from threading import Event, Thread

import torch

from qtool.models.torch_defaults import torch_defaults


def test_another_thread_waits_until_the_defaults_are_back() -> None:
    inside, seen = Event(), list[torch.dtype]()

    def other() -> None:
        with torch_defaults():
            seen.append(torch.get_default_dtype())
            inside.set()

    thread = Thread(target=other)
    with torch_defaults(), torch_defaults():
        torch.set_default_dtype(torch.bfloat16)  # as loading a model does
        thread.start()
        assert not inside.wait(0.2)
    thread.join()
    assert seen == [torch.float32] == [torch.get_default_dtype()]
