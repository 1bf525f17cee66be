#!/bin/bash
# mpirun (Open MPI) instead of torchrun. It starts one launcher per host, and each launcher starts its workers:
#
#   examples/mpi/several_hosts.sh node0,node1 configs/imagenet.yaml
#
hosts=$1
shift
first=${hosts%%,*}

# By default, mpirun binds the launcher, and thus all its workers, to one core.
exec mpirun --host "$hosts" --map-by ppr:1:node --bind-to none \
  syncbn-launch --master_addr="${first%%:*}" --nproc_per_node=auto train --config "$@"
