#!/bin/bash
#SBATCH --nodes 2
#SBATCH --ntasks-per-node 1
#SBATCH --gpus-per-node 8
#SBATCH --exclusive
# Trains on all GPUs of all nodes of a SLURM job: sbatch examples/cluster/slurm.sh train.py [arguments]
set -euo pipefail
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") # all of them: `| head -n 1` would end scontrol by SIGPIPE
first_host=${hosts%%$'\n'*}
# Set EP_PLUGIN here or outside, for example EP_PLUGIN=megatron. srun and torchrun pass the environment on.
export EP_PLUGIN_DUMP=${EP_PLUGIN_DUMP:-ep_plugin_dump/$SLURM_JOB_ID} # if a rank fails: ep-doctor --merge this folder
srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
  --rdzv-backend c10d --rdzv-endpoint "$first_host:${PORT:-29500}" --rdzv-id "$SLURM_JOB_ID" "$@"
