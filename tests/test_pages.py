"""Packed weights of the CPU lie on huge pages, whichever way they come; and are tensors like any other."""

from __future__ import annotations

import copy
import io
import pickle
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from qdsl.runtime import QuantLinear, pages

N, K = 640, 8192  # 5 MiB of w8a16: two huge pages and as much as fills half of one more
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(
    not SETTING.exists() or "[never]" in SETTING.read_text(), reason=f"huge pages are off here ({SETTING})"
)


def made(device: str = "cpu", seed: int | None = 0) -> QuantLinear:
    layer = QuantLinear("w8a16", K, N, device=device)
    if seed is not None:
        layer.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(seed)))
    return layer


def on_huge_pages(tensor: torch.Tensor) -> bool:
    """Whether Linux was asked for them where the tensor lies, and has given some there."""
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes // pages.HUGE * pages.HUGE
    given = asked = 0
    for area in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
        start, end = (int(at, 16) for at in area.split()[0].split("-"))
        if start < last and end > first:
            asked += min(end, last) - max(start, first) if re.search("^VmFlags:.* hg", area, re.M) else 0
            given += int(re.search(r"^AnonHugePages: +(\d+)", area, re.M)[1])
    return first % pages.HUGE == 0 and asked == last - first and given > 0


def through_pickle(layer: QuantLinear) -> QuantLinear:
    return pickle.loads(pickle.dumps(layer))


def through_save(layer: QuantLinear) -> QuantLinear:
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    assert file.tell() < layer._buffers["q"].nbytes + (1 << 18), "what is saved is the tensor, not the memory around it"
    file.seek(0)
    fresh = made(seed=None)
    fresh.load_state_dict(torch.load(file))
    return fresh


def through_safetensors(layer: QuantLinear) -> QuantLinear:
    fresh = made("meta", None)
    fresh.load_state_dict(safetensors.torch.load(safetensors.torch.save(layer.state_dict())), assign=True)
    return fresh


def through_another_type(layer: QuantLinear) -> QuantLinear:
    return layer.to(torch.float32).to(torch.bfloat16)


@pytest.mark.parametrize(
    "way", [lambda layer: layer, copy.deepcopy, through_pickle, through_save, through_safetensors, through_another_type],
    ids=["quantize", "deepcopy", "pickle", "torch.save", "safetensors", "another type"],
)  # fmt: skip
def test_weights_lie_on_huge_pages_whichever_way_they_come(way):
    layer = made()
    kept = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    moved = way(layer)
    assert on_huge_pages(moved._buffers["q"])
    assert all(torch.equal(moved.state_dict()[name], tensor) for name, tensor in kept.items())


def test_what_shares_memory_goes_on_sharing_it():
    layer = made()
    assert copy.copy(layer)._buffers["q"].data_ptr() == layer._buffers["q"].data_ptr()
    other = made("meta", None)
    other.load_state_dict(layer.state_dict(), assign=True)
    assert other._buffers["q"].data_ptr() == layer._buffers["q"].data_ptr()
    layer.share_memory()
    shared = layer._buffers["q"]
    assert shared.is_shared() and pages.settled(shared) is shared


def test_half_a_huge_page_is_worth_one():
    tensor = pages.zeros((pages.HUGE // 2,), torch.uint8, "cpu")
    assert tensor.data_ptr() % pages.HUGE == 0 and not tensor.any()
    assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_small_tensors_share_huge_pages():
    made = [pages.zeros((3, size // 3), torch.uint8, "cpu") for size in range(pages.SMALL, pages.HUGE // 2, 99_999)]
    assert all(t.data_ptr() % pages.ALIGNMENT == 0 and not t.any() for t in made)
    for number, t in enumerate(made):
        t.fill_(number)
        assert t.untyped_storage().nbytes() == t.nbytes and pages.settled(t) is t
    assert all((t == number).all() for number, t in enumerate(made)), "none lies where another one does"
    assert len({t.data_ptr() // pages.HUGE for t in made}) < len(made)
    other = torch.ones(pages.SMALL, dtype=torch.uint8)
    moved = pages.settled(other)
    assert torch.equal(moved, other) and moved is not other and pages.settled(moved) is moved
    assert pages.settled(other[:-1]) is not moved and pages.settled(other[:5]).data_ptr() == other.data_ptr()


def test_layers_of_small_models_lie_side_by_side():
    layers = [QuantLinear("awq4", 576, 576, group=64).quantize(torch.randn(576, 576)) for _ in range(6)]
    places = {b.data_ptr() // pages.HUGE for layer in layers for b in layer.buffers() if b.nbytes >= pages.SMALL}
    assert len(places) <= 2, "6 layers of 186 KiB"


def test_other_devices_have_no_part_in_it():
    with torch.device("meta"):
        assert pages.zeros((pages.HUGE,), torch.uint8, "cpu").device.type == "cpu"
    assert pages.zeros((pages.HUGE,), torch.uint8, "meta").is_meta
    with FakeTensorMode():
        assert isinstance(made(seed=None)._buffers["q"], FakeTensor)


def test_memory_is_given_back():
    def mapped() -> int:
        return int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1])

    before = mapped()
    for _ in range(50):
        pages.zeros((8, pages.HUGE), torch.uint8, "cpu").fill_(1)
    assert mapped() - before < 8 * pages.HUGE >> 10
