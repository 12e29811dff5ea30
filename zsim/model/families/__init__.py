"""The models zsim can run: for each family, how it is built from its architecture."""

from __future__ import annotations

from importlib import import_module

from zsim.errors import NotModeled
from zsim.model.kernels import FLASH
from zsim.model.layers import Module, Net
from zsim.model.spec import Workload

# transformers' model_type -> the prefix of its class names
LLAMA_LIKE = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
    "olmo2": "Olmo2",
}
GEMMA = {"gemma": "Gemma", "gemma2": "Gemma2", "gemma3_text": "Gemma3", "vaultgemma": "VaultGemma"}
MOE = {"mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe"}
MOE_RELATIVES = (
    "glm4_moe", "glm4_moe_lite", "granitemoe", "granitemoeshared", "dots1", "solar_open", "exaone_moe", "minimax_m2",
    "hunyuan_v1_moe", "ernie4_5_moe", "youtu",
)  # fmt: skip
MOE_FURTHER = ("mistral4", "axk1", "hy_v3", "mellum", "afmoe", "flex_olmo", "kolibri1")
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")  # with linear attention
OTHERS = {  # model_type -> file here, class of the root
    "gpt2": ("gpt2", "GPT2LMHeadModel"),
    "gpt_neox": ("gpt_neox", "GPTNeoXForCausalLM"),
    **dict.fromkeys(("gptj", "codegen"), ("gptj", "GPTJForCausalLM")),
    "opt": ("opt", "OPTForCausalLM"),
    "phi": ("phi", "PhiForCausalLM"),
    "phi3": ("phi", "Phi3ForCausalLM"),
    "falcon": ("falcon", "FalconForCausalLM"),
    "mpt": ("alibi", "MptForCausalLM"),
    "bloom": ("alibi", "BloomForCausalLM"),
    "bert": ("bert", "BertForMaskedLM"),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), ("bert", "RobertaForMaskedLM")),
    "phimoe": ("phimoe", "PhimoeForCausalLM"),
    "dbrx": ("dbrx", "DbrxForCausalLM"),
    "electra": ("bert", "ElectraForMaskedLM"),
    "esm": ("esm", "EsmForMaskedLM"),
    "distilbert": ("distilbert", "DistilBertForMaskedLM"),
    "modernbert": ("modernbert", "ModernBertForMaskedLM"),
    "modernbert-decoder": ("modernbert", "ModernBertDecoderForCausalLM"),
    "gpt_oss": ("gpt_oss", "GptOssForCausalLM"),
    "stablelm": ("stablelm", "StableLmForCausalLM"),
    "starcoder2": ("stablelm", "Starcoder2ForCausalLM"),
    **dict.fromkeys(("cohere", "cohere2", "cohere2_moe"), ("cohere", "CohereForCausalLM")),
    **dict.fromkeys(("glm", "glm4", "ernie4_5"), ("glm", "GlmForCausalLM")),
    **dict.fromkeys(("gpt_neo", "gpt_bigcode"), ("gpt_neo", "GPTForCausalLM")),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), ("deepseek", "DeepseekForCausalLM")),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), ("deepseek_v32", "IndexedForCausalLM")),
    "gemma4_text": ("gemma4", "Gemma4ForCausalLM"),
    "gemma3n_text": ("gemma3n", "Gemma3nForCausalLM"),
    "llama4_text": ("llama4", "Llama4ForCausalLM"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("lfm2", "Lfm2ForCausalLM")),
    **dict.fromkeys(DELTA[:3], ("qwen_next", "QwenNextForCausalLM")),
    **dict.fromkeys(
        ("cwm", "ministral", "helium", "hyperclovax", "jais2", "apertus"), ("siblings", "SiblingForCausalLM")
    ),
    **dict.fromkeys(("minicpm3", "nanochat", "bitnet"), ("further", "FurtherForCausalLM")),
    "mamba2": ("mamba", "Mamba2ForCausalLM"),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM"),
    **dict.fromkeys(("granitemoehybrid", "bamba", "falcon_h1"), ("mamba_hybrids", "HybridForCausalLM")),
    **dict.fromkeys(MOE_RELATIVES, ("moe_relatives", "MoeRelativeForCausalLM")),
    **dict.fromkeys(MOE_FURTHER, ("moe_further", "MoeFurtherForCausalLM")),
    **dict.fromkeys(
        ("olmo", "olmo3", "granite", "seed_oss", "hunyuan_v1_dense", "exaone4", "arcee", "nemotron", "ministral3"),
        ("relatives", "RelativeForCausalLM"),
    ),
}
VISION = {
    "gemma3": ("vlm", "Gemma3ForConditionalGeneration"),
    "gemma4": ("gemma4_vision", "Gemma4ForConditionalGeneration"),
    "paligemma": ("vlm", "PaliGemmaForConditionalGeneration"),
    **dict.fromkeys(
        (
            "llava",
            "llava_next",
            "llava_next_video",
            "llava_onevision",
            "mistral3",
            "internvl",
            "lighton_ocr",
            "aya_vision",
            "cohere2_vision",
        ),
        ("llava", "LlavaForConditionalGeneration"),
    ),
    "llama4": ("llama4_vision", "Llama4ForConditionalGeneration"),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr"), ("glm_vision", "Glm4vForConditionalGeneration")),
    "mllama": ("mllama", "MllamaForConditionalGeneration"),
    **dict.fromkeys(("idefics3", "smolvlm"), ("idefics", "IdeficsForConditionalGeneration")),
    **dict.fromkeys(DELTA[3:], ("qwen_next", "Qwen35ForConditionalGeneration")),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), ("vlm", "QwenForConditionalGeneration")),
    "paddleocr_vl": ("paddleocr", "PaddleOCRVLForConditionalGeneration"),
    "exaone4_5": ("exaone_vision", "Exaone45ForConditionalGeneration"),
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), ("omni", "ThinkerForConditionalGeneration")),
}
SEQ2SEQ = {
    **dict.fromkeys(("t5", "mt5"), ("t5", "T5ForConditionalGeneration")),
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian", "m2m_100"), ("bart", "BartForConditionalGeneration")),
    "umt5": ("umt5", "UMT5ForConditionalGeneration"),
    "whisper": ("whisper", "WhisperForConditionalGeneration"),
}
FUSED = {  # families with kernels that are not torch's, where not LLAMA_LIKE alone
    "liger": (*LLAMA_LIKE, "gemma", "phi3", "glm4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
}
UNGATED = (  # whose MLP is one product, an activation and another product
    "gpt2", "gpt_neo", "gpt_bigcode", "gpt_neox", "gptj", "codegen", "opt", "phi", "falcon", "mpt", "bloom",
    "starcoder2", "nanochat", "bert", "roberta", "xlm-roberta", "camembert", "electra", "esm", "distilbert",
)  # fmt: skip
COMPILED_LOSS = (*LLAMA_LIKE, "gpt2")  # of transformers', whose torch.compile takes the loss with the model
ENCODERS = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "electra",
    "esm",
    "distilbert",
    "modernbert",
    "modernbert-decoder",
)
POSITIONLESS = ("gpt_bigcode", "gpt_neo", "mpt", "bloom")  # decoders whose attention is not told the positions
FAMILIES = (*LLAMA_LIKE, *GEMMA, *MOE, *OTHERS, *VISION, *SEQ2SEQ)


