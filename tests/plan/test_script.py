"""Shell scripts that start a training run: the arguments in them are the Trainer's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plan.test_recipes import read_file, said
from zsim.errors import InputError, NotModeled
from zsim.plan.reading import Reading

# Numbers, redirections, conditions and loops over arguments as scripts that people publish have them.
ODD = """#!/bin/bash
NODES=${SLURM_NNODES:-2}
GPUS=8
BATCH=${1:-256}
ZERO=$2
extra="--optim adamw_torch"
if [ "$ZERO" == "" ]; then
  ZERO=3
fi
while [[ $# -ge 1 ]]; do
  case "$1" in
    --extra) extra="$2"; shift ;;
  esac
done
for argument in "$@"; do extra="$argument"; done
if [ $NODES -gt 4 ]; then
  LENGTH=8192
elif [[ $GPUS = 8 ]]; then
  LENGTH=4096
else
  torchrun --nproc_per_node 1 other.py --per_device_train_batch_size 9
fi
cat > ds_zero.json <<EOF
torchrun in.py --per_device_train_batch_size 7
EOF
STEPS=$((BATCH / 4 / (NODES * GPUS)))
NAME="run_$(date +%F)"
torchrun --nnodes $NODES --nproc_per_node $GPUS train.py \\
  --model_name_or_path some/model --max_length $LENGTH --output_dir out/$NAME $extra \\
  --per_device_train_batch_size 4 --gradient_accumulation_steps $STEPS 2>&1 | tee log_$ZERO.txt \\
  # --fp16
"""

DATA = Path(__file__).parents[1] / "data" / "recipes"


def script(folder: Path, text: str) -> Reading:
    path = folder / "train.sh"
    path.write_text(text)
    return read_file(path)[1]


def test_a_script_with_variables_comments_and_a_launcher():
    kind, reading = read_file(DATA / "train.sh")
    assert kind == "trainer"
    assert reading.ranks == 16
    fields = said(reading)
    assert (fields["micro_batch"], fields["grad_accum"], fields["seq_len"]) == (2, 4, 2048)
    assert (fields["framework.name"], fields["fsdp.sharding_strategy"]) == ("fsdp1", "FULL_SHARD")
    assert (fields["precision"], fields["checkpointing"]) == ("bf16", "full")
    assert reading.places[("grad_accum",)] == (DATA / "train.sh", 20)
    assert "model (the config.json of some/model)" in reading.missing


def test_of_an_option_given_twice_the_last_counts_and_is_where_it_stands(tmp_path: Path):
    text = "torchrun t.py \\\n  --per_device_train_batch_size 1 \\\n  --per_device_train_batch_size 4 \\\n  --bf16\n"
    reading = script(tmp_path, text + "# t.py --per_device_train_batch_size 8\necho --per_device_train_batch_size 2\n")
    assert said(reading)["micro_batch"] == 4
    assert reading.places["micro_batch",] == (tmp_path / "train.sh", 3)


def test_what_a_script_sets_twice_is_not_guessed():
    with pytest.raises(InputError, match="STEPS") as caught:
        read_file(DATA / "arrays.slurm")
    assert caught.value.field == "gradient_accumulation_steps"
    assert caught.value.line == 12


def test_arrays_and_commands_inside_a_quotation(tmp_path: Path):
    text = (DATA / "arrays.slurm").read_text().replace("    STEPS=8\nelse\n", "")
    reading = script(tmp_path, text)
    assert reading.ranks == 4
    fields = said(reading)
    assert (fields["precision"], fields["grad_accum"], fields["checkpointing"]) == ("fp16", 16, "full")


def test_numbers_conditions_and_redirections(tmp_path: Path):
    reading = script(tmp_path, ODD)
    fields = said(reading)
    assert (fields["micro_batch"], fields["grad_accum"], fields["seq_len"]) == (4, 256 // 4 // 16, 4096)
    assert (reading.ranks, fields["optimizer.impl"], fields["precision"]) == (16, "foreach", "fp32")
    assert any("started without arguments" in text for text in reading.notes)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--gradient_accumulation_steps $(nvidia-smi -L | wc -l)", "another command prints it"),
        ("--gradient_accumulation_steps $3", "an argument of the script, taken to be started without any"),
        ("--gradient_accumulation_steps $((8 / ZERO))", "calculated of what is not known"),
    ],
)
def test_values_that_only_a_run_would_show(tmp_path: Path, option: str, says: str):
    with pytest.raises(InputError, match=says) as caught:
        script(tmp_path, f"ZERO=0\ntorchrun {ONE} {option}\n")
    assert (caught.value.field, caught.value.line) == ("gradient_accumulation_steps", 2)


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("--use_llm_lora 16", "which parameters train"), ("--lora_rank 64", "which parameters train"),
        ("--train_mode qlora", "which parameters train"), ("--freeze_llm True", "which parameters train"),
        ("--tune_mm_vision False", "which parameters train"), ("--mm_tunable_parts=mm_mlp_adapter", "which parameters"),
        ("--use_4bit_quantization True", "weights in few bits"), ("--load_in_kbits 8", "weights in few bits"),
        ("--rank 128 --alpha 256", "which parameters train"), ("--include_expert_lora true", "which parameters train"),
        ("--use_unsloth True", "Unsloth"), ("--use_customized_optim 1", "an optimizer of the script's own"),
    ],
)  # fmt: skip
def test_options_of_a_scripts_own_that_change_what_trains_are_refused(tmp_path: Path, option: str, what: str):
    with pytest.raises(NotModeled, match=what) as caught:
        script(tmp_path, f"torchrun {ONE} {option}\n")
    assert caught.value.line == 1


def test_a_module_is_a_program_as_a_file_is(tmp_path: Path):
    options = "--model_name_or_path m --output_dir o --per_device_train_batch_size 1"
    for module in ("openai-oss-sft-lora", "pkg.train_lora", "pkg.finetune.qlora"):
        with pytest.raises(NotModeled, match="adapters, as the script's own code has it"):
            script(tmp_path, f"torchrun --nproc_per_node 8 -m {module} {options}\n")
    assert said(script(tmp_path, f"torchrun --nproc_per_node 8 -m pkg.train {options}\n"))["micro_batch"] == 1


def test_options_of_a_scripts_own_that_change_nothing(tmp_path: Path):
    harmless = "--freeze_llm False --tune_mm_llm True --use_lora 0 --lora_r 8 --load_in_kbits 16 --train_mode full"
    parts = "--mm_tunable_parts mm_vision_tower,mm_mlp_adapter,mm_language_model"
    fields = said(script(tmp_path, f"torchrun {ONE} {harmless} {parts} --use_unsloth False\n"))
    assert fields["checkpointing"] == "none"
    switched = script(
        tmp_path, f"torchrun {ONE} --grad_checkpoint True --use_flash_attn --torch_compile_mode default\n"
    )
    fields = said(switched)
    assert (fields["checkpointing"], fields["attention"], fields["compile"]) == ("full", "flash", True)
    assert any("grad_checkpoint: taken for gradient_checkpointing" in text for text in switched.notes)


@pytest.mark.parametrize(
    ("command", "error", "says"),
    [
        ("python infer.py --model_name_or_path m --deepspeed ds.json --fp16", InputError, "arguments of its own"),
        ("python train.py --lr 1", InputError, "no command in it that trains"),
        ("deepspeed a.py --deepspeed ds.json --bf16\ndeepspeed b.py --deepspeed ds.json", InputError, "2 commands"),
        ("deepspeed main.py --deepspeed --zero_stage 3 --model_name_or_path m", InputError, "DeepSpeed-Chat"),
        ("srun pretrain_gpt.py --micro-batch-size 1 --num-layers 2 --fp16 --deepspeed", InputError, "Megatron"),
        ("deepspeed run.py --deepspeed --deepspeed_config ds.json", InputError, "arguments of its own"),
        ("deepspeed t.py --deepspeed --per_device_train_batch_size 1", InputError, "a switch of the script's own"),
        ("python t.py --per_device_train_batch_size 1 --lora_enable True", NotModeled, "the script's own code"),
        ("python t.py --per_device_train_batch_size $((2 * N))", InputError, "calculated of what is not known"),
    ],
)
def test_what_is_no_start_of_the_trainer_is_refused(tmp_path: Path, command: str, error: type, says: str):
    with pytest.raises(error, match=says) as caught:
        script(tmp_path, f"#!/bin/bash\n{command}\n")
    assert caught.value.file == tmp_path / "train.sh"


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("deepspeed --num_gpus 4", 4),
        ("deepspeed --num_nodes 2 --num_gpus=8", 16),
        ("deepspeed --include localhost:0,1,3", 3),
        ("accelerate launch --num_processes 8 --num_machines 2", 8),
        ("torchrun --nproc-per-node 2", 2),
        ("torchrun --nproc_per_node $N", None),
        ("python", None),
    ],
)
def test_how_many_gpus_a_launcher_is_told(tmp_path: Path, launcher: str, ranks: int | None):
    assert script(tmp_path, f"{launcher} train.py --per_device_train_batch_size 1\n").ranks == ranks


@pytest.mark.parametrize("text", ["", "\n", "echo 'open", "A=(\n", "--fsdp\n", "x --fsdp=\n", "cat <<E\n--fsdp\nE\n"])
def test_odd_scripts_are_read_or_refused(tmp_path: Path, text: str):
    with pytest.raises(InputError):
        script(tmp_path, text)


ONE = "train.py --per_device_train_batch_size 1"
TRAIN = f"torchrun --nproc_per_node 2 {ONE}"


@pytest.mark.parametrize(
    "text",
    [
        'ARGS="--bf16"\nARGS="$ARGS --gradient_checkpointing"\n{train} $ARGS\n',
        'ARGS="--bf16"\nARGS+=" --gradient_checkpointing"\n{train} $ARGS\n',
        'ARGS=(--bf16)\nARGS+=(--gradient_checkpointing)\n{train} "${{ARGS[@]}}"\n',
        'ARGS="--fp16"\nARGS="--bf16 --gradient_checkpointing"\n{train} ${{ARGS}} "$@"\n',
        "if [ $1 ]; then\n  A=--bf16\nelse\n  A=--bf16\nfi\n{train} $A --gradient_checkpointing\n",
    ],
)
def test_a_variable_that_is_set_again_keeps_its_order(tmp_path: Path, text: str):
    fields = said(script(tmp_path, text.format(train=TRAIN)))
    assert (fields["precision"], fields["checkpointing"]) == ("bf16", "full")


@pytest.mark.parametrize(
    ("text", "says", "line", "field"),
    [
        ("{train} $ARGS --bf16", r"\$ARGS is not known here: the script does not set it", 1, None),
        ("{train} \\\n  ${{ARGS[@]}}", r"\$\{ARGS\[@\]\} is not known here", 2, None),
        ('ARGS="$ARGS --bf16"\n{train} $ARGS', r"\$ARGS is not known here", 2, None),
        ("if [ $1 ]; then A=--bf16; fi\n{train} $A", r"\$A is not known here: it is set by what is not", 2, None),
        ('A=--bf16\n[ $1 ] && A="$A --tf32"\n{train} $A', r"\$A is not known here: it is set by what", 3, None),
        ("A=--bf16\nfor i in 1 2; do\n A=--fp16\ndone\n{train} $A", r"\$A is not known", 5, None),
        ("A=--bf16\ncase $1 in\n x) A=--fp16;;\nesac\n{train} $A", r"\$A is not known here: it is set by", 5, None),
        ("{train} --gradient_accumulation_steps $N", "does not set it", 1, "gradient_accumulation_steps"),
        (
            "for N in 1 2; do\n{train} --gradient_accumulation_steps $N\ndone",
            r"\$N is not known here: it is set by what is not simulated",
            2,
            "gradient_accumulation_steps",
        ),
    ],
)
def test_a_variable_that_is_not_known_is_named(tmp_path: Path, text: str, says: str, line: int, field: str | None):
    with pytest.raises(InputError, match=says) as caught:
        script(tmp_path, text.format(train=TRAIN) + "\n")
    assert (caught.value.file, caught.value.line, caught.value.field) == (tmp_path / "train.sh", line, field)


CONF = "expandable_segments:True,max_split_size_mb:512"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"# of 8\nexport OMP_NUM_THREADS=12\nexport PYTORCH_CUDA_ALLOC_CONF={CONF}\n{TRAIN}\n", 3),
        (f"OMP_NUM_THREADS=12 PYTORCH_ALLOC_CONF={CONF} {TRAIN}\n", 1),
        (f"N=12\nOMP_NUM_THREADS=$N\nexport OMP_NUM_THREADS\nenv PYTORCH_ALLOC_CONF='{CONF}' {TRAIN}\n", 4),
        (f"export PYTORCH_ALLOC_CONF={CONF}\naccelerate launch --num_cpu_threads_per_process 12 {ONE}\n", 1),
    ],
)  # fmt: skip
def test_what_is_set_in_the_environment(tmp_path: Path, text: str, line: int):
    reading = script(tmp_path, text)
    fields = said(reading)
    assert (fields["omp_num_threads"], fields["allocator.conf"]) == (12, CONF)
    assert reading.places[("allocator", "conf")] == (tmp_path / "train.sh", line)


def test_what_is_not_exported_is_not_in_the_environment(tmp_path: Path):
    assert "omp_num_threads" not in said(script(tmp_path, f"OMP_NUM_THREADS=12\n{TRAIN}\n"))


def test_threads_that_are_exported_reach_accelerates_processes(tmp_path: Path):
    launch = f"accelerate launch --use_deepspeed --zero_stage 3 --offload_optimizer_device cpu {ONE}\n"
    assert said(script(tmp_path, f"export OMP_NUM_THREADS=12\n{launch}"))["omp_num_threads"] == 12
    assert said(script(tmp_path, launch))["omp_num_threads"] == 1


@pytest.mark.parametrize(
    ("setting", "field"),
    [
        ("OMP_NUM_THREADS=0", "OMP_NUM_THREADS"),
        ("OMP_NUM_THREADS=many", "OMP_NUM_THREADS"),
        ("PYTORCH_CUDA_ALLOC_CONF=expandable:True", "PYTORCH_CUDA_ALLOC_CONF"),
        ("PYTORCH_ALLOC_CONF=backend:cudaMallocAsync", "PYTORCH_ALLOC_CONF"),
        ("PYTORCH_ALLOC_CONF=roundup_power2_divisions:3", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_bad_values_in_the_environment(tmp_path: Path, setting: str, field: str):
    with pytest.raises(InputError) as caught:
        script(tmp_path, f"#!/bin/bash\nexport {setting}\n{TRAIN}\n")
    assert (caught.value.file, caught.value.line, caught.value.field) == (tmp_path / "train.sh", 2, field)


@pytest.mark.parametrize(
    ("launcher", "says"),
    [
        ("deepspeed --num_gpus=-1", "num_gpus -1: for as many GPUs as there are"),
        ("torchrun --nproc_per_node gpu", "nproc_per_node gpu: for as many GPUs as there are"),
        ("torchrun --nnodes 1:4 --nproc_per_node 8", "nnodes 1:4: for as many GPUs as there are"),
        ("torchrun --nproc_per_node=$NPROC", "nproc_per_node: $NPROC is not known here: the script does not set it"),
        ("accelerate launch --num_processes $N", "num_processes: $N is not known here: the script does not set it"),
    ],
)
def test_a_number_of_gpus_that_is_not_known_is_named(tmp_path: Path, launcher: str, says: str):
    reading = script(tmp_path, f"{launcher} {ONE}\n")
    assert reading.ranks is None
    assert [text for text in reading.notes if text.startswith(says)]


@pytest.mark.parametrize("option", ["--num_gpus 0", "--num_gpus -2", "--nproc_per_node many", "--num_nodes 1.5"])
def test_what_is_no_number_of_gpus(tmp_path: Path, option: str):
    with pytest.raises(InputError, match="is not a number of processes") as caught:
        script(tmp_path, f"\ndeepspeed {option} {ONE}\n")
    assert (caught.value.line, caught.value.field) == (2, option.split()[0][2:])


def test_sequences_that_a_scripts_own_code_shares_are_refused(tmp_path: Path):
    text = "python t.py --per_device_train_batch_size 1 --sequence_parallel_size {}\n"
    with pytest.raises(NotModeled, match="sequence_parallel_size"):
        script(tmp_path, text.format(4))
    assert not script(tmp_path, text.format(1)).not_modeled


def test_a_quotation_that_stays_open_takes_no_longer_than_others(tmp_path: Path):
    """Every line was parsed again with all before it."""
    import time

    text = "echo 'open\n" + "python eval.py --batch 1 # a line of help\n" * 6000
    start = time.process_time()
    with pytest.raises(InputError, match="no command in it that trains"):
        script(tmp_path, text)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("declared", ["", "declare -a ", "local -r ", "readonly ", "export "])
def test_arrays_over_several_lines(tmp_path: Path, declared: str) -> None:
    text = f"""{declared}RUN=(
    --nproc_per_node=4
    --nnodes=2   # machines
)
{declared}ARGS=(
    --model_name_or_path m \\
    --per_device_train_batch_size 3
)
torchrun "${{RUN[@]}}" train.py "${{ARGS[@]}}"
"""
    reading = script(tmp_path, text)
    assert (said(reading)["micro_batch"], reading.ranks) == (3, 8)


def test_what_places_the_launcher_is_not_the_trainings(tmp_path: Path) -> None:
    """Options of srun, whatever a variable among them holds."""
    text = """EXTRA=""
if [ -d /opt/cluster ]; then EXTRA="--auto-resume=1"; fi
srun --nodes=4 --gres=gpu:8 $EXTRA torchrun --nproc_per_node 8 train.py \\
  --model_name_or_path m --per_device_train_batch_size 1
"""
    reading = script(tmp_path, text)
    assert (said(reading)["micro_batch"], reading.ranks) == (1, 8)
    assert not any("gres" in line for line in reading.not_read)


def test_options_of_torchrun_that_are_not_known(tmp_path: Path) -> None:
    """They choose processes alone; accelerate's choose what shards."""
    options = "train.py --model_name_or_path m --per_device_train_batch_size 1"
    reading = script(tmp_path, f"torchrun $DISTRIBUTED_ARGS {options}\n")
    assert reading.ranks is None
    assert any(note.startswith("$DISTRIBUTED_ARGS is not known here") for note in reading.notes)
    with pytest.raises(InputError, match=r"\$ACCELERATE_ARGS is not known here"):
        script(tmp_path, f"accelerate launch $ACCELERATE_ARGS {options}\n")
    with pytest.raises(InputError, match=r"\$MORE is not known here"):
        script(tmp_path, f"torchrun {options} $MORE\n")
