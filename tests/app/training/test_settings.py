import pytest

from anybatch import SettingsError
from anybatch.app.training.settings import MemoryLimit, Settings, parse_micro_batch


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("16", 16),
        (" 1 ", 1),
        ("auto", "auto"),
        ("AUTO", "auto"),
        ("2GiB", MemoryLimit(2 * 1024**3)),
        ("2 gib", MemoryLimit(2 * 1024**3)),
        ("1.5MB", MemoryLimit(1_500_000)),
        ("800KiB", MemoryLimit(800 * 1024)),
        ("64B", MemoryLimit(64)),
    ],
)
def test_a_micro_batch_is_rows_auto_or_memory(text, meaning):
    assert parse_micro_batch(text) == meaning


@pytest.mark.parametrize("text", ["3 bananas", "", "0", "-4", "2.5", "GiB", "0GiB", "16 rows", "1e3"])
def test_anything_else_names_itself_and_what_is_expected(text):
    with pytest.raises(SettingsError) as raised:
        parse_micro_batch(text)
    assert repr(text) in str(raised.value)
    assert "2GiB" in str(raised.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"batch_size": 0}, "--batch-size 0: expected a whole number, 1 or more"),
        ({"epochs": -1}, "--epochs -1"),
        ({"updates": 0}, "--updates 0"),
        ({"lr": 0.0}, "--lr 0.0: expected a number above 0"),
        ({"lr": float("nan")}, "--lr nan"),
        ({"clip_norm": -1.0}, "--clip-norm -1.0"),
        ({"warmup": -1}, "--warmup -1: expected a whole number, 0 or more"),
        ({"seed": -1}, "--seed -1"),
        ({"lr_rule": "cubic"}, "--lr-rule 'cubic': expected one of none, linear, sqrt"),
        ({"precision": "fp8"}, "--precision 'fp8'"),
        ({"epochs": 1, "updates": 1}, "give one of them"),
    ],
)
def test_a_setting_that_makes_no_sense_names_its_option_and_value(setting, message):
    with pytest.raises(SettingsError, match=message):
        Settings(**setting)
