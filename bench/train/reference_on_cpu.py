"""Runs torchvision's references/classification/train.py on CPUs. The script uses NCCL and a GPU whatever --device says.

  torchrun --nproc_per_node=2 bench/train/reference_on_cpu.py /path/to/references/classification/train.py [OPTION]...
"""

import runpy
import sys

import torch
import torch.distributed as dist
from torch.nn import parallel

init_process_group, distributed = dist.init_process_group, parallel.DistributedDataParallel
torch.cuda.set_device = lambda _: None
dist.init_process_group = lambda **options: init_process_group(**{**options, "backend": "gloo"})
parallel.DistributedDataParallel = lambda model, device_ids: distributed(model)

sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
