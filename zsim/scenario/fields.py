"""The scenario's fields as pydantic models: their types, what each accepts, and the JSON Schema for editors.

An optional field of a framework's section is None here; its default is the framework's own and stands in `plan.spec`.
Annotations are no texts here (`from __future__ import annotations`): pydantic would compile each.
"""

from typing import Annotated, Literal

from pydantic import Field

from zsim.scenario.adapter_fields import LoraField, QuantizeField
from zsim.scenario.evaluation_field import EvaluationField
from zsim.scenario.kinds import (
    MICRO_STEPS,
    Auto,
    Dtype,
    Few,
    Loss,
    Positive,
    PositiveFloat,
    Precision,
    Range,
    Section,
    Whole,
)
from zsim.scenario.objective_field import ObjectiveField


class ModelField(Section):
    """A Hugging Face config.json, or a bare number of parameters."""

    shorthand = "config"
    config: str | None = Field(None, description="path of a Hugging Face config.json, or of its folder")
    params: Annotated[int, Range(10**5, 10**15)] | None = Field(
        None, description="instead of a config: a back-of-envelope model of this many parameters"
    )
    freeze: list[str] = Field(
        [],
        description="patterns of parameter names that are not trained, as in fnmatch; of a vision-language model also "
        "its parts: vision_tower, multi_modal_projector, language_model",
    )


class ImagesField(Section):
    """What the vision tower of a vision-language model is given; image tokens are a part of seq_len."""

    shorthand = "per_sequence"
    per_sequence: Few = Field(1, description="images in every sequence")
    size: tuple[Few, Few] | None = Field(
        None,
        description="height and width in pixels, as the image processor leaves them; a tower of one size has its own",
    )


class ClusterField(Section):
    shorthand = "topology"
    topology: str = Field(description="path of a topology file")
    nodes: Annotated[int, Range(1, 10**5)] | None = Field(None, description="this many copies of the topology's node")


class FrameworkField(Section):
    shorthand = "name"
    name: Literal["deepspeed", "fsdp2", "fsdp1", "ddp"]
    version: str | None = Field(None, description="of deepspeed, or of torch")
    transformers: str | None = Field(
        None,
        description="its release, where it is before 4.49, or before 5.0 and the model has experts; that of the time "
        "of `version` unless given",
    )


class OptimizerField(Section):
    shorthand = "name"
    name: Literal["adamw", "adam", "sgd", "lion", "adafactor", "adamw8bit", "adamw4bit", "muon"] = "adamw"
    impl: Literal["fused", "foreach", "loop", "cpu"] | None = None
    paged: Annotated[bool | None, Field(description="bitsandbytes' paged_adamw: states move to the host")] = None
    momentum: Annotated[bool | None, Field(description="of sgd: whether it keeps one, false unless given")] = None
    ns_method: Annotated[
        Literal["gram", "standard"] | None, Field(description="of DeepSpeed's muon: which Newton-Schulz iteration")
    ] = None
    decay_groups: Annotated[
        bool | None,
        Field(
            description="deepspeed: biases and norms, which do not decay, are a group of their own, as in all runs of "
            "the Trainer whose DeepSpeed configuration names no optimizer; true for such a configuration unless given"
        ),
    ] = None


class Float8Field(Section):
    """torchao's convert_to_float8_training: Linear modules that multiply in float8."""

    shorthand = "recipe"
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    exclude: list[str] | None = Field(
        None,
        description="parts of names of modules that stay as they are (filter_fqns); also first_linear, last_linear and "
        "auto_filter_small_kn; unless given output for torchtitan, else the first and the last, as accelerate has it",
    )
    all_gather: bool | None = Field(None, description="fsdp2: enable_fsdp_float8_all_gather; tensorwise")
    precompute: bool | None = Field(
        None, description="with all_gather: precompute_float8_dynamic_scale_for_fsdp, after the optimizer's step"
    )


