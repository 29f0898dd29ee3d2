"""Rows are independent: NaN and Inf stay in their row, a row of probability 0 gets zeros, padding poisons nothing."""

import numpy as np
import pytest

from calls import raw, run_rmsnorm, run_swiglu
from paddle_gated_ops import testing
from paddle_gated_ops.testing import from_bf16_bits, to_bf16_bits

SPECIAL = {"nan": 0x7FC0, "signaling nan": 0x7F81, "negative nan": 0xFFFF, "inf": 0x7F80, "-inf": 0xFF80}
PADDED = slice(0, None, 11)  # 9 % of the rows, spread over every block of rows


def assert_other_rows_unchanged(got, expected, touched):
    for name, array in expected.items():
        if array is not None and name != "grad_weight":
            others = np.delete(np.arange(len(array)), np.arange(len(array))[touched])
            np.testing.assert_array_equal(raw(got[name][others]), raw(array[others]), err_msg=name)


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("operand", ["gate", "up", "d", "p"])
@pytest.mark.parametrize("width", [7, 40, 264])
def test_swiglu_special_value_stays_in_its_row(place, width, operand, special):
    inputs = testing.swiglu_weighted_inputs(70, width, seed=1)
    expected = run_swiglu(inputs, place)
    bits, column = SPECIAL[special], width - 1
    for row in (0, 31, 69):
        if operand == "p":
            inputs["unzipped_probs"][row] = from_bf16_bits(np.uint16(bits))
        else:
            array = inputs["do2_s"] if operand == "d" else inputs["o1"]
            array[row, column + (width if operand == "up" else 0)] = bits
    got = run_swiglu(inputs, place)
    assert_other_rows_unchanged(got, expected, [0, 31, 69])
    testing.assert_swiglu_weighted_bwd(inputs, got)  # and in the row it is where float64 has it


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FC00000])
def test_nan_of_any_payload_stays_a_nan(place, bits):
    # Rounding up must not carry out of a NaN's bits.
    inputs = testing.swiglu_weighted_inputs(3, 40, seed=1)
    inputs["unzipped_probs"].view(np.uint32)[1] = bits
    got = run_swiglu(inputs, place)
    for name in ("do1", "o2_s"):
        assert np.isnan(from_bf16_bits(got[name][1])).all(), name
    testing.assert_swiglu_weighted_bwd(inputs, got)


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("operand", ["grad_out", "x", "z"])
def test_rmsnorm_special_value_stays_in_its_row(place, operand, special):
    inputs = testing.rmsnorm_silu_gate_inputs(70, seed=2)
    expected = run_rmsnorm(inputs, place)
    for row in (0, 31, 69):
        inputs[operand][row, row] = SPECIAL[special]
    got = run_rmsnorm(inputs, place)
    assert_other_rows_unchanged(got, expected, [0, 31, 69])
    testing.assert_rmsnorm_silu_gate_bwd(inputs, got)


@pytest.mark.parametrize("operand", ["grad_out", "z"])
def test_special_value_stays_in_its_column_of_grad_weight(place, operand):
    inputs = testing.rmsnorm_silu_gate_inputs(1000, seed=3)
    expected = run_rmsnorm(inputs, place)["grad_weight"]
    inputs[operand][500, 77] = SPECIAL["nan"]
    got = run_rmsnorm(inputs, place)["grad_weight"]
    others = np.arange(128) != 77
    np.testing.assert_array_equal(got[others], expected[others])
    assert np.isnan(from_bf16_bits(got[77]))


def test_special_weight_leaves_grad_weight_alone(place):
    inputs = testing.rmsnorm_silu_gate_inputs(100, seed=4)
    expected = run_rmsnorm(inputs, place)["grad_weight"]
    inputs["weight"][5] = SPECIAL["nan"]
    got = run_rmsnorm(inputs, place)
    np.testing.assert_array_equal(got["grad_weight"], expected)
    testing.assert_rmsnorm_silu_gate_bwd(inputs, got)


def test_swiglu_padding_rows(place):
    inputs = testing.swiglu_weighted_inputs(1280, 40, seed=5)
    expected = run_swiglu(inputs, place)
    inputs["o1"][PADDED], inputs["do2_s"][PADDED], inputs["unzipped_probs"][PADDED] = 0x7FC0, 0x7FC0, np.nan
    got = run_swiglu(inputs, place)
    assert_other_rows_unchanged(got, expected, PADDED)
    for array in got.values():
        assert np.isnan(from_bf16_bits(array[PADDED]) if array.dtype == np.uint16 else array[PADDED]).all()


