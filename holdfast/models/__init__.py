"""Networks. BACKBONES is the table of feature extractors: name -> class."""

from holdfast.models.convnet import ConvNet
from holdfast.models.resnet import ResNet18

BACKBONES: dict[str, type[ConvNet] | type[ResNet18]] = {"convnet": ConvNet, "resnet18": ResNet18}
