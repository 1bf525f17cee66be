#!/bin/bash
# One job on several machines. srun starts one launcher per machine; they find each other through SLURM's variables.
#
#   sbatch --nodes=4 --gpus-per-node=8 examples/slurm/several_nodes.sh configs/imagenet.yaml
#
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --output=%x-%j.out

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

exec srun syncbn-launch --nproc_per_node=auto --max_restarts=3 train --config "$@"
