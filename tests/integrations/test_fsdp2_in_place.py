"""FSDP2's gathers into the parameters' memory: what is copied, what is mapped, and when it is free again.

That results are equal to stock's, to the bit, is for test_fsdp2.py, test_fsdp2_uses.py and test_fsdp2_one_rank.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ep_plugin.errors import PeerAborted
from tests.integrations import fsdp2_cases as cases
from tests.ranks import run_ranks, values

if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
    pytest.skip("PyTorch before 2.13 copies", allow_module_level=True)

WIDTH, LAYERS = 64, 3


class _Model(nn.Module):
    """Layers of one size, and an embedding of another in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embed(ids))


def _build(enabled: bool = True, **options: Any) -> Any:
    from ep_plugin.integrations import fsdp2

    torch.manual_seed(0)
    model = _Model()
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if enabled:
        fsdp2.enable(model)
    return model


def _loss(model: Any) -> torch.Tensor:
    return model(torch.arange(16)).pow(2).mean()


def _pair() -> Any:
    from ep_plugin.integrations import pairs

    (pair,) = pairs._pairs.values()
    return pair


def _blocks() -> list[tuple[int, bool]]:
    """Of every block for gathers: its bytes, and whether a tensor of this rank is in it."""
    blocks = _pair().all_gather._engine.blocks._blocks.values()
    return [(block.buffer.nbytes, block.live_owner() is not None) for block in blocks]


def _held() -> int:
    return sum(is_held for _, is_held in _blocks())


# -- copies --------------------------------------------------------------------------------------------------------


def _copied(rank: int, policy: MixedPrecisionPolicy) -> tuple[int, int, int]:
    """The elements that a forward copies, with stock and with ours, and those of all shards."""
    copied = []
    for enabled in (False, True):
        model = _build(enabled, mp_policy=policy)
        _loss(model).backward()
        with torch.no_grad(), cases.Copies() as copies:
            _loss(model)
        copied.append(copies.elements)
    model.reshard()
    return *copied, sum(parameter.to_local().numel() for parameter in model.parameters())


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), cases.BF16], ids=["one dtype", "mixed precision"])
def test_a_gather_copies_or_casts_each_shard_once(policy: MixedPrecisionPolicy) -> None:
    for stock, ours, shards in values(run_ranks(2, _copied, policy)):
        assert ours == shards and stock >= 3 * shards


# -- memory --------------------------------------------------------------------------------------------------------


def _life_of_blocks(rank: int) -> None:
    model, sizes = _build(), set()
    for _ in range(3):
        loss = _loss(model)
        assert not _pair().all_gather.maps(model.embed.weight.data), "no other group has the root's size"
        assert _held() == 0, "views that autograd has saved of the layers' weights hold nothing"
        loss.backward()
        assert _held() == 0
        sizes.add(tuple(_blocks()))
    layer = model.layers[0].weight.numel() * 4
    (blocks,) = sizes  # the same from the first step on
    # In backward a layer is gathered ahead of its use.
    assert sum(nbytes for nbytes, _ in blocks) <= 2 * (layer + 4 * WIDTH) + 2 * 4096
    model.layers[0].unshard()
    assert _held() == 1 and _pair().all_gather.maps(model.layers[0].weight.data)
    model.layers[0].reshard()
    assert _held() == 0


def test_blocks_are_free_when_parameters_are_sharded() -> None:
    values(run_ranks(2, _life_of_blocks))


def _peaks(rank: int, options: dict[str, Any]) -> tuple[int, int, list[int]]:
    peaks = []
    for enabled in (False, True):
        model = _build(enabled, **options)
        _loss(model).backward()
        peaks.append(cases.peak_bytes(lambda model=model: _loss(model).backward()))
    return *peaks, sorted(nbytes for nbytes, _ in _blocks())


