"""Networks of images and volumes: classifiers, dense prediction, detection."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from .cases import CLASSES, Case, architecture, classes, target

BATCH = 4


def images(size: int = 16) -> tuple[torch.Tensor]:
    return (torch.randn(BATCH, 3, size, size),)


def conv(inputs, outputs, kernel=3, stride=1, groups=1, act=nn.ReLU):
    plain = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(plain, nn.BatchNorm2d(outputs), act())


def normed(channels, *layer):
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), *layer)


def classifier(channels, *features):
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def classified(channels, *features):
    return Case(classifier(channels, *features), images(), classes(BATCH))


class Residual(nn.Module):
    def __init__(self, body, skip=None, last=None):
        super().__init__()
        self.body, self.skip, self.last = body, skip or nn.Identity(), last or nn.Identity()

    def forward(self, x):
        return self.last(self.body(x) + self.skip(x))


class Joined(nn.Module):
    """Branches of one input, joined along the channels."""

    def __init__(self, *branches):
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x):
        return torch.cat([branch(x) for branch in self.branches], 1)


@architecture("residual")
def resnet():
    def block(inputs, outputs, stride):
        skip = conv(inputs, outputs, 1, stride, act=nn.Identity) if stride > 1 else None
        return Residual(
            nn.Sequential(conv(inputs, outputs, 3, stride), conv(outputs, outputs, act=nn.Identity)), skip, nn.ReLU()
        )

    return classified(16, conv(3, 8), block(8, 8, 1), block(8, 16, 2), block(16, 16, 1))


@architecture("residual")
def resnet_bottleneck():
    def block(inputs, middle, outputs, stride):
        body = (conv(inputs, middle, 1), conv(middle, middle, 3, stride), conv(middle, outputs, 1, act=nn.Identity))
        return Residual(nn.Sequential(*body), conv(inputs, outputs, 1, stride, act=nn.Identity), nn.ReLU())

    return classified(24, conv(3, 8), block(8, 4, 16, 1), block(16, 6, 24, 2))


@architecture("residual")
def resnet_preactivation():
    def block(inputs, outputs, stride):
        first = normed(inputs, nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False))
        second = normed(outputs, nn.Conv2d(outputs, outputs, 3, padding=1, bias=False))
        return Residual(nn.Sequential(first, second), nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else None)

    return classified(16, nn.Conv2d(3, 8, 3, padding=1), block(8, 8, 1), block(8, 16, 2), normed(16))


@architecture("dense")
def densenet():
    def grow(channels):
        return Joined(nn.Identity(), normed(channels, nn.Conv2d(channels, 4, 3, padding=1, bias=False)))

    transition = normed(16, nn.Conv2d(16, 8, 1), nn.AvgPool2d(2))
    return classified(12, nn.Conv2d(3, 8, 3, padding=1), grow(8), grow(12), transition, grow(8))


@architecture("branches")
def inception():
    def block(channels):
        pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(channels, 4, 1))
        factored = nn.Sequential(
            nn.Conv2d(channels, 4, (1, 3), padding=(0, 1)), nn.Conv2d(4, 4, (3, 1), padding=(1, 0))
        )
        return Joined(conv(channels, 4, 1), nn.Sequential(conv(channels, 4, 1), conv(4, 6)), factored, pooled)

    return classified(18, conv(3, 8, stride=2), block(8), block(18))


@architecture("depthwise")
def mobilenet():
    def block(inputs, outputs, stride):
        wide = 3 * inputs
        body = nn.Sequential(
            conv(inputs, wide, 1, act=nn.ReLU6),
            conv(wide, wide, 3, stride, wide, act=nn.ReLU6),
            conv(wide, outputs, 1, act=nn.Identity),
        )
        return Residual(body) if stride == 1 else body

    return classified(12, conv(3, 8), block(8, 8, 1), block(8, 12, 2), block(12, 12, 1))


class Excited(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = conv(channels, channels)
        self.gate = nn.Sequential(
            *(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, 4, 1), nn.SiLU(), nn.Conv2d(4, channels, 1), nn.Sigmoid())
        )

    def forward(self, x):
        y = self.body(x)
        return x + y * self.gate(y)


@architecture("gated")
def squeeze_excitation():
    return classified(8, conv(3, 8, stride=2), Excited(8), Excited(8))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([conv(3, 8), conv(8, 12), conv(12, 16)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 12, 2, 2), nn.ConvTranspose2d(12, 8, 2, 2)])
        self.merge = nn.ModuleList([conv(24, 12), conv(16, 8)])
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        skips = []
        for level, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1]):
            x = merge(torch.cat([skip, up(x)], 1))
        return self.last(x)


@architecture("segmentation")
def unet():
    return Case(UNet(), images(), target(BATCH, 2, 16, 16))


class SegNet(nn.Module):
    """Pools remember where their maxima lay, and the decoder puts values back there."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([conv(3, 8), conv(8, 12)])
        self.up = nn.ModuleList([conv(12, 8), nn.Conv2d(8, CLASSES, 3, padding=1)])

    def forward(self, x):
        places = []
        for down in self.down:
            x, place = F.max_pool2d(down(x), 2, return_indices=True)
            places.append(place)
        for up, place in zip(self.up, reversed(places)):
            x = up(F.max_unpool2d(x, place, 2))
        return x.permute(0, 2, 3, 1)


@architecture("segmentation")
def segnet():
    return Case(SegNet(), images(), classes(BATCH, 16, 16))


