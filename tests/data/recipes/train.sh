#!/bin/bash
# Full fine-tuning on two nodes.
GPUS_PER_NODE=8
NNODES=2
export MODEL=some/model
BS=${BS:-2}          # per GPU
echo torchrun train.py --per_device_train_batch_size $BS

DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes=$NNODES \
    --master_port 29500
"

torchrun $DISTRIBUTED_ARGS train.py \
    --model_name_or_path "${MODEL}" \
    --bf16 True \
    --per_device_train_batch_size $BS \
    # --per_device_train_batch_size 8 \
    --gradient-accumulation-steps 4 \
    --gradient_checkpointing \
    --model_max_length=2048 \
    --learning_rate 2e-5 \
    --fsdp "full_shard auto_wrap" \
    --fsdp_config '{"version": 1}' \
    --report_to none
