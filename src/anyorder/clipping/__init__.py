"""Clipping: the sum over privacy units of gradients of bounded norm."""

from anyorder.clipping.base import PerUnitClipping, Receive
from anyorder.clipping.functional import FunctionalClipping
from anyorder.clipping.validate import check_model

__all__ = ["FunctionalClipping", "PerUnitClipping", "Receive", "check_model"]