class Context(nn.Module):
    """Pooled at several sizes, interpolated back (PSPNet)."""

    def __init__(self):
        super().__init__()
        self.stem = conv(3, 8, stride=2)
        self.levels = nn.ModuleList([nn.Conv2d(8, 4, 1) for _ in range(3)])
        self.last = nn.Conv2d(20, CLASSES, 3, padding=1)

    def forward(self, x):
        x = self.stem(x)
        pooled = [level(F.adaptive_avg_pool2d(x, size)) for level, size in zip(self.levels, (1, 2, 4))]
        sized = [F.interpolate(p, x.shape[2:], mode="bilinear", align_corners=False) for p in pooled]
        return F.interpolate(self.last(torch.cat([x, *sized], 1)), scale_factor=2).permute(0, 2, 3, 1)


@architecture("segmentation")
def pyramid_pooling():
    return Case(Context(), images(), classes(BATCH, 16, 16))


class SSD(nn.Module):
    """Boxes and classes from several feature maps, each with heads of its own."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([conv(3, 8, stride=2), conv(8, 12, stride=2), conv(12, 12, stride=2)])
        self.labels = nn.ModuleList([nn.Conv2d(c, 2 * CLASSES, 3, padding=1) for c in (8, 12, 12)])
        self.boxes = nn.ModuleList([nn.Conv2d(c, 2 * 4, 3, padding=1) for c in (8, 12, 12)])

    def forward(self, x):
        labels, boxes = [], []
        for stage, label, box in zip(self.stages, self.labels, self.boxes):
            x = stage(x)
            labels.append(label(x).permute(0, 2, 3, 1).reshape(len(x), -1, CLASSES))
            boxes.append(box(x).permute(0, 2, 3, 1).reshape(len(x), -1, 4))
        return {"labels": torch.cat(labels, 1), "boxes": torch.cat(boxes, 1)}


def detected(model, anchors):
    label, place = classes(BATCH, anchors), torch.randn(BATCH, anchors, 4)
    return Case(model, images(), lambda output: label(output["labels"]) + 20 * F.smooth_l1_loss(output["boxes"], place))


@architecture("detection")
def ssd():
    return detected(SSD(), 2 * (64 + 16 + 4))


class RetinaNet(nn.Module):
    """A feature pyramid, and one pair of heads for all of its levels."""

    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([conv(3, 8, stride=2), conv(8, 12, stride=2), conv(12, 16, stride=2)])
        self.lateral = nn.ModuleList([nn.Conv2d(c, 8, 1) for c in (8, 12, 16)])
        self.smooth = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)])
        self.labels = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, CLASSES, 3, padding=1))
        self.boxes = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 4, 3, padding=1))

    def forward(self, x):
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        levels = [lateral(x) for lateral, x in zip(self.lateral, maps)]
        for level in (1, 0):
            levels[level] = levels[level] + F.interpolate(levels[level + 1], scale_factor=2)
        levels = [smooth(x) for smooth, x in zip(self.smooth, levels)]
        heads = {"labels": self.labels, "boxes": self.boxes}
        return {
            name: torch.cat([head(x).flatten(2).transpose(1, 2) for x in levels], 1) for name, head in heads.items()
        }


@architecture("detection")
def retinanet():
    return detected(RetinaNet(), 64 + 16 + 4)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(conv(3, 8, stride=2), conv(8, 12, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.label, self.box = nn.Linear(12, CLASSES), nn.Linear(12, 4)

    def forward(self, x):
        shared = self.trunk(x)
        return self.label(shared), self.box(shared)


@architecture("several losses")
def two_heads():
    label, box = classes(BATCH), target(BATCH, 4)
    return Case(TwoHeads(), images(), lambda output: label(output[0]) + 2.0**10 * box(output[1]))


@architecture("volume")
def conv3d():
    features = (nn.Conv3d(1, 6, 3, padding=1), nn.GELU(), nn.MaxPool3d(2), nn.Conv3d(6, 8, 3), nn.GELU())
    head = (nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, CLASSES))
    return Case(nn.Sequential(*features, *head), (torch.randn(BATCH, 1, 8, 8, 8),), classes(BATCH))


class Discriminator(nn.Module):
    """Spectrally normalised; power iteration starts anew in each pass, so that two passes are the same."""

    def __init__(self):
        super().__init__()
        sizes = ((3, 8), (8, 12))
        self.features = nn.ModuleList([spectral_norm(nn.Conv2d(*size, 4, 2, 1)) for size in sizes])
        self.last = spectral_norm(nn.Linear(12 * 16, 1))
        self.start = [buffer.clone() for buffer in self.buffers()]

    def forward(self, real, made):
        for buffer, start in zip(self.buffers(), self.start):
            buffer.copy_(start)
        return self.judge(real), self.judge(made)

    def judge(self, x):
        for layer in self.features:
            x = F.leaky_relu(layer(x), 0.2)
        return self.last(x.flatten(1))


@architecture("adversarial")
def discriminator():
    return Case(Discriminator(), (*images(), *images()), lambda o: F.softplus(-o[0]).mean() + F.softplus(o[1]).mean())


class Mixer(nn.Module):
    def __init__(self, tokens=16, width=12):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.tokens = nn.Sequential(nn.Linear(tokens, 20), nn.GELU(), nn.Linear(20, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 20), nn.GELU(), nn.Linear(20, width))
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = x + self.tokens(self.norms[0](x).mT).mT
        x = x + self.channels(self.norms[1](x))
        return self.last(self.norms[2](x).mean(1))


@architecture("mixer")
def mixer():
    return Case(Mixer(), images(), classes(BATCH))
