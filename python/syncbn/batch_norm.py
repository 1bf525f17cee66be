"""Batch normalisation over the batches of all ranks."""

import os

import torch
import torch.distributed
from torch.nn.modules.batchnorm import _BatchNorm

from . import _C


class SyncBatchNorm(_BatchNorm):
    """torch.nn.SyncBatchNorm that works on CPUs, with the same arguments and state_dict.

    On CPU tensors, each rank computes its statistics in float32 or better, and all ranks merge them
    by Chan, Golub and LeVeque's formula with an exact count. Batches may differ in size between
    ranks and be empty; gradients of gradients work. Other devices run torch.nn.SyncBatchNorm's code.

    Not a subclass of torch.nn.SyncBatchNorm, because DistributedDataParallel refuses that on CPUs.

    Args:
        process_group: the ranks that share statistics, a group of any backend. None: all ranks. If
            the default group has the backend "syncbn", the layers then use a group of their own.
    """

    def __init__(self, num_features, eps=1e-5, momentum=0.1, affine=True,
                 track_running_stats=True, process_group=None, device=None, dtype=None):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device,
                         dtype=dtype)
        self.process_group = process_group

    _check_input_dim = torch.nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels = torch.nn.SyncBatchNorm._check_non_zero_input_channels

    @classmethod
    def convert_sync_batchnorm(cls, module, process_group=None):
        """Same as the function convert_sync_batchnorm()."""
        return convert_sync_batchnorm(module, process_group)

    def forward(self, input):
        if not self.training or input.device.type != "cpu":
            return torch.nn.SyncBatchNorm.forward(self, input)
        tracks = self.track_running_stats
        return _C.sync_batch_norm(
            input, self.weight, self.bias, self.running_mean if tracks else None,
            self.running_var if tracks else None, self.num_batches_tracked if tracks else None,
            self.momentum, self.eps, self._layer(), self._statistics_group())

    def _layer(self):
        """Identifies the layer to the other ranks. Created at the first call, because it cannot be
        copied or pickled."""
        if "_layer_handle" not in self.__dict__:
            self._layer_handle = _C.Layer(self.__dict__.get("_layer_name", ""))
        return self._layer_handle

    def _statistics_group(self):
        # By ==, not `is`: NON_GROUP_MEMBER is a number, of which unpickling makes another object.
        if self.process_group == torch.distributed.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("SyncBatchNorm: this rank is no member of the layer's process_group; "
                             "run the layer on the group's members only")
        if self.process_group is not None or _C.is_initialized():
            return self.process_group
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.group.WORLD
        ranks = os.environ.get("WORLD_SIZE", "1")
        if ranks != "1":
            raise RuntimeError(
                f"SyncBatchNorm is training with WORLD_SIZE={ranks} and no process group: its "
                "statistics would be this rank's alone; call init_process_group() first")
        return None

    def __getstate__(self):
        state = self.__dict__.copy()
        state.pop("_layer_handle", None)
        return state


_FORWARDS = (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward, SyncBatchNorm.forward)


def convert_sync_batchnorm(module, process_group=None):
    """Turns each BatchNorm layer of `module`, and `module` itself if it is one, into a SyncBatchNorm.

    Works in place and returns `module`. The layers stay the same objects, so parameters, hooks,
    attributes and references to them remain valid.

    Args:
        process_group: as in SyncBatchNorm

    Raises:
        ValueError: a layer is lazy, or has a forward() of its own, as timm's BatchNormAct2d with
            its activation. No layer is converted then.
    """
    layers = [(name, layer) for name, layer in module.named_modules()
              if isinstance(layer, _BatchNorm)]
    for name, layer in layers:
        if torch.nn.parameter.is_lazy(layer.weight) or torch.nn.parameter.is_lazy(
                layer.running_mean):
            raise ValueError(f"convert_sync_batchnorm: layer '{name}' is lazy; run the module "
                             "once before the conversion")
        if getattr(layer.forward, "__func__", None) not in _FORWARDS:
            raise ValueError(
                f"convert_sync_batchnorm: layer '{name}', a {type(layer).__name__}, has a "
                "forward() of its own, which the conversion would drop; replace it by a BatchNorm "
                "layer, and a layer for what else it does")
    for name, layer in layers:
        if not isinstance(layer, SyncBatchNorm):
            layer.__class__ = SyncBatchNorm
        layer.process_group = process_group
        layer.__dict__.pop("_layer_handle", None)  # the layer may have run under another name
        layer._layer_name = name
    return module
