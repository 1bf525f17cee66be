#!/bin/bash
# One run per value, each a task of an array job:
#
#   sbatch --gpus-per-node=1 examples/slurm/sweep.sh configs/digits.yaml
#   train compare runs/train-1234/*            # the array's job id
#
#SBATCH --job-name=train
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --output=%x-%A_%a.out

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
values=(optimizer.lr=0.05 optimizer.lr=0.1 optimizer.lr=0.2 optimizer.lr=0.4) # one per index of --array
value=${values[SLURM_ARRAY_TASK_ID]}

exec srun syncbn-launch --standalone --nproc_per_node=auto \
  train --config "$@" --run_dir "runs/$SLURM_JOB_NAME-$SLURM_ARRAY_JOB_ID/$value" --resume auto "$value"
