"""The current stream: switched, restored, and found again, as torch's own functions do it."""

from __future__ import annotations

import pytest
import torch

from ep_plugin.runtime.streams import caller_stream, current_stream, on_stream


@pytest.mark.gpu(1)
def test_streams_are_switched_and_restored() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    outer, inner = torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1)
    before = torch.cuda.current_stream(device)
    with torch.cuda.stream(outer):
        with on_stream(inner):
            assert torch.cuda.current_stream(device) == inner == caller_stream(device)
            assert current_stream(device) == inner.cuda_stream
            with on_stream(before):
                assert torch.cuda.current_stream(device) == before == caller_stream(device)
            assert caller_stream(device) is caller_stream(device)
        assert torch.cuda.current_stream(device) == outer == caller_stream(device)
        with pytest.raises(KeyError), on_stream(inner):
            raise KeyError
        assert torch.cuda.current_stream(device) == outer
    assert torch.cuda.current_stream(device) == before == caller_stream(device)


@pytest.mark.gpu(2)
def test_a_stream_of_another_device_changes_nothing_here() -> None:
    torch.cuda.set_device(0)
    here, there = torch.cuda.Stream(0), torch.cuda.Stream(1)
    with torch.cuda.stream(here):
        with on_stream(there):
            assert torch.cuda.current_device() == 1 and torch.cuda.current_stream(1) == there
        assert torch.cuda.current_device() == 0 and torch.cuda.current_stream(0) == here
        assert torch.cuda.current_stream(1) != there