class OffloadOptimizerField(Section):
    """DeepSpeed's offload_optimizer."""

    shorthand = "device"

    device: Literal["none", "cpu", "nvme"]
    pin_memory: bool | None = None
    ratio: Annotated[float, Field(ge=0, le=1)] | None = None
    super_offload: bool | None = None
    cpuadam_cores_perc: Annotated[float, Field(gt=0, le=1)] | None = None
    buffer_count: Few | None = None
    pipeline_read: bool | None = None
    pipeline_write: bool | None = None


class OffloadParamField(Section):
    """DeepSpeed's offload_param."""

    shorthand = "device"

    device: Literal["none", "cpu", "nvme"]
    pin_memory: bool | None = None
    buffer_count: Few | None = None
    buffer_size: Positive | None = None
    max_in_cpu: Whole | None = None


class AioField(Section):
    """DeepSpeed's aio section, of offload to NVMe."""

    block_size: Positive | None = Field(None, description="bytes of one request")
    queue_depth: Few | None = Field(None, description="requests of one thread in flight")
    intra_op_parallelism: Few | None = Field(None, description="threads that share a read or write")
    use_gds: bool | None = Field(None, description="parameters from NVMe straight to the GPU")


class LeafModuleField(Section):
    """DeepSpeed's leaf_module: modules that stage 3 gathers whole."""

    classes: list[str] | None = Field(None, description="instead of transformers' mixture-of-experts blocks")
    names: list[str] | None = Field(None, description="as in named_modules()")
    name_suffixes: list[str] | None = None


class ZeroField(Section):
    """DeepSpeed's zero_optimization, in its own words."""

    stage: Literal[0, 1, 2, 3] = 0
    reduce_bucket_size: Auto | Positive | None = None
    allgather_bucket_size: Positive | None = None
    allgather_partitions: bool | None = None
    reduce_scatter: bool | None = None
    overlap_comm: bool | None = None
    contiguous_gradients: bool | None = None
    round_robin_gradients: bool | None = None
    memory_efficient_linear: bool | None = None
    use_multi_rank_bucket_allreduce: bool | None = None
    sub_group_size: Whole | None = None  # 0: a group for every parameter
    stage3_prefetch_bucket_size: Auto | Whole | None = None
    stage3_param_persistence_threshold: Auto | Whole | None = None
    stage3_model_persistence_threshold: Whole | None = None
    stage3_max_live_parameters: Whole | None = None
    stage3_max_reuse_distance: Whole | None = None
    stage3_allgather_sequential: bool | None = None
    autoep_size: Few | None = Field(
        None, description="ranks that share the experts of each layer: expert_parallel.autoep_size of an enabled AutoEP"
    )
    use_data_before_expert_parallelism: bool | None = Field(
        None, description="with autoep_size: neighbours hold the same experts, and do not share them"
    )
    stage3_gather_16bit_weights_on_model_save: bool | None = Field(
        None, description="the Trainer and save_16bit_model write whole weights, gathered in rank 0's host memory"
    )
    use_all_reduce_for_fetch_params: bool | None = Field(None, alias="stage3_use_all_reduce_for_fetch_params")
    zero_hpz_partition_size: Few | None = None
    zero_quantized_weights: bool | None = Field(None, description="ZeRO++: gathered in int8")
    zero_quantized_nontrainable_weights: bool | None = Field(None, description="ZeRO++: frozen ones stored in int8")
    zero_quantized_gradients: bool | None = Field(None, description="ZeRO++: reduced in int4, over several nodes")
    offload_optimizer: OffloadOptimizerField | None = None
    offload_param: OffloadParamField | None = None
    aio: AioField | None = None
    zero_init: bool | None = Field(None, description="the model was built under deepspeed.zero.Init")
    leaf_blocks: bool | None = Field(None, description="set_z3_leaf_modules on the model's blocks")
    leaf_module: LeafModuleField | None = None
    mics_shard_size: Few | None = Field(None, description="MiCS, before DeepSpeed 0.19.7: GPUs that share parameters")
    mics_hierarchical_params_gather: bool | None = None
    stage3_module_granularity_threshold: Whole | None = None
    prescale_gradients: bool | None = None
    communication_data_type: Dtype | None = None
    seq_parallel_communication_data_type: Dtype | None = Field(
        None, description="of gradients where ranks share sequences, float32 unless given"
    )
    grad_accum_dtype: Dtype | None = None
    check_grad_overflow: bool | None = None
    bf16_master_weights_and_grads: bool | None = Field(None, description="DeepSpeed has it in its section bf16")
    bf16_optimizer_states: bool | None = None
    torch_autocast: Literal["bfloat16"] | None = Field(None, description="torch_autocast.dtype, over a model in it")
    throughput_timer: bool | None = Field(
        None, description="timers.throughput, for which the host waits for the GPU after each micro-step"
    )


