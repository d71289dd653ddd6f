#!/bin/bash
# Train on a Slurm cluster. A run that reaches the time limit saves, is queued again, and resumes.
#
#   sbatch launchers/slurm.sh
#
# Edit the three places marked EDIT. The clone, its virtual environment and the output folder must be on a shared
# disk. On each machine Slurm starts the kit's own command; the kit starts a rank per GPU.
#
# Tested: on one machine, with stand-ins for srun and scontrol (tests/test_launchers.py): a run of two ranks, the
# signal before the limit, the requeue, the end. Not tested on a cluster, nor with containers.

# EDIT 1: the machines. Slurm asks the run to save 300 seconds before the limit: a step and a save must fit.
#SBATCH --job-name=kit
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@300

#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# EDIT 2: the environment. With containers (pyxis), the last line, with your image.
cd "$SLURM_SUBMIT_DIR" || exit 1
source .venv/bin/activate
container=()
# container=(--container-image="$PWD/kit.sqsh" --container-mounts="$PWD:$PWD" --container-workdir="$PWD")

# EDIT 3: the run.
output_dir=runs/slurm
config=accelerate_configs/fsdp.yaml
flags=(--recipe qwen3-32b-full --per_device_train_batch_size 1 --dataset my.jsonl --save_steps 200)

# The config with the machines of this job. It keeps its name when the job is queued again.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
mkdir -p "$(dirname "$output_dir")"
cat "$config" - > "$output_dir.yaml" <<END
num_machines: $SLURM_JOB_NUM_NODES
main_process_ip: $head
main_process_port: $((20000 + RANDOM % 10000))
END

record="$output_dir/run.json"
before=$(cat "$record" 2> /dev/null)
srun "${container[@]}" python recipes/finetune.py --config "$output_dir.yaml" --output_dir "$output_dir" "${flags[@]}" &
step=$!
trap 'kill -USR1 "$step"' USR1 # srun passes it on to the ranks, which save and end
wait "$step"
status=$?
while kill -0 "$step" 2> /dev/null; do # a signal ends `wait`, but not the run
    wait "$step"
    status=$?
done

# The number of steps done if a signal stopped the run, else null. A record from before this start does not count.
if [ "$(cat "$record" 2> /dev/null)" != "$before" ] && grep -q '"interrupted": [0-9]' "$record"; then
    scontrol requeue "$SLURM_JOB_ID"
    exit
fi
exit "$status"
