"""Reads a DeepSpeed configuration (JSON or Hjson) as DeepSpeed 0.19.8 and the Hugging Face Trainer read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zsim.document import Document, Path_, dotted, read_text
from zsim.errors import NotModeled
from zsim.plan.deepspeed_keys import ALIASES, SECTIONS, USED
from zsim.plan.deepspeed_walk import AUTO, OPTIMIZERS, Keys
from zsim.plan.hjson import parse_hjson
from zsim.plan.reading import NOT_ENABLED, Reading
from zsim.plan.spec import TORCH_DTYPE
from zsim.plan.values import leaves
from zsim.plan.version import VERSION, parse_version

# transformers 5.24 integrations/deepspeed.py, HfTrainerDeepSpeedConfig.trainer_config_finalize.
AUTO_FROM_HIDDEN_SIZE = {
    "reduce_bucket_size": "hidden_size ** 2",
    "stage3_prefetch_bucket_size": "0.9 * hidden_size ** 2",
    "stage3_param_persistence_threshold": "10 * hidden_size",
}
LOW_PRECISION_STATES = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
_TRAINER_ARGUMENT = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}


def read_deepspeed(path: Path, version: str = VERSION, zero_init: bool | None = None) -> Reading:
    """Read a DeepSpeed configuration. Raises InputError where DeepSpeed refuses it, NotModeled where zsim does."""
    return read_document(parse_hjson(read_text(path, "DeepSpeed configuration"), path), version, zero_init)


def read_document(document: Document, version: str = VERSION, zero_init: bool | None = None) -> Reading:
    """The same for an already parsed file; `document.data` holds DeepSpeed's keys.

    `zero_init`: whether the tool around DeepSpeed builds a stage 3 model under zero.Init; None where it is not known.
    """
    reading = Reading("DeepSpeed configuration", document)
    _Reader(reading, parse_version(version)).read()
    if reading.fields["zero", "stage"] == 3:
        if zero_init is None and AUTO in leaves(document.data):
            zero_init = True
            reading.notes.append("auto is the Trainer's to resolve, which builds a stage 3 model under zero.Init")
        if zero_init is not None:
            reading.fields["zero", "zero_init"] = zero_init
    return reading


def with_trainers_groups(reading: Reading) -> Reading:
    """What the Trainer adds to a configuration without an optimizer: transformers 5.24 trainer.py, create_optimizer,
    makes two parameter groups, weight decay or not. Where the file names one, it hands over all parameters as one group
    (integrations/deepspeed.py, deepspeed_optim_sched)."""
    if ("optimizer", "name") not in reading.fields:
        reading.fields["optimizer", "decay_groups"] = True
        reading.notes.append(
            "optimizer.decay_groups: true, as the Trainer makes two parameter groups where the file names no optimizer"
        )
    return reading


class _Reader(Keys):
    """What the keys say together."""

    def read(self) -> None:
        self.walk("", (), self.document.data)
        self.zero()
        self.precision()
        self.optimizer()
        self.sequences()
        self.experts()
        self.batch()
        self.training()
        for why, keys in self.without_effect.items():
            self.reading.without_effect.append(f"{', '.join(keys)} ({why})")
        self.reading.fields[("framework", "name")] = "deepspeed"
        if not {("micro_batch",), ("train_batch_size",)} & self.reading.fields.keys():
            self.reading.lacks("micro_batch")
        for field in ("model", "cluster", "seq_len"):
            self.reading.lacks(field)

    def set(self, field: Path_, value: Any, full: str) -> None:
        self.reading.set(field, value, self.place_of(full))

    def place_of(self, full: str) -> Path_:
        """The path of a used key in the file, under whichever name it stands."""
        path = tuple(full.split("."))
        for alias, canonical in ALIASES.items():
            if path[-1] == canonical and (*path[:-1], alias) in self.document.places:
                return (*path[:-1], alias)
        return path

    def zero(self) -> None:
        prefix = "zero_optimization."
        stage = self.values.get(f"{prefix}stage")
        stage = 0 if stage in (None, AUTO) else stage
        if stage not in (0, 1, 2, 3):
            raise self.document.error(
                ("zero_optimization", "stage"), f"{stage} is not a stage", accepted="0, 1, 2 or 3"
            )
        self.reading.fields[("zero", "stage")] = stage
        self.reading.places[("zero", "stage")] = self.document.place(("zero_optimization", "stage"))
        for full, value in self.values.items():
            name = full.removeprefix(prefix)
            if not full.startswith(prefix) or "." in name or name == "stage":
                continue
            if name in ("offload_param", "offload_optimizer", "cpu_offload", "cpu_offload_param", "leaf_module"):
                continue
            if value == AUTO:
                self.auto_zero(name, stage)
                continue
            if value is None:
                continue
            if name.startswith("stage3_gather_"):
                self.gather_on_save(full, value, stage)
                continue
            if name == "mics_shard_size" and value <= 0:
                continue  # as its default, -1
            if name == "stage3_module_granularity_threshold":
                value = max(value, 0)  # below 0 it is as off as at 0
            least = 1 if name in ("reduce_bucket_size", "zero_hpz_partition_size") else 0
            if not isinstance(value, bool) and value < least:
                raise self.document.error(self.place_of(full), f"{value} is too small", accepted=f"{least} or more")
            self.set(("zero", name), value, full)
        for side in ("offload_optimizer", "offload_param"):
            self.offload(side, stage)
        self.aio()
        for name in SECTIONS["zero_optimization.leaf_module"]:
            chosen = self.values.get(f"zero_optimization.leaf_module.{name}")
            if chosen is not None:
                self.set(("zero", "leaf_module", name), chosen, f"zero_optimization.leaf_module.{name}")

    def gather_on_save(self, full: str, value: bool, stage: int) -> None:
        """zero/config.py: fp16 is the old name, which gives way to 16bit."""
        if stage != 3:
            self.without_effect.setdefault("saving in stage 3 alone", []).append(full)
            return
        field = ("zero", "stage3_gather_16bit_weights_on_model_save")
        if "fp16" not in full or field not in self.reading.fields:
            self.set(field, value, full)

    def auto_zero(self, name: str, stage: int) -> None:
        full = f"zero_optimization.{name}"
        if name in AUTO_FROM_HIDDEN_SIZE and (name == "reduce_bucket_size" or stage == 3):
            self.set(("zero", name), AUTO, full)
        else:
            self.reading.notes.append(
                f"{full}: auto is DeepSpeed's default, {SECTIONS['zero_optimization'][name].default}"
            )

    def offload(self, side: str, stage: int) -> None:
        full = f"zero_optimization.{side}"
        old = {"offload_optimizer": "cpu_offload", "offload_param": "cpu_offload_param"}[side]
        if self.values.get(f"zero_optimization.{old}") not in (None, False, AUTO):
            if full in self.values:
                raise self.document.error(
                    ("zero_optimization", old), f"cannot stand together with {side}, which replaces it"
                )
            self.reading.notes.append(f"{old} is the old way to write {side}: {{device: cpu}}")
            self.set(("zero", side, "device"), "cpu", f"zero_optimization.{old}")
            return self.check_offload_stage(side, stage, ("zero_optimization", old))
        device = self.values.get(f"{full}.device")
        if device in (None, AUTO, "none"):
            return None
        path = ("zero_optimization", side, "device")
        if device not in ("cpu", "nvme"):
            raise self.document.error(path, f"{device!r} is not a device", accepted="none, cpu or nvme")
        self.set(("zero", side, "device"), device, f"{full}.device")
        for name, key in SECTIONS[full].items():
            value = self.values.get(f"{full}.{name}")
            if name != "device" and key.effect == USED and value not in (None, AUTO):
                share = name in ("ratio", "cpuadam_cores_perc")
                if value < 0 or (share and value > 1):
                    accepted = "0 to 1" if share else "0 or more"
                    raise self.document.error((*path[:2], name), f"{value} is out of range", accepted=accepted)
                self.set(("zero", side, name), value, f"{full}.{name}")
        ratio = self.values.get(f"{full}.ratio", 1.0)
        if ratio not in (None, AUTO) and ratio < 1.0 and stage != 3:
            why = "partial offloading is only supported for ZeRO stage 3"
            raise self.document.error((*path[:2], "ratio"), why, "1, or stage 3")
        return self.check_offload_stage(side, stage, path[:2])

    def aio(self) -> None:
        """Read by whatever swaps to NVMe."""
        devices = [self.reading.fields.get(("zero", side, "device")) for side in ("offload_optimizer", "offload_param")]
        for name, key in SECTIONS["aio"].items():
            value = self.values.get(f"aio.{name}")
            if key.effect != USED or value in (None, AUTO):
                continue
            if "nvme" not in devices:
                self.without_effect.setdefault("nothing is offloaded to NVMe", []).append(f"aio.{name}")
                continue
            if not isinstance(value, bool) and value < 1:
                raise self.document.error(("aio", name), f"{value} is too small", accepted="1 or more")
            self.set(("zero", "aio", name), value, f"aio.{name}")

    def check_offload_stage(self, side: str, stage: int, path: Path_) -> None:
        """DeepSpeed reads these and does nothing with them in the wrong stage."""
        if (side == "offload_param" and stage != 3) or stage == 0:
            self.reading.notes.append(f"{dotted(path)} has no effect in stage {stage}")
            for field in [field for field in self.reading.fields if field[:2] == ("zero", side)]:
                del self.reading.fields[field]

    def precision(self) -> None:
        bf16 = self.values.get("bf16.enabled", self.values.get("bfloat16.enabled"))
        if "bf16" in self.values and "bfloat16" in self.values:
            self.reading.notes.append("bfloat16 is the old name of bf16, which also stands here and wins")
            bf16 = self.values.get("bf16.enabled")
        section = "bf16" if "bf16" in self.values else "bfloat16"
        fp16 = self.values.get("fp16.enabled")
        if bf16 is True and fp16 is True:
            raise self.document.error(("fp16", "enabled"), "bf16 and fp16 cannot both be enabled")
        if bf16 is True:
            self.set(("precision",), "bf16", f"{section}.enabled")
        elif fp16 is True:
            self.set(("precision",), "fp16", "fp16.enabled")
        elif AUTO in (bf16, fp16):
            arguments = " and ".join(name for name, value in (("bf16", bf16), ("fp16", fp16)) if value == AUTO)
            self.reading.lacks("precision", f"(auto: the Trainer's {arguments})")
        else:
            self.set(("precision",), "fp32", f"{section}.enabled" if bf16 is not None else "fp16.enabled")
            self.reading.notes.append(NOT_ENABLED)
            if bf16 is None:  # accelerate state.py, set_mixed_precision: what is not there is the Trainer's to add
                self.reading.defaults.add(("precision",))
        for name in ("check_grad_overflow", *LOW_PRECISION_STATES):
            value = self.values.get(f"{section}.{name}")
            if bf16 is True and value not in (None, AUTO) and self.in_release(section, name):
                self.set(("zero", name), value, f"{section}.{name}")
        if self.values.get(f"{section}.immediate_grad_update") is True:
            self.immediate_grad_update(section)
        if self.values.get("torch_autocast.enabled") is True:
            self.autocast("bf16" if bf16 in (True, AUTO) else "fp16" if fp16 in (True, AUTO) else "fp32")

    def in_release(self, section: str, name: str) -> bool:
        """Whether the release knows the key; precision_config.py forbids others since 0.17.1, config.py passed them
        over before."""
        if name not in LOW_PRECISION_STATES or self.version >= (0, 18, 3):
            return True
        if self.version >= (0, 17, 1):
            raise self.document.error((section, name), "a key of DeepSpeed 0.18.3 and later, which stops on it here")
        self.reading.without_effect.append(f"{section}.{name} (of DeepSpeed 0.18.3 and later)")
        return False

    def immediate_grad_update(self, section: str) -> None:
        """bf16_optimizer.py, which the engine takes for stage 1 with float32 accumulation alone."""
        accumulation = self.values.get("data_types.grad_accum_dtype")
        if self.values.get("zero_optimization.stage") == 1 and TORCH_DTYPE.get(str(accumulation).lower()) == "float32":
            why = "gradients added to float32 ones by hooks, one parameter at a time"
            raise self.document.error((section, "immediate_grad_update"), why, kind=NotModeled)
        self.reading.without_effect.append(
            f"{section}.immediate_grad_update (only of stage 1 with data_types.grad_accum_dtype: fp32)"
        )

    def autocast(self, precision: str) -> None:
        """torch_autocast.py: parameters of Linear and convolutions are gathered and reduced in its type, all others in
        their own. Over a model in that same type all are alike, and only operators in float32 are left of it."""
        stated = self.values.get("torch_autocast.dtype")
        short = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32"}
        name = str(stated).lower().removeprefix("torch.")
        dtype = short.get(name, name)
        if dtype != precision or dtype != "bf16":
            why = (
                f"torch.autocast in {dtype if stated else 'a type of its own'} over a model in {precision}: parameters"
            )
            why += " travel in two types, and a GradScaler steps in fp16"
            raise self.document.error(
                ("torch_autocast", "enabled"), why, "bf16.enabled: true, dtype: bfloat16", kind=NotModeled
            )
        self.set(("zero", "torch_autocast"), TORCH_DTYPE[dtype], "torch_autocast.dtype")

    def optimizer(self) -> None:
        name = self.values.get("optimizer.type")
        if ("zero", "offload_optimizer", "device") in self.reading.fields:
            self.states_on_host(name)
        if name is None:
            self.reading.notes.append("no optimizer section: the training script's own (the Trainer's is AdamW)")
            return
        params = self.document.data["optimizer"].get("params") or {}
        kind = OPTIMIZERS[name.lower()]
        if kind == "adam" and params.get("adam_w_mode", True):
            kind = "adamw"  # engine.py, _configure_basic_optimizer: Adam means AdamW unless adam_w_mode is false
        self.set(("optimizer", "name"), kind, "optimizer.type")
        if kind == "muon" and params.get("ns_method") is not None:
            self.set(("optimizer", "ns_method"), params["ns_method"], "optimizer.params.ns_method")
        if kind == "sgd":  # engine.py, _configure_basic_optimizer: torch.optim.SGD(**params)
            self.set(("optimizer", "momentum"), bool(params.get("momentum", 0)), "optimizer.params.momentum")
        if self.values.get("optimizer.params.torch_adam") is True:
            impl = "loop" if self.values.get("optimizer.params.foreach") is False else "foreach"
            self.set(("optimizer", "impl"), impl, "optimizer.params.torch_adam")

    def states_on_host(self, name: str | None) -> None:
        """engine.py, get_optimizer_configuration: DeepSpeedCPUAdam's, where master weights are in bf16."""
        low = self.reading.fields.get(("zero", "bf16_optimizer_states"))
        if low and name is None:
            self.reading.notes.append(
                "bf16_optimizer_states: DeepSpeed asserts that the script's own DeepSpeedCPUAdam was made with "
                "fp32_optimizer_states=False; accelerate's is not"
            )
        masters = self.reading.fields.get(("zero", "bf16_master_weights_and_grads"))
        if masters and not low and self.values.get("optimizer.params.fp32_optimizer_states") is False:
            if self.version < (0, 19, 1):
                path = ("optimizer", "params", "fp32_optimizer_states")
                why = "moments in bf16 on the CPU before DeepSpeed 0.19.1"
                raise self.document.error(path, why, "true", kind=NotModeled)
            self.set(("zero", "bf16_optimizer_states"), True, "optimizer.params.fp32_optimizer_states")

    def sequences(self) -> None:
        """config.py divides the batch by it; registering the attention is the script's business."""
        size = self.values.get("sequence_parallel_size")
        if size not in (None, AUTO):
            if size < 1:
                raise self.document.error(("sequence_parallel_size",), f"{size} is too small", accepted="1 or more")
            self.set(("sequence_parallel_size",), size, "sequence_parallel_size")

    def experts(self) -> None:
        """auto_ep_config.py parse_autoep_config. Nobody fills in an auto."""
        if not self.values.get("expert_parallel.enabled"):
            return
        size = self.values.get("expert_parallel.autoep_size", 1)
        if not isinstance(size, int) or size < 1:
            path = ("expert_parallel", "autoep_size")
            raise self.document.error(path, f"{size} is not a number of ranks", accepted="1 or more")
        self.set(("zero", "autoep_size"), size, "expert_parallel.autoep_size")
        if self.values.get("use_data_before_expert_parallelism") is True:
            name = "use_data_before_expert_parallelism"
            self.set(("zero", name), True, name)

    def batch(self) -> None:
        for key, field in (
            ("train_batch_size", "train_batch_size"),
            ("train_micro_batch_size_per_gpu", "micro_batch"),
            ("gradient_accumulation_steps", "grad_accum"),
        ):
            value = self.values.get(key)
            if value == AUTO:
                if key != "train_batch_size":
                    self.reading.lacks(field, f"(auto: the Trainer's {_TRAINER_ARGUMENT[key]})")
            elif value is not None:
                if value <= 0:
                    raise self.document.error((key,), f"{value} has to be greater than 0")
                self.set((field,), value, key)

    def training(self) -> None:
        clipping = self.values.get("gradient_clipping")
        if clipping == AUTO:
            self.reading.lacks("grad_clip", "(auto: the Trainer's max_grad_norm)")
        elif clipping is not None:
            self.set(("grad_clip",), clipping, "gradient_clipping")
        else:
            default = 1.0 if self.version >= (0, 19, 3) else 0.0
            self.reading.fields[("grad_clip",)] = default
            self.reading.notes.append(f"gradient_clipping: {default}, DeepSpeed's default")
        for key, field in (
            ("communication_data_type", "communication_data_type"),
            ("data_types.grad_accum_dtype", "grad_accum_dtype"),
            ("seq_parallel_communication_data_type", "seq_parallel_communication_data_type"),
        ):
            value = self.values.get(key)
            if value in (None, AUTO):
                continue
            if value.lower() not in TORCH_DTYPE:
                raise self.document.error(
                    tuple(key.split(".")), f"{value!r} is not a type", accepted="fp32, fp16, bf16"
                )
            self.set(("zero", field), TORCH_DTYPE[value.lower()], key)
        for key in ("timers.throughput.enabled", "timers.throughput.synchronized"):
            if self.values.get(key) is False and self.version >= (0, 14, 3):  # pull request 5363
                self.set(("zero", "throughput_timer"), False, key)
        if self.values.get("prescale_gradients") is True:
            self.set(("zero", "prescale_gradients"), True, "prescale_gradients")
        offloads = ("zero", "offload_optimizer", "device") in self.reading.fields
        if self.values.get("zero_force_ds_cpu_optimizer") is False and offloads and "optimizer.type" not in self.values:
            self.set(("optimizer", "impl"), "fused", "zero_force_ds_cpu_optimizer")
            self.reading.notes.append("the training script's own optimizer steps on the CPU: torch's, fused")
