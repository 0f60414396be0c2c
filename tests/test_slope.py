"""The weight that a model has where a scheme counts in units of its own."""

import pytest

import qdsl
from qdsl.slope import in_units_of_the_model

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
