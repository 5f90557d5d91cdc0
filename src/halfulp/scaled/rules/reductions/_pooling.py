"""Rules of pooling, resampling and folding: they pick, or average with weights that sum to 1, and the scale stays."""

from ....kernels import torch_operators
from .._vocabulary import homogeneous

aten = torch_operators("aten")

homogeneous(
    *(aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default, aten.adaptive_max_pool2d.default),
    *(aten.adaptive_max_pool3d.default, aten.max_unpool2d.default, aten.max_unpool3d.default),
    *(aten.avg_pool2d.default, aten.avg_pool3d.default, aten._adaptive_avg_pool2d.default),
    *(aten._adaptive_avg_pool3d.default, aten.im2col.default, aten.col2im.default, aten.pixel_shuffle.default),
    *(aten.pixel_unshuffle.default, aten.channel_shuffle.default),
    family="pass-through",
)
homogeneous(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default, family="pooling", self=1)
homogeneous(
    *(aten.max_pool2d_with_indices_backward.default, aten.max_pool3d_with_indices_backward.default),
    *(aten.adaptive_max_pool2d_backward.default, aten.adaptive_max_pool3d_backward.default),
    *(aten.fractional_max_pool2d_backward.default, aten.fractional_max_pool3d_backward.default),
    *(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default),
    *(aten._adaptive_avg_pool2d_backward.default, aten._adaptive_avg_pool3d_backward.default),
    family="pooling",
    grad_output=1,
    self=0,
)
_KINDS = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
_EXACT = ("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d")
_SMOOTH = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa")
for _name in (*(f"upsample_{kind}" for kind in _KINDS), *_EXACT, *_SMOOTH):
    homogeneous(getattr(aten, _name).default, family="pass-through")
    homogeneous(getattr(aten, f"{_name}_backward").default, family="pooling", grad_output=1)
