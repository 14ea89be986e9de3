"""Collectives between processes, by torch.distributed and by a vendor's library; SGLang's groups by hooks."""

from __future__ import annotations

import multiprocessing
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_aspects.errors import ConfigError
from sgl_aspects.runtime.communicator import (
    Communicator,
    FlagCXCommunicator,
    TorchCommunicator,
    make_communicator,
)

FLAGCX = """
import torch.distributed as dist
def make(store, rank, size, timeout):
    print("made by flagcx")
    return dist.ProcessGroupGloo(store, rank, size, timeout)
dist.Backend.register_backend("flagcx", make, devices=["cpu"])
"""


def collectives(communicator: Communicator) -> None:
    rank = communicator.rank
    mine = torch.arange(4.0).view(2, 2) + 10 * rank
    other = torch.arange(4.0).view(2, 2) + 10 * (1 - rank)
    assert torch.equal(communicator.all_reduce(mine.clone()), mine + other)
    assert torch.equal(communicator.reduce_scatter(mine.clone()), (mine + other)[rank : rank + 1])
    assert torch.equal(communicator.reduce_scatter(mine.clone(), 1), (mine + other)[:, rank : rank + 1])
    both = (mine, other) if rank == 0 else (other, mine)
    assert torch.equal(communicator.all_gather(mine), torch.cat(both, -1))
    assert torch.equal(communicator.all_gather(mine.T, 0), torch.cat([each.T for each in both], 0))
    assert torch.equal(communicator.broadcast(mine.clone(), 1), both[1])
    values = {"x": mine, "ids": torch.tensor([3, 4]), "name": "batch", "none": None}
    got = communicator.broadcast_tensor_dict(values if rank == 1 else None, source=1)
    assert (got["name"], got["none"]) == ("batch", None)
    assert torch.equal(got["x"], both[1])
    if rank == 0:
        communicator.send(mine, 1)
        communicator.send_tensor_dict(values, 1)
    else:
        assert torch.equal(communicator.recv((2, 2), torch.float32, 0), other)
        got = communicator.recv_tensor_dict(0)
        assert torch.equal(got["x"], other)
        assert got["ids"].tolist() == [3, 4]
        assert list(got) == list(values)
    with pytest.raises(ConfigError, match="does not divide dimension 0"):
        communicator.reduce_scatter(torch.ones(3))
    communicator.close()


def work(rank: int, url: str) -> None:
    collectives(make_communicator(rank, 2, url))


def through_sglang(rank: int, url: str) -> None:
    """A coordinator with SGLang's names: the hooked methods must run, its own must not."""
    import torch.distributed as dist

    import sgl_aspects as aspects
    from sgl_aspects.engines.sglang import communicator as sglang_communicator

    module = types.ModuleType("sglang.srt.distributed.parallel_state")
    source = (
        "class GroupCoordinator:\n"
        "    def all_reduce(self, input_): raise AssertionError('its own')\n"
        "    def all_gather(self, input_, dim=-1, output_tensor_list=None):\n"
        "        if output_tensor_list is not None: return 'its own'\n"
        "        raise AssertionError('its own')\n"
        "    def broadcast(self, input_, src=0): raise AssertionError('its own')\n"
        "    def all_gather_into_tensor(self, output, input): raise AssertionError('its own')\n"
        "    def reduce_scatter_tensor(self, output, input): raise AssertionError('its own')\n"
        "    def send(self, tensor, dst=None): raise AssertionError('its own')\n"
        "    def recv(self, size, dtype, src=None): raise AssertionError('its own')\n"
    )
    exec(source, module.__dict__)
    sys.modules[module.__name__] = module
    sglang_communicator.attach("torch")
    aspects.HookRegistry.apply_hooks()
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
    coordinator = module.GroupCoordinator()
    coordinator.device_group = dist.new_group([0, 1])
    coordinator.ranks, coordinator.rank_in_group, coordinator.world_size = [0, 1], rank, 2
    assert coordinator.all_reduce(torch.ones(2)).tolist() == [2, 2]
    assert coordinator.all_gather(input_=torch.tensor([float(rank)]), dim=0).tolist() == [0, 1]
    assert coordinator.all_gather(torch.ones(1), 0, output_tensor_list=[]) == "its own"
    assert coordinator.broadcast(torch.tensor([float(rank)]), src=1).tolist() == [1]
    output = torch.zeros(2)
    coordinator.all_gather_into_tensor(output, torch.tensor([float(rank)]))
    assert output.tolist() == [0, 1]
    coordinator.reduce_scatter_tensor(output[:1], input=torch.tensor([1.0, 5.0]))
    assert output[0] == (2, 10)[rank]
    if rank == 0:
        coordinator.send(torch.tensor([7.0]))
    else:
        assert coordinator.recv(torch.Size([1]), dtype=torch.float32).tolist() == [7]
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine may have one device, and two processes need two: NCCL is the conformance kit's to show."""
    monkeypatch.setenv("SGLANG_PLATFORM", "cpu")


def in_two_processes(target: Callable[[int, str], None], folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    url = f"file://{folder / 'meeting'}"
    processes = [context.Process(target=target, args=(rank, url)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0, 0]


def test_collectives_between_two_processes(tmp_path: Path) -> None:
    in_two_processes(work, tmp_path)


@pytest.mark.slow
def test_a_vendors_library_where_its_path_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    plugin = tmp_path / "plugin" / "torch"
    plugin.mkdir(parents=True)
    (plugin / "flagcx.py").write_text(FLAGCX)
    monkeypatch.setenv("FLAGCX_PATH", str(tmp_path))
    in_two_processes(work, tmp_path)
    assert capfd.readouterr().out.count("made by flagcx") == 2
    (plugin / "flagcx.py").unlink()
    with pytest.raises(ConfigError, match=r"FLAGCX_PATH=.*plugin for torch cannot be imported"):
        FlagCXCommunicator.backend()


@pytest.mark.slow
def test_sglangs_groups_speak_through_a_communicator(tmp_path: Path) -> None:
    in_two_processes(through_sglang, tmp_path)


def test_one_rank_alone() -> None:
    alone = make_communicator(0, 1, "")
    x = torch.ones(2)
    assert alone.all_reduce(x) is alone.all_gather(x) is alone.broadcast(x) is alone.reduce_scatter(x) is x
    assert alone.broadcast_tensor_dict({"a": 1}) == {"a": 1}
    with pytest.raises(ConfigError, match="send to rank 1: this rank is alone"):
        alone.send_tensor_dict({}, 1)
    with pytest.raises(ConfigError, match="recv from rank 1"):
        alone.recv_tensor_dict(1)


def test_a_communicator_for_sglang_is_one() -> None:
    from sgl_aspects.engines.sglang import communicator as sglang_communicator

    with pytest.raises(ConfigError, match=r"SGL_ASPECTS_COMMUNICATOR='torch:Tensor': write 'torch' or"):
        sglang_communicator.attach("torch:Tensor")
    assert sglang_communicator._communicator_class("torch") is TorchCommunicator
    made: Any = TorchCommunicator.of_group(None, [4, 5], 1)
    assert (made.rank, made.world_size) == (1, 2)
