#!/bin/bash
# A run that takes longer than its time limit, or whose nodes may be preempted. It saves its state before it must end,
# returns to the queue under the same job id, and resumes.
#
#   sbatch --time=4:00:00 --partition=preemptible examples/slurm/preemptible.sh configs/imagenet.yaml
#
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --requeue
#SBATCH --signal=USR1@120
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
most_requeues=50

# train saves its state and exits with 85 on USR1, which SLURM sends 120 s before the time limit.
# If SLURM preempts the job, it sends SIGTERM, with the same effect, and requeues the job itself.
srun syncbn-launch --nproc_per_node=auto --max_restarts=3 \
  train --run_dir "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" --resume auto --config "$@"
code=$?

# 75: a node, the network or a disk failed.
if { [ $code = 85 ] || [ $code = 75 ]; } && [ "${SLURM_RESTART_COUNT:-0}" -lt $most_requeues ]; then
  scontrol requeue "$SLURM_JOB_ID" && sleep infinity # until SLURM ends this script
fi
exit $code
