import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadow_pool.arms import NORMS, Arm, parse_arm
from shadow_pool.errors import UserError


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("batch", Arm("batch")),
        (" none+fit ", Arm("none", fit=True)),
        ("batch+penalty(0.3)", Arm("batch", penalty=0.3)),
        ("batch+penalty(1e-3)", Arm("batch", penalty=0.001)),
        ("group+dp(8)", Arm("group", dp=8.0)),
        ("affine", Arm("affine")),
    ],
)
def test_spellings(text, arm):
    assert parse_arm(text) == arm
    assert parse_arm(arm.name) == arm


@given(st.floats(1e-9, 1e5), st.sampled_from(["batch+penalty", "none+dp"]))
def test_the_canonical_name_reads_back_as_itself_and_is_a_safe_folder_name(number, prefix):
    name = parse_arm(f"{prefix}({number:.12f})" if number >= 1e-3 else f"{prefix}({number:.6e})").name
    assert parse_arm(name).name == name
    assert not set(name) & set("/\\\0 ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bacth", "did you mean 'batch'"),
        ("batch+penality(1)", "unknown arm modifier"),
        ("batch+fit", "cannot be combined with batch"),
        ("group+fit+dp(8)", "cannot be combined"),
        ("none+penalty(1)", "no gamma/sigma without BatchNorm"),
        ("batch+dp(8)", "gives no guarantee"),
        ("none+fit+fit", "given twice"),
        ("batch+penalty(0)", "between 1e-9 and 1e5"),
        ("none+dp(1e999)", "between 1e-9 and 1e5"),
        ("none+dp(nan)", "unknown arm modifier"),
        ("none/../batch", "unknown arm"),
        ("", "known: affine, batch, group, layer, none"),
    ],
)
def test_refusals_say_what_to_do(text, says):
    with pytest.raises(UserError, match=re.escape(says)):
        parse_arm(text)


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused_in_one_short_line(text):
    try:
        arm = parse_arm(text)
    except UserError as error:
        length = len(str(error))
    else:
        length = len(arm.name)
        assert arm.norm in NORMS
    assert length < 500
