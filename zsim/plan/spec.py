"""How training is sharded: one frozen dataclass per framework, in the framework's own words and defaults."""

from __future__ import annotations

from dataclasses import dataclass

# What configurations call element types, and torch.
TORCH_DTYPE = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

# bitsandbytes' paged optimizers, and the bytes of a parameter's states
PAGED = {"adamw": 8, "adam": 8, "lion": 4, "adamw8bit": 2}


@dataclass(frozen=True, slots=True)
class Optimizer:
    """`name`: adamw, adam, sgd, lion, adafactor, adamw8bit (bitsandbytes), adamw4bit (torchao), muon.
    `impl`: fused | foreach | loop | cpu."""

    name: str = "adamw"
    impl: str = "fused"
    momentum: bool = False  # of sgd, whose own default is none
    paged: bool = False  # bitsandbytes: states in CUDA's managed memory, which the driver moves to the host for others
    decay_groups: bool = False  # two parameter groups, the second without weight decay: biases and norms
    ns_method: str = "gram"  # of DeepSpeed's Muon: gram | standard (torch.optim.Muon's)


@dataclass(frozen=True, slots=True)
class Allocator:
    """Settings of torch's caching allocator in its own names, PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF).

    `roundup_power2_divisions`: of requests of 1 MiB and less, of 2 MiB, 4 MiB ... 32 GiB and more; (): none.
    """

    expandable_segments: bool = False
    max_split_size_mb: int | None = None  # None: every block may be split
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0
    roundup_power2_divisions: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Saving:
    """How a run writes its checkpoints, and whether it begins by reading one.

    `by`: trainer (Hugging Face's Trainer, or accelerate) | engine (DeepSpeed's save_checkpoint and save_16bit_model) |
    async (torch.distributed.checkpoint's async_save) | none.
    """

    by: str = "trainer"
    only_model: bool = False  # save_only_model
    resume: bool = False  # resume_from_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all frameworks share. dtypes are torch names ("bfloat16")."""

    world_size: int
    grad_accum: int = 1
    grad_clip: float | None = 1.0
    optimizer: Optimizer = Optimizer()
    offload_activations: str | None = None  # to host memory until backward, with full checkpointing: blocking | stream
    # who reads the checkpoint into host memory: every_rank | rank0 | meta (nobody); gpu: every rank, into its GPU's
    load: str = "every_rank"
    load_dtype: str | None = None  # of what is trained, as loaded to the GPU; None: that of the run
    omp_num_threads: int | None = None  # of each process's work on host tensors; None: one per core of the node
    allocator: Allocator = Allocator()
    saving: Saving | None = None  # None: nobody says how, or whether


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpPlan(Plan):
    """torch.nn.parallel.DistributedDataParallel. `dtype` is that of parameters and gradients."""

    version: str = "2.13.0"
    dtype: str = "float32"
    autocast: str | None = None  # compute dtype under torch.autocast, whatever type the parameters have
    bucket_cap_mb: float | None = None  # None: torch's default of 25 MiB with a first bucket of 1 MiB
    find_unused_parameters: bool = False
    static_graph: bool = False
    gradient_as_bucket_view: bool = False
    no_sync: bool = True  # only the last micro-step of an accumulation reduces