class DdpField(Section):
    """torch.nn.parallel.DistributedDataParallel."""

    dtype: Dtype | None = Field(None, description="of parameters and gradients; float32 under autocast unless given")
    bucket_cap_mb: PositiveFloat | None = None
    find_unused_parameters: bool | None = None
    static_graph: bool | None = None
    gradient_as_bucket_view: bool | None = None
    no_sync: bool | None = None


class FsdpField(Section):
    """FSDP2's and FSDP1's options; each framework takes its own."""

    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = Field(
        None,
        description="of gradients as they are reduced; that of the run, as accelerate has it, float32 in torchtitan",
    )
    mesh: tuple[Few, Few] | None = Field(None, description="[replicate, shard] for HSDP; fsdp1: by node unless given")
    cpu_offload: bool | None = None
    offload_pin_memory: bool | None = None
    storage_dtype: Dtype | None = Field(
        None,
        description="of shards and optimizer states; float32 unless given, to which accelerate widens them",
    )
    reshard_after_forward: bool | Few | None = Field(None, description="fsdp2")
    root_reshard_after_forward: bool | None = Field(None, description="fsdp2")
    prefetch: Annotated[int, Range(0, 10**6)] | None = Field(None, description="fsdp2: depth of explicit prefetching")
    sync_only_last: bool | None = Field(None, description="fsdp2")
    all_reduce_only_last: bool | None = Field(None, description="fsdp2")
    reshard_backward_only_last: bool | None = Field(None, description="fsdp2")
    grouping: Literal["accelerate", "hf", "titan"] | None = Field(
        None,
        description="fsdp2: what is a unit besides the blocks. accelerate (1.14 and later), titan: embedding; "
        "norm with head. hf (accelerate before 1.14): nothing, the root holds the rest",
    )
    adapter_units: bool | None = Field(
        None, description="every adapter a unit of its own; true with lora under fsdp1, as the Trainer has it"
    )
    frozen_dtype: Dtype | None = Field(None, description="of shards that are not trained; that of the run, as loaded")
    sharding_strategy: (
        Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"] | None
    ) = Field(None, description="fsdp1")
    backward_prefetch: Literal["BACKWARD_PRE", "BACKWARD_POST", "NONE"] | None = Field(None, description="fsdp1")
    forward_prefetch: bool | None = Field(None, description="fsdp1")
    limit_all_gathers: bool | None = Field(None, description="fsdp1")
    no_sync: bool | None = Field(None, description="fsdp1")
    use_orig_params: bool | None = Field(None, description="fsdp1")
    zero_grad_to_none: bool | None = Field(
        None,
        description="fsdp1 with cpu_offload; false: zero_grad(set_to_none=False) zeroes gradients on the host",
    )
    flat: bool | None = Field(None, description="fsdp1: no auto-wrap policy, one unit")
    wrap: list[str] | None = Field(
        None, description="classes of modules that are units; the model's blocks unless given (TRANSFORMER_BASED_WRAP)"
    )
    min_num_params: Annotated[int, Range(1, 10**15)] | None = Field(
        None,
        description="fsdp1: units by size (SIZE_BASED_WRAP, torch's size_based_auto_wrap_policy): every module with so "
        "many parameters that no unit within it holds",
    )
    state_dict_type: Literal["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"] | None = Field(
        None, description="of checkpoints: accelerate's fsdp_state_dict_type; LOCAL_STATE_DICT: fsdp1"
    )
    state_dict_offload_to_cpu: bool | None = Field(
        None,
        description="full state dicts in rank 0's host memory; false, torch's own default, and what the Trainer had "
        "before 4.31 (fsdp1) and accelerate before 1.8 (fsdp2): on every GPU",
    )


