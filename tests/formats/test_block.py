"""Block formats: the specification's figures, and what is refused."""

import dataclasses

import pytest

import halfulp.formats as formats
from halfulp.formats import BlockFormat, Format, block_names, e2m1fn, e4m3fn, e8m0, get, get_block, register
from halfulp.formats._block import BLOCK_FORMAT_BY_NAME, get_format_or_block
from halfulp.formats._catalog import FORMAT_BY_NAME


@pytest.mark.parametrize(
    ("name", "element", "scale", "block", "bits"),
    [
        ("mxfp8_e4m3", "e4m3fn", "e8m0", 32, 8.25),
        ("mxfp8_e5m2", "e5m2", "e8m0", 32, 8.25),
        ("mxfp6_e3m2", "e3m2fn", "e8m0", 32, 6.25),
        ("mxfp6_e2m3", "e2m3fn", "e8m0", 32, 6.25),
        ("mxfp4", "e2m1fn", "e8m0", 32, 4.25),
        ("nvfp4", "e2m1fn", "e4m3fn", 16, 4.5),
    ],
)
def test_the_catalogue(name, element, scale, block, bits):
    format = get_block(name)
    assert format is getattr(formats, name) is get_block(format)
    assert (format.element.name, format.scale.name, format.block) == (element, scale, block)
    assert format.bits_per_value == bits
    assert format.tensor_scale == (name == "nvfp4")
    assert format.scale_rounding == ("nearest" if name == "nvfp4" else "up")
    assert name in block_names()


def test_one_of_your_own():
    mine = BlockFormat("mine", element=e2m1fn, scale=e8m0, block=8, scale_rounding="floor")
    assert mine.bits_per_value == 5.0
    assert str(mine) == "mine: blocks of 8 e2m1fn with a scale in e8m0, 5 bits a value"
    assert eval(repr(mine), vars(formats)) == mine == dataclasses.replace(mine)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"name": ""}, ValueError, "name is a non-empty string, got ''"),
        ({"name": 3}, ValueError, "name is a non-empty string, got 3"),
        ({"element": "e2m1fn"}, TypeError, "element is a hu.Format (hu.formats.get gives one), got str"),
        ({"scale": None}, TypeError, "scale is a hu.Format"),
        ({"block": 0}, ValueError, "block is a number of elements, 1 or more; got 0"),
        ({"block": 1.5}, ValueError, "got 1.5"),
        ({"block": True}, ValueError, "got True"),
        ({"tensor_scale": 1}, ValueError, "tensor_scale is True or False, got 1"),
        ({"scale_rounding": "down"}, ValueError, "scale_rounding is one of up, floor, nearest; got 'down'"),
        ({"scale_rounding": "floor", "scale": e4m3fn}, ValueError, "take 'up' or 'nearest', or the scale e8m0"),
    ],
)
def test_refuses(fields, error, message):
    with pytest.raises(error) as caught:
        BlockFormat(**{"name": "mine", "element": e2m1fn, "scale": e8m0, "block": 32, **fields})
    assert message in str(caught.value)


def test_unknown_names_are_answered():
    with pytest.raises(ValueError, match="unknown block format 'mxfp5': known are mxfp8_e4m3"):
        get_block("mxfp5")
    with pytest.raises(TypeError, match=r"a hu\.BlockFormat or a name"):
        get_block(4)


@pytest.mark.parametrize("name", ["mx9", "nvfp_wide", "of_mine"])
@pytest.mark.parametrize("kind", ["format", "block format"])
def test_what_is_registered_is_found_by_its_name(monkeypatch, name, kind):
    mine, registry = Format(name, 4, 4), FORMAT_BY_NAME
    if kind == "block format":
        mine, registry = BlockFormat(name, e2m1fn, e8m0, 8), BLOCK_FORMAT_BY_NAME
    monkeypatch.setitem(registry, name, mine)
    assert register(mine) is mine
    assert get_format_or_block(name) is get_format_or_block(name.upper().replace("_", "-")) is mine


@pytest.mark.parametrize("name", ["Mine", "of-mine", "torch.mine"])
@pytest.mark.parametrize("make", [lambda name: Format(name, 4, 4), lambda name: BlockFormat(name, e2m1fn, e8m0, 8)])
def test_names_that_no_look_up_finds_are_refused(name, make):
    with pytest.raises(ValueError, match=r"in lower case, with _ for - and without torch\."):
        register(make(name))


def test_layouts_mean_the_same_whatever_is_registered(monkeypatch):
    """A format of one's own has an overflow policy of its own, and would change what "e4m4" rounds to elsewhere."""
    monkeypatch.setitem(FORMAT_BY_NAME, "mine", Format("mine", 4, 4, overflow="saturate"))
    assert get("e4m4") == Format("e4m4", 4, 4)
    assert get("e5m10") is formats.fp16
    mine = Format("e4m4", 4, 4)
    monkeypatch.setitem(FORMAT_BY_NAME, "e4m4", mine)
    assert register(mine) is mine
