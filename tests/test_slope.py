"""The weight that a model has where a scheme counts in units of its own."""

import numpy as np
import pytest
import torch

import qdsl
from qdsl.dtype import F32
from qdsl.slope import in_units_of_the_model, with_own_scales

CODES = qdsl.load("w8a8_quant_bias").text


def weight(output="(acc + b) * d", x="a", code="x / c + o"):
    text = CODES.replace("(acc + b) * d", output).replace("x ~ a", f"x ~ {x}").replace("x / c + o", code)
    return str(in_units_of_the_model(qdsl.parse(text)).weight.decode)


@pytest.mark.parametrize(
    ("found", "right"),
    [
        (weight(), "q * d / c"),
        (weight("d * (b - acc)"), "q * -1 * d / c"),
        (weight("(acc + b) / d"), "q / c / d"),
        (weight("relu((acc + b) * d)"), "q * d / c"),  # of what the function is given
        (weight("(acc + b) * (d * d)"), "q * d * d / c"),
        (weight(x="(a - o) * c"), "q * d"),
        (weight("acc + b", x="(a - o) * c"), "q"),
        (weight("acc + b", code="x / (c * 4) + o"), "q / 4 / c"),
    ],
)
def test_what_y_gains_per_x(found, right):
    assert found == right


@pytest.mark.parametrize("name", [name for name in qdsl.shipped() if name != "w8a8_quant_bias"])
def test_schemes_of_the_models_units_are_what_they_are(name):
    scheme = qdsl.load(name)
    assert all(in_units_of_the_model(scheme, phase) is scheme for phase in scheme.phases or ("",))


def test_a_weight_that_depends_on_x_is_none():
    text = qdsl.load("w8a8_dynamic").text
    with pytest.raises(qdsl.Error, match="y grows with x by `t`, which is made of x"):
        in_units_of_the_model(qdsl.parse(text.replace("x ~ a * t", "x ~ a")))


def test_several_weights_are_none():
    with pytest.raises(qdsl.Error, match="has `acc` in several ways"):
        weight("acc * d + acc")


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_scales_that_a_tool_multiplied_are_found(kind):
    largest = (torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 0.01).to(kind).float().numpy()
    own = largest / np.float32(127)
    for of_x in np.float32([0.0456483, 0.9999, 3.25e-3]):
        given = {"q": np.zeros((len(own), 1), np.uint8), "d": F32.encode(own * of_x), "c": F32.encode(of_x)}
        found = with_own_scales(in_units_of_the_model(qdsl.load("w8a8_quant_bias")), given)
        assert np.array_equal(F32.decode(found["d"]), own) and F32.decode(found["c"]) == 1


def test_products_that_no_scale_has_are_divided():
    scheme = in_units_of_the_model(qdsl.load("w8a8_quant_bias"))
    products, of_x = np.float32([0, np.inf, np.nan, 1e-45, 0.1]), np.float32(0.3)
    given = {"q": np.zeros((5, 1), np.uint8), "d": F32.encode(products), "c": F32.encode(of_x)}
    found = F32.decode(with_own_scales(scheme, given)["d"])
    assert np.allclose(found, products / of_x, rtol=2e-7, equal_nan=True)
    other = {"q": given["q"], "s": given["d"][:, None], "z": given["q"]}
    assert with_own_scales(qdsl.load("awq4"), other) == other