class CheckpointingField(Section):
    """Activation checkpointing, of every block unless `every` or `blocks` chooses."""

    shorthand = "policy"
    policy: Literal["none", "full", "selective"] = "full"
    every: Positive | None = Field(None, description="of every n-th block: 2 is the second, the fourth ...")
    blocks: list[Whole] | None = Field(None, description="of these blocks, the first being 0")
    frozen_tower: bool = Field(
        True,
        description="a frozen vision tower takes part: transformers 5 makes its patches require a gradient, so that it "
        "runs a second time and backward; false: it does neither (LLaMA-Factory)",
    )
    early_stop: bool = Field(
        True,
        description="a block's second run stops at the last tensor that backward needs, as torch has it; false: it "
        "goes on to the block's end (torchtitan from September 2025)",
    )
    offload: Annotated[
        bool | Literal["stream"],
        Field(
            description="the inputs of these blocks wait in host memory: true as with Unsloth's checkpointer; stream "
            "beside the computation, as with activation_offloading of TRL and torchtune"
        ),
    ] = False


class SavingField(Section):
    """How checkpoints are written, in which memory may run out too."""

    shorthand = "by"
    by: Literal["trainer", "engine", "async", "none"] = Field(
        "trainer",
        description="the Trainer or accelerate; engine: DeepSpeed's save_checkpoint and save_16bit_model; async: "
        "torch.distributed.checkpoint.async_save of FSDP2's shards, as torchtitan's async_mode; none: it only resumes",
    )
    only_model: bool = Field(False, description="save_only_model: without the optimizer's states")
    resume: bool = Field(False, description="resume_from_checkpoint: the run begins by reading one")


class AllocatorField(Section):
    """torch's caching allocator, PYTORCH_ALLOC_CONF, by its keys."""

    shorthand = "conf"
    conf: str | None = Field(None, description="the variable itself: expandable_segments:True,max_split_size_mb:512")
    expandable_segments: bool | None = None
    max_split_size_mb: Annotated[int, Range(20, 10**7)] | None = None
    garbage_collection_threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    per_process_memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    roundup_power2_divisions: Few | str | None = Field(None, description="4, or by megabytes [256:1,512:2,>:8]")


