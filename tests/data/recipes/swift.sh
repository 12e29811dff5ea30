#!/bin/bash
set -e
: "${GPUS:=4}"
nodes=2
export NNODES=$nodes NODE_RANK=0 MASTER_ADDR=10.0.0.1

# adapters on all linear layers of the text model
NPROC_PER_NODE=$GPUS \
CUDA_VISIBLE_DEVICES=0,1,2,3 \
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
swift sft \
    --model some/model \
    --train_type lora \
    --dataset 'first#500' 'second#500' \
    --split_dataset_ratio 0.01 \
    --torch_dtype bfloat16 \
    --attn_impl flash_attn \
    --lora_rank 16 \
    --target_modules all-linear \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps $(expr 64 / $GPUS / $nodes) \
    --max_length 4096 \
    --gradient_checkpointing_kwargs '{"use_reentrant": false}' \
    --deepspeed zero2 \
    --save_steps "$SAVE_EVERY" \
    --output_dir output \

echo "trained --deepspeed zero3"
