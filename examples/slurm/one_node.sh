#!/bin/bash
# One machine, with one worker per GPU, or per CPU of the job if it has no GPUs:
#
#   sbatch --gpus-per-node=4 examples/slurm/one_node.sh configs/images.yaml data.train=photos/train …
#
#SBATCH --job-name=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --output=%x-%j.out

# srun does not inherit --cpus-per-task from sbatch.
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

exec srun syncbn-launch --standalone --nproc_per_node=auto train --config "$@"
