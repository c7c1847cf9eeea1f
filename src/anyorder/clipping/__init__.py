"""Clipping: the sum over privacy units of gradients of bounded norm."""

from anyorder.clipping.coupling import ExampleLoss
from anyorder.clipping.layer_rules import register_layer_rule
from anyorder.clipping.norms import Automatic, Flat, PerGroup
from anyorder.clipping.validate import convert
from anyorder.release.schedules import Adaptive

__all__ = [
    "Adaptive",
    "Automatic",
    "ExampleLoss",
    "Flat",
    "PerGroup",
    "convert",
    "register_layer_rule",
]