@pytest.mark.parametrize(
    ("options", "layers"),
    [({}, 2), ({"reshard_after_forward": False}, LAYERS), ({"mp_policy": cases.BF16}, 2)],
    ids=["resharded", "kept after forward", "mixed precision"],
)
def test_memory_is_less_than_stock_s_and_a_block_for_each_layer_that_is_unsharded(
    options: dict[str, Any], layers: int
) -> None:
    """Blocks stay, and PyTorch allocates no unsharded layers and no buffers for gathers."""
    for stock, ours, blocks in values(run_ranks(2, _peaks, options)):
        assert len(blocks) == layers and len(set(blocks)) == 1
        assert ours < stock


# -- uses ----------------------------------------------------------------------------------------------------------


def _never_waited_for(enabled: bool) -> list[torch.Tensor]:
    """Gathers that no forward uses, dropped by the end of a backward."""
    model = _build(enabled)
    spare = model.layers[2]
    _loss(model).backward()
    spare.unshard(async_op=True)
    model.layers[2] = nn.Identity()
    _loss(model).backward()
    assert not enabled or _held() == 0
    model.layers[2] = spare
    _loss(model).backward()
    return [parameter.grad.to_local() for parameter in model.parameters()]


def _handed_over(enabled: bool) -> list[torch.Tensor]:
    """To stock while gathered and not waited for, and while unsharded."""
    from ep_plugin.integrations import fsdp2

    model = _build(enabled)
    handles = [layer.unshard(async_op=True) for layer in model.layers]
    handles[0].wait()
    if enabled:
        fsdp2.disable(model)
    wholes = []
    for handle, layer in zip(handles, model.layers, strict=True):
        handle.wait()
        wholes.append(layer.weight.detach().clone())
        layer.reshard()
    _loss(model).backward()
    return wholes + [parameter.grad.to_local() for parameter in model.parameters()]


def _evaluated(enabled: bool) -> list[torch.Tensor]:
    """A root that stays unsharded after forward, over steps, and reads what has been trained."""
    model = _build(enabled)
    results = []
    for _ in range(2):
        _loss(model).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().sub_(parameter.grad.to_local())
        model.zero_grad()
        with torch.no_grad():
            results += [_loss(model), _loss(model)]
        model.reshard()
    return results


USES: dict[str, Callable[[bool], list[torch.Tensor]]] = {
    "never waited for": _never_waited_for,
    "handed over": _handed_over,
    "evaluated": _evaluated,
}


def _run_uses(rank: int) -> dict[str, Any]:
    from tests.integrations.beside_stock import differing

    return differing(USES)


def test_as_with_stock() -> None:
    for rank in values(run_ranks(2, _run_uses)):
        assert rank == {name: [] for name in USES}


def _kept_storage(rank: int) -> tuple[bool, bool]:
    model = _build()
    if not hasattr(model, "set_keep_unsharded_storage"):  # before 2.15
        return True, True
    model.set_keep_unsharded_storage(True)
    places = []
    for _ in range(2):
        _loss(model).backward()
        places.append([fsdp_param._unsharded_param.data_ptr() for group in _groups(model) for fsdp_param in group])
    model.layers[0].unshard()
    return places[0] == places[1], not _pair().all_gather.maps(model.layers[0].weight.data)


def _groups(model: Any) -> list[Any]:
    from ep_plugin.integrations.fsdp2.hooks import groups_of

    return [group.fsdp_params for group in groups_of(model)]


def test_memory_that_fsdp2_keeps_is_left_to_it() -> None:
    assert values(run_ranks(2, _kept_storage)) == [(True, True)] * 2


def _fails_in_a_gather(rank: int) -> tuple[str, bool]:
    model = _build()
    _loss(model).backward()
    if rank == 1:
        _pair().all_gather.abort("a test")
    with pytest.raises(PeerAborted):
        _loss(model)
    return all(group[0].sharded_state.name == "SHARDED" for group in _groups(model)), _held() == 0


def test_a_gather_that_fails_leaves_parameters_sharded() -> None:
    assert values(run_ranks(2, _fails_in_a_gather)) == [(True, True)] * 2