def breaks_graphs(family: str, workload: Workload) -> bool:
    """Whether torch.compile's graph of a decoder's block has a break, which leaves a checkpointed one eager: what is
    given to torch.utils.checkpoint is compiled as one graph or, as `checkpoint` is disabled for dynamo, not at all.

    transformers 4.44 to 4.52 and 5.24 modeling_flash_attention_utils.py `_is_packed_sequence`: FlashAttention branches
    on the positions, since 4.53 of one sequence alone. Recorded with torch 2.13 and transformers 5.24.
    """
    told = family not in (*SEQ2SEQ, *ENCODERS, *POSITIONLESS)
    if not (workload.compile and told and workload.implementation == "hf" and workload.attention in FLASH):
        return False
    if workload.transformers is None:
        return workload.sequences == 1
    return workload.transformers >= (4, 44) and family in LLAMA_LIKE


def build(net: Net) -> Module:
    """The root module of a family. Raises NotModeled for a family that is not here. Imports only what it needs."""
    family = net.arch.family
    if net.kernels == "mamba-ssm":
        if net.arch.mamba is None or net.implementation != "hf":
            raise NotModeled(
                f"mamba-ssm's kernels in {net.implementation}'s {family}", field="kernels", accepted="torch"
            )
    elif net.kernels == "fla":
        if family not in DELTA or net.implementation != "hf":
            raise NotModeled(
                f"flash-linear-attention's kernels in {net.implementation}'s {family}",
                field="kernels",
                accepted="torch",
            )
    elif net.kernels != "torch" and (family not in FUSED.get(net.kernels, LLAMA_LIKE) or net.implementation != "hf"):
        accepted = f"transformers' implementation of {', '.join(FUSED.get(net.kernels, LLAMA_LIKE))}"
        raise NotModeled(
            f"{net.kernels[0].upper()}{net.kernels[1:]} kernels in {net.implementation}'s {family}",
            field="kernels",
            accepted=accepted,
        )
    if net.sequence_parallel_size > 1 and any(kind.mixer != "attention" for kind in net.arch.kinds):
        raise NotModeled(
            f"sequence parallelism of {family}, some of whose layers read a sequence from its start",
            field="sequence_parallel_size",
            accepted="1",
        )
    plain = net.implementation == "hf" and family in COMPILED_LOSS and net.kernels == "torch"
    if net.loss.endswith("compiled") and not plain and (net.implementation, net.loss) != ("torchtitan", "compiled"):
        raise NotModeled(
            f"a compiled loss in {net.implementation}'s {family}", field="loss", accepted="hf, held, fused"
        )
    if net.copies_logits and net.implementation != "hf":
        raise NotModeled(f"copied logits in {net.implementation}'s {family}", field="loss", accepted="hf, held")
    if net.implementation == "torchtitan":
        from zsim.model.families.torchtitan import Transformer

        if family not in ("llama", "mistral", "qwen2", "qwen3"):
            raise NotModeled(f"torchtitan's implementation of {family!r}", accepted="llama, mistral, qwen2, qwen3")
        if net.loss == "fused":
            raise NotModeled(
                "the fused loss in torchtitan's implementation", field="loss", accepted="hf, held, compiled"
            )
        return Transformer(net)
    if net.implementation == "litgpt":
        from zsim.model.families.litgpt import GPT

        if family not in ("llama", "mistral") or net.arch.tied:
            raise NotModeled(f"litgpt's implementation of {family!r}", accepted="llama, mistral")
        if net.loss not in ("hf", "uncast", "uncast_held"):  # its own is uncast
            raise NotModeled("another loss in litgpt's implementation", field="loss", accepted="uncast, uncast_held")
        return GPT(net)
    if net.implementation == "llm-foundry":
        from zsim.model.families.foundry import MPT

        if family != "mpt":
            raise NotModeled(f"llm-foundry's implementation of {family!r}", accepted="mpt")
        return MPT(net)
    if net.implementation == "torch.nn":
        from zsim.model.families.encoder import SimpleTransformerModel

        return SimpleTransformerModel(net)
    if family in LLAMA_LIKE:
        from zsim.model.families import llama

        return llama.LlamaForCausalLM(net, LLAMA_LIKE[family])
    if family in GEMMA:
        from zsim.model.families.gemma import GemmaForCausalLM

        return GemmaForCausalLM(net, GEMMA[family])
    if family in MOE:
        from zsim.model.families.moe import MoeForCausalLM

        return MoeForCausalLM(net, MOE[family])
    if family in VISION or family in SEQ2SEQ:
        module, name = (VISION | SEQ2SEQ)[family]
        return getattr(import_module(f"zsim.model.families.{module}"), name)(net)
    if net.arch.labels:
        from zsim.model.families.classifiers import SequenceClassification

        return SequenceClassification(net)
    if family in OTHERS:
        module, name = OTHERS[family]
        model = getattr(import_module(f"zsim.model.families.{module}"), name)
        return model(net, "Phi3") if family == "phi3" else model(net)
    raise NotModeled(f"model family {family!r}", accepted=", ".join(FAMILIES))
