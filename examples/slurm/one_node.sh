#!/bin/bash
# One machine, with a worker on each GPU, or on each of the job's CPUs if it has none:
#
#   sbatch --gpus-per-node=4 examples/slurm/one_node.sh configs/images.yaml data.train=photos/train …
#
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --output=%x-%j.out

# srun does not take --cpus-per-task over from sbatch.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

exec srun syncbn-launch --standalone --nproc_per_node=auto train --config "$@"
