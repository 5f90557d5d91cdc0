"""The message for an unknown name."""

from halfulp._names import describe_unknown_name


def test_lists_near_and_allowed_names() -> None:
    message = describe_unknown_name("recipe", "bf16-khan", ["fp32", "bf16-kahan"])
    assert "'bf16-khan'" in message
    assert "did you mean 'bf16-kahan'" in message
    assert message.endswith("Allowed: fp32, bf16-kahan")


def test_without_a_near_name() -> None:
    assert describe_unknown_name("task", "zzz", ["text"]) == "unknown task 'zzz'. Allowed: text"
    assert "Allowed: text" in describe_unknown_name("task", None, ["text"])
