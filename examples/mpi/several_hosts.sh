#!/bin/bash
# mpirun (Open MPI) in torchrun's place. It starts one launcher on each host, and the launcher starts the workers:
#
#   examples/mpi/several_hosts.sh node0,node1 configs/imagenet.yaml
#
hosts=$1
shift
first=${hosts%%,*}

# By default mpirun binds the launcher, and with it all workers, to one core.
exec mpirun --host "$hosts" --map-by ppr:1:node --bind-to none \
  syncbn-launch --master_addr="${first%%:*}" --nproc_per_node=auto train --config "$@"