class ScenarioFields(Section):
    """One scenario: what is trained, on what, and how it is sharded. Paths are relative to the file."""

    name: str | None = None
    model: ModelField
    cluster: ClusterField
    framework: FrameworkField
    zero: ZeroField | None = None
    fsdp: FsdpField | None = None
    ddp: DdpField | None = None
    deepspeed_config: str | None = Field(
        None, description="path of a DeepSpeed configuration, read as the Trainer does"
    )
    micro_batch: Few | None = Field(None, description="sequences, or pairs of them, per GPU and micro-step")
    seq_len: Annotated[int, Range(1, 10**9, tokens=True)] = Field(description="tokens per sequence; 4k is 4096")
    target_len: Annotated[int, Range(1, 10**9, tokens=True)] | None = Field(
        None, description="tokens of the decoder, where seq_len are those of an encoder (T5); as many unless given"
    )
    images: ImagesField | None = Field(None, description="of a vision-language model; 1 per sequence unless given")
    sequence_parallel_size: Few = Field(
        1, description="deepspeed: neighbouring GPUs that share sequences (Ulysses, as ALST and accelerate's sp_size)"
    )
    grad_accum: Annotated[int, MICRO_STEPS] | None = Field(
        None, description="micro-steps per optimizer step, 1 unless given"
    )
    train_batch_size: Annotated[int, Range(1, 10**12)] | None = Field(
        None, description="sequences per optimizer step, over all GPUs"
    )
    precision: Precision = "bf16"
    optimizer: OptimizerField = OptimizerField()
    lora: LoraField | None = None
    quantize: QuantizeField | None = Field(None, description="of the frozen weights; needs lora")
    float8: Float8Field | None = Field(None, description="products in float8, by torchao")
    checkpointing: CheckpointingField = CheckpointingField(
        policy="none", every=None, blocks=None, frozen_tower=True, early_stop=True
    )
    attention: Literal["flash", "flash3", "flash4", "cudnn", "sdpa", "efficient", "eager"] | None = Field(
        None,
        description="flash unless given, but another where the model does not take it, and eager with a transformers "
        "before 4.36; sdpa: the kernel that torch takes on the GPU (cuDNN's on Hopper and B200, else FlashAttention, "
        "before Ampere the memory-efficient one); efficient: SDPA that is given a mask (padded batches; transformers "
        "4.38 to 4.40, and when torch.compile takes the model, which is what sdpa is then)",
    )
    loss: Loss | None = Field(
        None,
        description="hf: float32 logits; uncast: logits in their own type; copied: float32 logits, all but the last "
        "token's copied (transformers before 4.49); copied_uncast, copied_cast: in their own type, the copy cast by "
        "autocast or not (Llama before 4.31); held, uncast_held, copied_held: which the training loop holds "
        "through the backward; compiled: by torch.compile; fused: in chunks, so that all logits never "
        "exist. hf unless given, but with an older transformers as that had it, and compiled with the model",
    )
    kernels: Literal["torch", "liger", "unsloth", "flash-attn", "fla", "mamba-ssm"] = Field(
        "torch",
        description="liger: its fused RMSNorm and SwiGLU or GEGLU; unsloth: its RMSNorm and loss in place; "
        "flash-attn: its RMSNorm, rotary embedding and loss, with xformers' SwiGLU; fla: flash-linear-attention and "
        "causal-conv1d in layers of linear attention; mamba-ssm: it and causal-conv1d in state spaces",
    )
    implementation: Literal["hf", "torchtitan"] = Field("hf", description="whose modules")
    objective: ObjectiveField | None = Field(
        None,
        description="training by preference, where micro_batch counts pairs; unless given the next token is learned",
    )
    grad_clip: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = 1.0
    compile: bool = False
    evaluation: EvaluationField | None = Field(None, description="unless given nothing is said of evaluations")
    saving: SavingField | None = Field(
        None,
        description="unless given nothing is said of checkpoints, but where zero or fsdp say how weights are gathered",
    )
    allocator: AllocatorField | None = Field(None, description="PYTORCH_ALLOC_CONF (or PYTORCH_CUDA_ALLOC_CONF)")
    load: Literal["every_rank", "rank0", "meta", "gpu"] | None = Field(
        None,
        description="who reads the checkpoint into host memory: every_rank, but meta (nobody) for torchtitan; gpu: "
        "every rank, into its GPU's (a device_map)",
    )
    load_dtype: Dtype | None = Field(
        None, description="with load: gpu, of what is trained before it is sharded; that of the run unless given"
    )
    omp_num_threads: Few | None = Field(
        None,
        description="CPU threads of each process, of Adam on the host: for deepspeed all cores unless given, else 1, "
        "as torchrun sets it",
    )
    profile: str = Field("default", description="software stack of the cost profile, or a file of zsim calibrate")