def test_rmsnorm_padding_rows(place):
    inputs = testing.rmsnorm_silu_gate_inputs(1280, seed=6)
    expected = run_rmsnorm(inputs, place)
    for name in ("grad_out", "x", "z"):
        inputs[name][PADDED] = 0x7FC0
    got = run_rmsnorm(inputs, place)
    assert_other_rows_unchanged(got, expected, PADDED)
    assert np.isnan(from_bf16_bits(got["grad_weight"])).all()


def test_padding_rows_of_zeros_add_nothing_to_grad_weight(place):
    inputs = testing.rmsnorm_silu_gate_inputs(1280, seed=7)
    inputs["grad_out"][PADDED] = 0
    kept = np.ones(1280, bool)
    kept[PADDED] = False
    # x of the padding does not matter then, as long as it is finite.
    inputs["x"][PADDED] = to_bf16_bits(1e4)
    got = run_rmsnorm(inputs, place)
    only = {n: a if n == "weight" else a[kept] for n, a in inputs.items()}
    testing.assert_rmsnorm_silu_gate_bwd(only, {n: a if n == "grad_weight" else a[kept] for n, a in got.items()})


@pytest.mark.parametrize("p", [0.0, -0.0])
@pytest.mark.parametrize("width", [7, 264])
def test_probability_of_zero(place, width, p):
    inputs = testing.swiglu_weighted_inputs(12, width, seed=8)
    # Rows at both ends of BF16's range as well: 0 * a product past FP32's range must not make a NaN.
    inputs["o1"][1], inputs["do2_s"][1] = to_bf16_bits(3e38), to_bf16_bits(-3e38)
    inputs["o1"][2, :width], inputs["o1"][2, width:] = to_bf16_bits(-3e38), to_bf16_bits(3e38)
    inputs["o1"][3] = to_bf16_bits(1e-40)
    inputs["unzipped_probs"][:8] = p
    got = run_swiglu(inputs, place)
    for name in ("do1", "o2_s"):
        assert not (got[name][:8] & 0x7FFF).any(), name
    assert np.abs(got["probs_grad"][[0, 4, 5]]).min() > 1e-6  # the true gradient, not 0
    testing.assert_swiglu_weighted_bwd(inputs, got)


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("operand, outputs", [
    ("gate", {"gate", "up", "o2_s"}),
    ("up", {"gate", "o2_s"}),
    ("d", {"gate", "up"}),
])
def test_probability_of_zero_does_not_hide_special_values(place, operand, outputs, special):
    width = 40
    inputs = testing.swiglu_weighted_inputs(3, width, seed=9)
    inputs["unzipped_probs"][:] = 0
    array = inputs["do2_s"] if operand == "d" else inputs["o1"]
    column = 3 + (width if operand == "up" else 0)
    array[1, column] = SPECIAL[special]
    got = run_swiglu(inputs, place)
    values = {"gate": got["do1"][1, 3], "up": got["do1"][1, 3 + width], "o2_s": got["o2_s"][1, 3]}
    for name in values:
        assert np.isnan(from_bf16_bits(values[name])) == (name in outputs), name
    assert not np.isfinite(got["probs_grad"][1])
    assert np.isfinite(got["probs_grad"][[0, 2]]).all()
    testing.assert_swiglu_weighted_bwd(inputs, got)


@pytest.mark.parametrize("bits", [0x7F81, 0x7FFF, 0xFFC0, 0xFFFF])
def test_a_bf16_nan_is_the_same_one_whatever_made_it(bits):
    # Which of two NaNs a product passes on depends on the order of its factors, which is the compiler's choice.
    swiglu = testing.swiglu_weighted_inputs(3, 130, seed=1)
    swiglu["o1"][1, 4:130:2], swiglu["do2_s"][1] = bits, 0xFFC1
    rmsnorm = testing.rmsnorm_silu_gate_inputs(3, seed=1)
    rmsnorm["z"][1, 5], rmsnorm["grad_out"][1, 5] = bits, 0xFFC1
    for got in (run_swiglu(swiglu, "cpu"), run_rmsnorm(rmsnorm, "cpu")):
        for name in {"do1", "o2_s", "grad_x", "grad_z", "grad_weight"} & set(got):
            nans = got[name][np.isnan(from_bf16_bits(got[name]))]
            assert nans.size and (nans == 0x7FFF).all(), name
