"""Layouts: every parameter in exactly one place, and views that are the parameter."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from decent_dp.engine.layout import FlatBuffer, TensorSpec, dense_stride, plan_buckets, plan_turns

CPU = torch.device("cpu")
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


# -- plans -----------------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw):
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=12))
    specs = []
    for i, shape in enumerate(shapes):
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
        # The plan looks at nothing but the device's name.
        device = draw(st.sampled_from([CPU, CPU, torch.device("meta")]))
        specs.append(TensorSpec(f"p{i}", shape, torch.empty(shape).stride(), dtype, device))
    order = draw(st.permutations(range(len(specs))))
    limit = draw(st.one_of(st.integers(0, 600), st.floats(0.5, 600)))
    return specs, order, limit


@settings(max_examples=100)
@given(layouts())
def test_plans(layout):
    specs, order, limit = layout
    plans = plan_buckets(specs, order, limit)
    place = {index: at for at, index in enumerate(order)}

    assert sorted(slot.index for plan in plans for slot in plan.slots) == list(range(len(specs)))
    for plan in plans:
        end = 0
        for slot in plan.slots:
            assert slot.spec is specs[slot.index]
            assert (slot.spec.dtype, slot.spec.device) == (plan.dtype, plan.device)
            assert slot.offset == end  # no overlap, and nothing between
            end += slot.spec.numel
        assert plan.numel == end
        assert len(plan.slots) == 1 or sum(s.spec.numel for s in plan.slots) * plan.dtype.itemsize <= limit

    # Inside a kind the order is kept, from bucket to bucket too.
    for kind in {(s.dtype, s.device) for s in specs}:
        dealt = [slot.index for plan in plans if (plan.dtype, plan.device) == kind for slot in plan.slots]
        assert dealt == [i for i in order if (specs[i].dtype, specs[i].device) == kind]
        # Greedy: a bucket ends only where the next tensor would not have fitted.
        of_kind = [plan for plan in plans if (plan.dtype, plan.device) == kind]
        for plan, following in itertools.pairwise(of_kind):
            assert (plan.numel + following.slots[0].spec.numel) * plan.dtype.itemsize > limit

    lasts = [max(place[slot.index] for slot in plan.slots) for plan in plans]
    assert lasts == sorted(lasts)


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 2], [1, 0, 2], [-1, 0]])
def test_an_order_that_is_no_permutation(order):
    specs, unused = [TensorSpec.of(f"p{i}", torch.zeros(2)) for i in range(2)], cast("Any", None)
    with pytest.raises(ValueError, match="permutation"):
        plan_turns(specs, order, 100, unused)


# -- memory formats --------------------------------------------------------------------------------------------------------


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


# name -> (a tensor, whether it is dense, so that its strides are kept)
FORMATS = {
    "contiguous": (lambda: randn(3, 4), True),
    "scalar": (lambda: randn(), True),
    "one": (lambda: randn(1), True),
    "empty": (lambda: randn(0), True),
    "empty-2d": (lambda: randn(3, 0, 2), True),
    "channels-last": (lambda: randn(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
    "channels-last-3d": (lambda: randn(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d), True),
    "channels-last-one-channel": (lambda: randn(2, 1, 4, 5).to(memory_format=torch.channels_last), True),
    "transposed": (lambda: randn(3, 4).t(), True),
    "permuted": (lambda: randn(2, 3, 4).permute(2, 0, 1), True),
    "offset": (lambda: randn(10)[3:7], True),
    "expanded": (lambda: randn(4, 1).expand(4, 3), False),
    "strided": (lambda: randn(6, 8)[::2, ::2], False),
    "overlapping": (lambda: randn(6).as_strided((3, 3), (1, 1)), False),
}


def is_dense(t: Tensor) -> bool:
    """Fills its range of memory without gaps or overlaps, by counting addresses."""
    offsets = {0}
    for size, stride in zip(t.shape, t.stride(), strict=True):
        offsets = {o + k * stride for o in offsets for k in range(size)}
    return offsets == set(range(t.numel()))


@pytest.mark.parametrize("name", FORMATS)
def test_dense_stride(name):
    make, dense = FORMATS[name]
    tensor = make()
    assert is_dense(tensor) == dense
    stride = dense_stride(tensor)
    assert is_dense(torch.empty_strided(tensor.shape, stride))
    if dense:
        assert stride == tensor.stride()


def buffer_of(tensors: list[Tensor], *, as_view: bool, limit: float = 1e9) -> tuple[FlatBuffer, list[Parameter]]:
    params = [Parameter(t) for t in tensors]
    specs = [TensorSpec.of(f"p{i}", p) for i, p in enumerate(params)]
    [plan] = plan_buckets(specs, range(len(specs)), limit)
    return FlatBuffer(plan, params, as_view=as_view), params


@pytest.mark.parametrize("as_view", [True, False])
def test_wrapping_keeps_values_and_strides(as_view):
    tensors = [make() for make, _ in FORMATS.values()]
    expected = [t.clone() for t in tensors]
    buffer, params = buffer_of(tensors, as_view=as_view)
    for (name, (_, dense)), param, tensor, value in zip(FORMATS.items(), params, tensors, expected, strict=True):
        assert torch.equal(param.detach(), value), name
        assert param.shape == value.shape, name
        if dense:
            assert param.stride() == tensor.stride(), name
        assert is_dense(param), name
        assert param.requires_grad, name
        assert param.is_leaf, name
    assert buffer.names == [f"p{i}" for i in range(len(params))]
    if as_view:
        assert buffer.flat is not None
        assert buffer.flat.numel() == sum(p.numel() for p in params)
        start, size = buffer.flat.data_ptr(), buffer.flat.nbytes
        assert all(start <= p.data_ptr() < start + size for p in params if p.numel())
        # The flat tensor and the parameters are one memory.
        buffer.flat.fill_(7.0)
        assert all(torch.equal(p.detach(), torch.full_like(p, 7.0)) for p in params)
    else:
        assert buffer.flat is None
        stay = [dense for _, dense in FORMATS.values()]
        assert [p.data_ptr() == t.data_ptr() for p, t in zip(params, tensors, strict=True) if p.numel()] == [
            s for s, t in zip(stay, tensors, strict=True) if t.numel()
        ]


@pytest.mark.parametrize("by_parameter", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_both_settings_agree(dtype, by_parameter):
    """The same numbers in the same order, whichever way parameters are stored; in the order of their memory."""
    found = {}
    for as_view in (True, False):
        tensors = [randn(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last), randn(3, 4, dtype=dtype).t()]
        tensors += [randn(dtype=dtype), randn(0, dtype=dtype), randn(10, dtype=dtype)[3:7]]
        expected = [t.permute(0, 2, 3, 1) if t.dim() == 4 else t.t() if t.dim() == 2 else t for t in tensors]
        flat = torch.cat([t.reshape(-1) for t in expected])
        buffer, params = buffer_of(tensors, as_view=as_view)
        values = buffer.values(by_parameter=by_parameter)
        one = as_view and not by_parameter
        assert [v.shape for v in values] == [flat.shape] if one else [(t.numel(),) for t in tensors]
        assert all(v.dtype == dtype and not v.requires_grad for v in values)
        assert torch.equal(torch.cat(values), flat)
        for view, param in zip(buffer.views(flat), params, strict=True):
            assert torch.equal(view, param)
            assert view.stride() == param.stride()
        # They are the parameters, not copies.
        for value in values:
            value.add_(torch.arange(len(value)))
        found[as_view] = [p.detach().clone() for p in params]
        moved = torch.cat(buffer.values(by_parameter=True))
        assert torch.equal(moved, torch.cat(values))
        assert not torch.equal(moved, flat)
    if by_parameter:
        for a, b in zip(found[True], found[False], strict=True):
            assert torch.equal(a, b)


# -- rebinding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_view", [True, False])
def test_replaced_storage_is_bound_again(as_view):
    buffer, params = buffer_of([randn(2, 3), randn(4), randn(0)], as_view=as_view)
    new = [torch.full((2, 3), 5.0), torch.arange(8.0)[::2], torch.empty(0)]
    for param, value in zip(params, new, strict=True):
        param.data = value
    buffer.rebind()
    for param, value in zip(params, new, strict=True):
        assert torch.equal(param.detach(), value)
    assert torch.equal(torch.cat(buffer.values(by_parameter=True)), torch.cat([t.reshape(-1) for t in new]))
    if as_view:
        assert buffer.flat is not None
        assert params[0].data_ptr() == buffer.flat.data_ptr()
    # Writes to the buffer reach the parameters again.
    for t in buffer.values(by_parameter=False):
        t.add_(1)
    assert torch.equal(params[0].detach(), torch.full((2, 3), 6.0))
    # A second call finds nothing to do.
    addresses = [p.data_ptr() for p in params]
    buffer.rebind()
    assert [p.data_ptr() for p in params] == addresses
    # Only one of them replaced: the others stay.
    params[1].data = torch.full((4,), -1.0)
    buffer.rebind()
    assert params[0].data_ptr() == addresses[0]
    assert torch.equal(params[1].detach(), torch.full((4,), -1.0))
    assert torch.equal(params[0].detach(), torch.full((2, 3), 6.0))


def test_a_parameter_with_new_strides_is_bound_again():
    """The same memory, size and shape, but other strides: its block would mix other elements than its neighbours' do."""
    buffer, [param] = buffer_of([randn(3, 3)], as_view=True)
    turned = param.data.t().clone()
    param.data = param.data.t()
    buffer.rebind()
    assert torch.equal(param.detach(), turned)
    assert torch.equal(buffer.values(by_parameter=True)[0], turned.reshape(-1))


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.double(), "torch.float64"),
        (lambda p: p.half(), "torch.float16"),
        (lambda p: torch.zeros(3, 2), r"\(3, 2\)"),
        (lambda p: p.reshape(-1), r"\(6,\)"),  # same memory
        (lambda p: p.view(torch.int32), "torch.int32"),  # same memory
    ],
    ids=["double", "half", "shape", "flattened", "reinterpreted"],
)
def test_misfits_are_refused(as_view, change, words):
    buffer, params = buffer_of([randn(4), randn(2, 3)], as_view=as_view)
    if "int32" in words:
        params[1].requires_grad_(False)
    params[1].data = change(params[1].data)
    with pytest.raises(RuntimeError, match=f"parameter 'p1' was .*{words}"):
        buffer.rebind()