# DeepSpeed runtime/zero/leaf_module_config.py DEFAULT_LEAF_MODULE_CLASSES
LEAF_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedPlan(Plan):
    """DeepSpeed ZeRO. Field names and defaults are those of DeepSpeed's zero_optimization section."""

    version: str = "0.19.8"
    stage: int = 0
    dtype: str = "bfloat16"  # bf16.enabled / fp16.enabled / neither
    communication_data_type: str | None = None
    sequence_parallel_size: int = 1  # neighbouring ranks that share their sequences (Ulysses)
    seq_parallel_communication_data_type: str = "float32"  # instead of communication_data_type, if they do
    autoep_size: int = 0  # ranks that share the experts (expert_parallel.autoep_size); 0: AutoEP is off
    use_data_before_expert_parallelism: bool = False  # and these are not neighbours
    grad_accum_dtype: str | None = None  # data_types.grad_accum_dtype
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    allgather_partitions: bool = True
    reduce_scatter: bool = True
    overlap_comm: bool | None = None  # None: DeepSpeed's default, True for stage 3 and False below
    contiguous_gradients: bool = True
    round_robin_gradients: bool = False
    use_multi_rank_bucket_allreduce: bool = True
    prescale_gradients: bool = False
    sub_group_size: int = 1_000_000_000
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_param_persistence_threshold: int = 100_000
    stage3_model_persistence_threshold: int | None = None
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_allgather_sequential: bool = False
    stage3_gather_16bit_weights_on_model_save: bool = False
    use_all_reduce_for_fetch_params: bool = False
    zero_init: bool = False  # the model was built under deepspeed.zero.Init
    memory_efficient_linear: bool = True  # where the linear layers are DeepSpeed's: under zero.Init, or from 0.19.4 on
    leaf_blocks: bool = False  # set_z3_leaf_modules on the model's blocks
    leaf_classes: tuple[str, ...] = LEAF_CLASSES  # leaf_module.classes
    leaf_names: tuple[str, ...] = ()
    leaf_name_suffixes: tuple[str, ...] = ()
    stage3_module_granularity_threshold: int = 0
    zero_hpz_partition_size: int = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    gpus_per_node: int | None = None  # that a process sees; None: all ranks are in one node
    mics_shard_size: int = -1  # of DeepSpeed before 0.19.7; -1: no MiCS
    mics_hierarchical_params_gather: bool = False
    offload_optimizer: str | None = None  # cpu | nvme
    offload_param: str | None = None
    offload_optimizer_pin_memory: bool = True  # offload_optimizer.pin_memory
    offload_param_pin_memory: bool = True
    offload_optimizer_ratio: float = 1.0  # of the sub-groups on the CPU, stage 3 (ZeRO-Offload++)
    offload_optimizer_super_offload: bool = False
    offload_optimizer_cpuadam_cores_perc: float = 0.8  # of SuperOffload
    offload_optimizer_buffer_count: int = 4  # NVMe
    offload_optimizer_pipeline_read: bool = False
    offload_optimizer_pipeline_write: bool = False
    offload_param_buffer_count: int = 5  # NVMe
    offload_param_buffer_size: int = 100_000_000  # elements
    offload_param_max_in_cpu: int = 1_000_000_000  # elements; the rest is on NVMe
    aio_block_size: int = 1_048_576  # bytes of an NVMe request
    aio_queue_depth: int = 8  # requests of one thread in flight
    aio_intra_op_parallelism: int = 1  # threads that share a read or write
    aio_use_gds: bool = False  # parameters from NVMe straight to the GPU
    check_grad_overflow: bool = True  # bf16.check_grad_overflow
    bf16_master_weights_and_grads: bool = False  # of the bf16 section: no float32 copy of weights and gradients
    bf16_optimizer_states: bool = False
    torch_autocast: str | None = None  # torch_autocast.dtype, over a model in that same type
    auto: tuple[str, ...] = ()  # fields that were "auto": engines beside the Trainer's own have DeepSpeed's defaults
    throughput_timer: bool = True  # timers.throughput: enabled, and synchronized

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks with sequences of their own."""
        return self.world_size // self.sequence_parallel_size

    def sharing(self, home: str) -> int:
        """Ranks that ZeRO partitions a parameter of that `home` over."""
        return self.world_size // self.autoep_size if home == "expert_data_parallel" else self.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp2Plan(Plan):
    """torch.distributed.fsdp.fully_shard on every block and the root."""

    version: str = "2.13.0"
    param_dtype: str = "bfloat16"  # mixed-precision policy; storage of shards is float32 unless `storage_dtype`
    reduce_dtype: str = "float32"
    storage_dtype: str = "float32"
    reshard_after_forward: bool | int = True
    root_reshard_after_forward: bool | None = None  # None: left unset, the root keeps its parameters
    mesh: tuple[int, int] | None = None  # (replicate, shard) for HSDP
    prefetch: int = 0  # explicit set_modules_to_{forward,backward}_prefetch depth
    sync_only_last: bool = False  # set_requires_gradient_sync(False) in all but the last micro-step
    all_reduce_only_last: bool = False
    reshard_backward_only_last: bool = False  # set_reshard_after_backward(False) until the last micro-step
    last_backward_only_last: bool = False  # set_is_last_backward(False) until the last micro-step
    # hf: the root holds everything outside blocks | titan: embedding, blocks, norm+head | titan2024: as hf, and the
    # last block keeps its parameters (torchtitan before July 2025, pull request 1094) | accelerate: of release 1.14 and
    # later, as titan, and a tied embedding with norm and head
    grouping: str = "hf"
    wrap: tuple[str, ...] = ()  # as Fsdp1Plan's
    adapter_units: bool = False  # every adapter a unit of its own, as axolotl has it
    frozen_dtype: str | None = None  # of shards that are not trained; None: as the others
    cpu_offload: bool = False
    offload_pin_memory: bool = True  # CPUOffloadPolicy.pin_memory
    state_dict_type: str = "SHARDED_STATE_DICT"  # FULL_STATE_DICT
    state_dict_offload_to_cpu: bool = True  # of full ones: on rank 0's host; False: on every GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp1Plan(Plan):
    """torch.distributed.fsdp.FullyShardedDataParallel, wrapped per block, all in one (`flat`), or by size."""

    version: str = "2.13.0"
    sharding_strategy: str = "FULL_SHARD"  # SHARD_GRAD_OP | NO_SHARD | HYBRID_SHARD | _HYBRID_SHARD_ZERO2
    param_dtype: str = "bfloat16"
    reduce_dtype: str = "bfloat16"
    storage_dtype: str = "float32"  # of the model that was wrapped: shards, their gradients, optimizer states
    frozen_dtype: str | None = None  # of units that are not trained; None: as the others
    backward_prefetch: str | None = "BACKWARD_PRE"  # BACKWARD_POST | None
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    mesh: tuple[int, int] | None = None  # (replicate, shard) for HYBRID
    no_sync: bool = False
    use_orig_params: bool = True  # accelerate's and torchtitan's choice; torch's own default is False
    flat: bool = False  # no auto-wrap policy: one unit
    min_num_params: int | None = None  # size_based_auto_wrap_policy's
    wrap: tuple[str, ...] = ()  # classes of modules that are units, as transformer_auto_wrap_policy has it; (): blocks
    adapter_units: bool = False  # every adapter a unit of its own, as transformers' Trainer has it for peft's models
    cpu_offload: bool = False
    zero_grad_to_none: bool = True  # False: with cpu_offload the gradients on the host are zeroed after each update
    state_dict_type: str = "FULL_STATE_DICT"  # SHARDED_STATE_DICT | LOCAL_STATE_DICT
    state_dict_offload_to_cpu: bool = True  # of full ones: on rank 0's host; False, torch's own default: on every GPU


AnyPlan = DdpPlan | DeepSpeedPlan | Fsdp2Plan | Fsdp1Plan
