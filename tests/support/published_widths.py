"""The sizes of published models, written down once: what tests of kernels draw from beside what formats allow.

Of every family in docs/tables/models.md there is a model. Sizes are those of config.json; where `model` ends in
`(default)`, those of the family's config class in transformers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy


class Published(NamedTuple):
    """A model: widths are numbers of columns or rows, `inner` those of all kinds of feed-forward layers.

    `heads` are query and KV heads, `head_dims` all sizes of a head of queries, keys and values, `ranks` the latent
    sizes of queries and keys, `experts` the experts of a layer and how many of them a token chooses.
    """

    family: str
    model: str
    hidden: int
    inner: tuple[int, ...]
    heads: tuple[int, int]
    head_dims: tuple[int, ...]
    vocabulary: int
    experts: tuple[int, int] = (0, 0)
    ranks: tuple[int, ...] = ()


PUBLISHED: tuple[Published, ...] = (
    # Mixtures of experts: inner sizes are those of dense, routed and shared feed-forward layers.
    Published("afmoe", "Trinity-Mini", 2048, (6144, 1024), (32, 4), (128,), 200192, (128, 8)),
    Published("afmoe", "(default)", 2048, (6144, 1408), (16, 16), (128,), 200192, (64, 6)),
    Published("aria_text", "Aria", 2560, (1664, 3328), (20, 20), (128,), 100352, (64, 6)),
    Published("axk1", "A.X-K1", 7168, (18432, 2048), (64, 64), (192, 128), 163840, (192, 8), (1536, 512, 64)),
    Published("axk2", "(default)", 2048, (5120, 512), (32, 32), (96, 64), 163840, (128, 8), (384, 128, 32)),
    Published("bailing_hybrid", "(default)", 2560, (6144, 768), (32, 32), (192, 128), 157184, (512, 8), (512, 64)),
    Published("beam", "(default)", 5120, (20480, 2560), (48, 8), (128,), 151936, (256, 8)),
    Published("cohere2_moe", "(default)", 8192, (22528,), (64, 64), (128,), 256000, (8, 2)),
    Published("deepseek_ocr2_text", "(default)", 4096, (11008, 1407, 2814), (32, 32), (128,), 102400, (64, 6)),
    Published("deepseek_v2", "DeepSeek-V2-Lite", 2048, (10944, 1408, 2816), (16, 16), (192, 128), 102400, (64, 6),
              (512, 64)),
    Published("deepseek_v2", "DeepSeek-V2", 5120, (12288, 1536, 3072), (128, 128), (192, 128), 102400, (160, 6),
              (1536, 512, 64)),
    Published("deepseek_v3", "DeepSeek-V3", 7168, (18432, 2048), (128, 128), (192, 128), 129280, (256, 8),
              (1536, 512, 64)),
    Published("deepseek_v32", "DeepSeek-V3.2-Exp", 7168, (18432, 2048), (128, 128), (192, 128), 129280, (256, 8),
              (1536, 512, 64)),
    Published("dots1", "dots.llm1", 4096, (10944, 1408, 2816), (32, 32), (128,), 152064, (128, 6)),
    Published("dots1", "(default)", 4608, (10944, 1408), (32, 32), (144,), 152064, (128, 6)),
    Published("dots3_note_text", "(default)", 5120, (13824, 1536), (128, 128), (192, 128), 152064, (256, 8),
              (1024, 512, 64)),
    Published("ernie4_5_moe", "ERNIE-4.5-21B-A3B", 2560, (12288, 1536, 3072), (20, 4), (128,), 103424, (64, 6)),
    Published("ernie4_5_moe", "ERNIE-4.5-300B-A47B", 8192, (28672, 3584), (64, 8), (128,), 103424, (64, 8)),
    Published("ernie4_5_vl_moe_text", "(default)", 2560, (12288, 1536, 512), (20, 4), (128,), 103424, (64, 6)),
    Published("exaone_moe", "K-EXAONE-236B-A23B", 6144, (18432, 2048), (64, 8), (128,), 153600, (128, 8)),
    Published("flex_olmo", "FlexOlmo-7x7B-1T", 4096, (11008,), (32, 32), (128,), 100352, (7, 5)),
    Published("flint", "(default)", 2048, (6144, 512, 1024), (32, 4), (128,), 150144, (256, 6)),
    Published("gemma4_text", "gemma-4-26B-A4B", 2816, (2112, 704), (16, 8), (256, 512), 262144, (128, 8)),
    Published("gemma4_text", "gemma-4-E2B", 1536, (6144, 12288), (8, 1), (256, 512), 262144),
    Published("glm4_moe", "GLM-4.5-Air", 4096, (10944, 1408), (96, 8), (128,), 151552, (128, 8)),
    Published("glm4_moe", "GLM-4.5", 5120, (12288, 1536), (96, 8), (128,), 151552, (160, 8)),
    Published("glm4_moe_lite", "GLM-4.7-Flash", 2048, (10240, 1536), (20, 20), (256,), 154880, (64, 4), (768, 512, 64)),
    Published("glm4v_moe_text", "GLM-4.5V", 4096, (10944, 1408), (96, 8), (128,), 151424, (128, 8)),
    Published("glm_moe_dsa", "GLM-5", 6144, (12288, 2048), (64, 64), (256,), 154880, (256, 8), (2048, 512, 64)),
    Published("gpt_oss", "gpt-oss-20b", 2880, (2880,), (64, 8), (64,), 201088, (32, 4)),
    Published("gpt_oss", "gpt-oss-120b", 2880, (2880,), (64, 8), (64,), 201088, (128, 4)),
    Published("granitemoe", "granite-3.0-1b-a400m", 1024, (512,), (16, 8), (64,), 49155, (32, 8)),
    Published("granitemoe", "granite-3.0-3b-a800m", 1536, (512,), (24, 8), (64,), 49155, (40, 8)),
    Published("granitemoe_swa", "(default)", 4096, (11008,), (32, 32), (128,), 32000, (8, 2)),
    Published("granitemoehybrid", "granite-4.0-h-tiny", 1536, (512, 1024), (12, 4), (128, 64), 100352, (64, 6)),
    Published("granitemoehybrid", "granite-4.0-h-small", 4096, (768, 1536), (32, 8), (128, 64), 100352, (72, 10)),
    Published("granitemoehybrid", "granite-4.0-h-350m", 768, (2048,), (12, 4), (64,), 100352),
    Published("granitemoeshared", "(default)", 4096, (11008,), (32, 32), (128,), 32000, (8, 2)),
    Published("hunyuan_v1_moe", "Hunyuan-A13B", 4096, (3072,), (32, 8), (128,), 128167, (64, 8)),
    Published("hy_v3", "(default)", 4096, (13312, 1536), (64, 8), (128,), 120832, (192, 8)),
    Published("jamba", "Jamba-v0.1", 4096, (14336,), (32, 8), (128,), 65536, (16, 2)),
    Published("kimi_linear", "Kimi-Linear-48B-A3B", 2304, (9216, 1024), (32, 32), (192, 128), 163840, (256, 8),
              (512, 64)),
    Published("kolibri1", "(default)", 2560, (512,), (48, 4), (128,), 128000, (384, 8)),
    Published("laguna", "(default)", 2048, (8192, 512), (48, 8), (128,), 100352, (256, 8)),
    Published("lara_mini", "(default)", 1024, (512,), (16, 4), (128,), 151936, (128, 4)),
    Published("lfm2_moe", "LFM2-8B-A1B", 2048, (7168, 1792), (32, 8), (64,), 65536, (32, 4)),
    Published("llama4_text", "Llama-4-Scout", 5120, (16384, 8192), (40, 8), (128,), 202048, (16, 1)),
    Published("longcat_flash", "LongCat-Flash", 6144, (12288, 2048), (64, 64), (192, 128), 131072, (768, 12),
              (1536, 512, 64)),
    Published("mellum", "(default)", 2304, (7168, 896), (32, 4), (128,), 98304, (64, 8)),
    Published("mimo_v2_flash", "MiMo-V2-Flash", 4096, (16384, 2048), (64, 4), (192, 128), 152576, (256, 8)),
    Published("minimax", "MiniMax-Text-01", 6144, (9216,), (64, 8), (128,), 200064, (32, 2)),
    Published("minimax_m2", "MiniMax-M2", 3072, (1536,), (48, 8), (128,), 200064, (256, 8)),
    Published("minimax_m3_vl_text", "(default)", 6144, (12288, 3072), (64, 4), (128,), 200064, (128, 4)),
    Published("mistral4", "(default)", 4096, (12288, 2048), (32, 32), (128,), 131072, (128, 4), (1024, 256, 64)),
    Published("mixtral", "Mixtral-8x7B", 4096, (14336,), (32, 8), (128,), 32000, (8, 2)),
    Published("mixtral", "Mixtral-8x22B", 6144, (16384,), (48, 8), (128,), 32768, (8, 2)),
    Published("muse_spark_text", "(default)", 8192, (16384, 4096), (128, 16), (64,), 202048, (256, 8)),
    Published("nemotron_h", "Nemotron-3-Nano-30B-A3B", 2688, (1856, 3712), (32, 2), (128, 64), 131072, (128, 6)),
    Published("nemotron_h", "Nemotron-Nano-9B-v2", 4480, (15680,), (40, 8), (128, 80), 131072),
    Published("nemotron_h", "(default)", 4096, (21504, 7688), (32, 8), (128,), 131072, (8, 2)),
    Published("olmoe", "OLMoE-1B-7B", 2048, (1024,), (16, 16), (128,), 50304, (64, 8)),
    Published("phimoe", "Phi-3.5-MoE", 4096, (6400,), (32, 8), (128,), 32064, (16, 2)),
    Published("phimoe", "Phi-mini-MoE", 4096, (960,), (32, 8), (128,), 32064, (16, 2)),
    Published("phimoe", "Phi-tiny-MoE", 4096, (448,), (16, 4), (128,), 32064, (16, 2)),
    Published("qwen2_moe", "Qwen1.5-MoE-A2.7B", 2048, (5632, 1408), (16, 16), (128,), 151936, (60, 4)),
    Published("qwen2_moe", "Qwen2-57B-A14B", 3584, (18944, 2560, 20480), (28, 4), (128,), 151936, (64, 8)),
    Published("qwen3_5_moe_text", "Qwen3.5-35B-A3B", 2048, (512,), (16, 2), (256, 128), 248320, (256, 8)),
    Published("qwen3_moe", "Qwen3-30B-A3B", 2048, (6144, 768), (32, 4), (128,), 151936, (128, 8)),
    Published("qwen3_moe", "Qwen3-235B-A22B", 4096, (12288, 1536), (64, 4), (128,), 151936, (128, 8)),
    Published("qwen3_next", "Qwen3-Next-80B-A3B", 2048, (5120, 512), (16, 2), (256, 128), 151936, (512, 10)),
    Published("qwen3_omni_moe_text", "(default)", 2048, (18944, 768), (28, 4), (128,), 3584, (128, 8)),
    Published("qwen3_vl_moe_text", "(default)", 2048, (5632, 1408), (16, 16), (128,), 151936, (60, 4)),
    Published("qwen4_exp_text", "(default)", 2048, (512,), (16, 2), (256, 128), 248320, (512, 10)),
    Published("sarvam_mla", "(default)", 4096, (16384, 2048), (64, 64), (192, 128), 262144, (128, 8), (512, 64)),
    Published("sarvam_moe", "(default)", 4096, (8192, 1024), (64, 4), (64,), 262144, (128, 6)),
    Published("solar_open", "Solar-Open-100B", 4096, (10240, 1280), (64, 8), (128,), 196608, (128, 8)),
    Published("step3p5", "(default)", 4096, (11264, 1280), (64, 8), (128,), 128815, (288, 8)),
    # Dense.
    Published("apertus", "Apertus-8B", 4096, (21504,), (32, 8), (128,), 131072),
    Published("apertus1p5_text", "(default)", 4096, (14336,), (32, 32), (128,), 266752),
    Published("arcee", "AFM-4.5B", 2560, (18432,), (20, 4), (128,), 128004),
    Published("bamba", "Bamba-9B", 4096, (14336,), (32, 8), (128, 64), 128256),
    Published("bitnet", "bitnet-b1.58-2B-4T", 2560, (6912,), (20, 5), (128,), 128256),
    Published("cohere", "c4ai-command-r-v01", 8192, (22528,), (64, 64), (128,), 256000),
    Published("cohere2", "c4ai-command-r7b-12-2024", 4096, (14336,), (32, 8), (128,), 256000),
    Published("cohere_compass_text", "(default)", 8192, (22528,), (64, 64), (128,), 256000),
    Published("cwm", "cwm", 6144, (21504,), (48, 8), (128,), 128256),
    Published("diffllama", "(default)", 2048, (8192,), (32, 32), (64,), 32000),
    Published("ernie4_5", "ERNIE-4.5-0.3B", 1024, (3072,), (16, 2), (128,), 103424),
    Published("exaone4", "EXAONE-4.0-32B", 5120, (27392,), (40, 8), (128,), 102400),
    Published("exaone4", "EXAONE-4.0-1.2B", 2048, (4096,), (32, 8), (64,), 102400),
    Published("falcon_h1", "Falcon-H1-1.5B", 2048, (4096,), (8, 2), (128, 64), 65537),
    Published("falcon_h1", "Falcon-H1-1.5B-Deep", 1280, (3072,), (6, 2), (128, 64), 65537),
    Published("falcon_h1", "Falcon-H1-7B", 3072, (12288,), (12, 2), (128,), 130048),
    Published("gemma", "gemma-7b", 3072, (24576,), (16, 16), (256,), 256000),
    Published("gemma", "gemma-2b", 2048, (16384,), (8, 1), (256,), 256000),
    Published("gemma2", "gemma-2-2b", 2304, (9216,), (8, 4), (256,), 256000),
    Published("gemma2", "gemma-2-9b", 3584, (14336,), (16, 8), (256,), 256000),
    Published("gemma2", "gemma-2-27b", 4608, (36864,), (32, 16), (128,), 256000),
    Published("gemma3_text", "gemma-3-270m", 640, (2048,), (4, 1), (256,), 262144),
    Published("gemma3_text", "gemma-3-1b", 1152, (6912,), (4, 1), (256,), 262144),
    Published("gemma3_text", "gemma-3-4b", 2560, (10240,), (8, 4), (256,), 262208),
    Published("gemma3_text", "gemma-3-27b", 5376, (21504,), (32, 16), (128,), 262208),
    Published("gemma4_unified_text", "(default)", 2304, (9216,), (8, 4), (256,), 262144),
    Published("glm", "glm-4-9b", 4096, (13696,), (32, 2), (128,), 151552),
    Published("glm", "glm-edge-1.5b", 2048, (6144,), (16, 4), (128,), 59264),
    Published("glm4", "GLM-4-32B-0414", 6144, (23040,), (48, 2), (128,), 151552),
    Published("glm4v_text", "(default)", 4096, (13696,), (32, 2), (128,), 151552),
    Published("glm_ocr_text", "(default)", 1024, (4096,), (16, 8), (64,), 59392),
    Published("granite", "granite-3.0-2b", 2048, (8192,), (32, 8), (64,), 49155),
    Published("granite", "granite-3.0-8b", 4096, (12800,), (32, 8), (128,), 49155),
    Published("granite4_vision_text", "(default)", 4096, (11008,), (32, 32), (128,), 32000),
    Published("granite_docling_text", "(default)", 1024, (2048,), (16, 4), (64,), 133800),
    Published("granite_swa", "(default)", 2560, (8192,), (20, 4), (128,), 100352),
    Published("helium", "helium-1-preview-2b", 2560, (7040,), (20, 20), (128,), 48000),
    Published("hunyuan_v1_dense", "Hunyuan-7B", 4096, (14336,), (32, 8), (128,), 128167),
    Published("hyperclovax", "HyperCLOVAX-SEED-Think-14B", 6144, (14336,), (48, 8), (128,), 110592),
    Published("internlm3", "internlm3-8b", 4096, (10240,), (32, 2), (128,), 128512),
    Published("iquestcoder", "(default)", 5120, (27648,), (40, 8), (128,), 76800),
    Published("jais2", "(default)", 3328, (26624,), (26, 26), (128,), 150272),
    Published("lfm2", "LFM2-350M", 1024, (4608,), (16, 8), (64,), 65536),
    Published("lfm2", "LFM2-700M", 1536, (6912,), (24, 8), (64,), 65536),
    Published("lfm2", "LFM2-1.2B", 2048, (8192,), (32, 8), (64,), 65536),
    Published("lfm3", "(default)", 2048, (7680,), (16, 4), (128,), 128000),
    Published("llama", "SmolLM2-135M", 576, (1536,), (9, 3), (64,), 49152),
    Published("llama", "SmolLM2-360M", 960, (2560,), (15, 5), (64,), 49152),
    Published("llama", "TinyLlama-1.1B", 2048, (5632,), (32, 4), (64,), 32000),
    Published("llama", "open_llama_3b", 3200, (8640,), (32, 32), (100,), 32000),
    Published("llama", "Llama-2-7b", 4096, (11008,), (32, 32), (128,), 32000),
    Published("llama", "Llama-2-13b", 5120, (13824,), (40, 40), (128,), 32000),
    Published("llama", "llama-30b", 6656, (17920,), (52, 52), (128,), 32000),
    Published("llama", "Llama-3.2-1B", 2048, (8192,), (32, 8), (64,), 128256),
    Published("llama", "Llama-3.1-70B", 8192, (28672,), (64, 8), (128,), 128256),
    Published("minicpm3", "MiniCPM3-4B", 2560, (6400,), (40, 40), (96, 64), 73448, (0, 0), (768, 256, 32)),
    Published("ministral", "Ministral-8B", 4096, (12288,), (32, 8), (128,), 131072),
    Published("ministral3", "Ministral-3-3B", 3072, (9216,), (32, 8), (128,), 131072),
    Published("mistral", "Mistral-7B-v0.3", 4096, (14336,), (32, 8), (128,), 32768),
    Published("mistral", "Mistral-Nemo", 5120, (14336,), (32, 8), (128,), 131072),
    Published("muse_glimmer_text", "(default)", 6656, (19968,), (32, 2), (128,), 202048),
    Published("nanochat", "nanochat-d32", 2048, (8192,), (16, 16), (128,), 65536),
    Published("nanochat", "(default)", 768, (8192,), (6, 6), (128,), 50304),
    Published("nemotron", "Minitron-4B", 3072, (9216,), (24, 8), (128,), 256000),
    Published("olmo", "OLMo-7B", 4096, (11008,), (32, 32), (128,), 50304),
    Published("olmo2", "OLMo-2-13B", 5120, (13824,), (40, 40), (128,), 100352),
    Published("olmo3", "Olmo-3-7B", 4096, (11008,), (32, 32), (128,), 100278),
    Published("olmo_hybrid", "Olmo-Hybrid-7B", 3840, (11008,), (30, 30), (128, 96, 192), 100352),
    Published("paddleocr_vl_text", "(default)", 1024, (3072,), (16, 2), (128,), 103424),
    Published("persimmon", "persimmon-8b", 4096, (16384,), (64, 64), (64,), 262144),
    Published("phi", "phi-1", 2048, (8192,), (32, 32), (64,), 51200),
    Published("phi", "phi-2", 2560, (10240,), (32, 32), (80,), 51200),
    Published("phi3", "Phi-3-mini", 3072, (8192,), (32, 32), (96,), 32064),
    Published("phi3", "Phi-3-medium", 5120, (17920,), (40, 10), (128,), 32064),
    Published("phi3", "Phi-4-mini", 3072, (8192,), (24, 8), (128,), 200064),
    Published("qwen2", "Qwen2.5-0.5B", 896, (4864,), (14, 2), (64,), 151936),
    Published("qwen2", "Qwen2.5-1.5B", 1536, (8960,), (12, 2), (128,), 151936),
    Published("qwen2", "Qwen2.5-7B", 3584, (18944,), (28, 4), (128,), 152064),
    Published("qwen2_5_omni_text", "(default)", 3584, (18944,), (28, 4), (128,), 152064),
    Published("qwen2_5_vl_text", "(default)", 8192, (29568,), (64, 8), (128,), 152064),
    Published("qwen2_vl_text", "(default)", 8192, (29568,), (64, 8), (128,), 152064),
    Published("qwen3", "Qwen3-0.6B", 1024, (3072,), (16, 8), (128,), 151936),
    Published("qwen3", "Qwen3-4B", 2560, (9728,), (32, 8), (128,), 151936),
    Published("qwen3", "Qwen3-14B", 5120, (17408,), (40, 8), (128,), 151936),
    Published("qwen3", "Qwen3-32B", 5120, (25600,), (64, 8), (128,), 151936),
    Published("qwen3_5_text", "Qwen3.5-27B", 5120, (17408,), (24, 4), (256, 128), 248320),
    Published("qwen3_vl_text", "(default)", 4096, (22016,), (32, 32), (128,), 151936),
    Published("seed_oss", "Seed-OSS-36B", 5120, (27648,), (80, 8), (128,), 155136),
    Published("smollm3", "SmolLM3-3B", 2048, (11008,), (16, 4), (128,), 128256),
    Published("stablelm", "stablelm-3b-4e1t", 2560, (6912,), (32, 32), (80,), 50304),
    Published("starcoder2", "starcoder2-3b", 3072, (12288,), (24, 2), (128,), 49152),
    Published("starcoder2", "starcoder2-7b", 4608, (18432,), (36, 4), (128,), 49152),
    Published("vaultgemma", "vaultgemma-1b", 1152, (6912,), (4, 4), (256,), 256000),
    Published("youtu", "Youtu-LLM-2B", 2048, (6144,), (16, 16), (192, 128), 128256, (0, 0), (1536, 512, 64)),
    Published("zamba2", "(default)", 2560, (10240,), (32, 32), (160, 640), 32000),
)  # fmt: skip


def _all(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({number for number in numbers if number}))


# Every number of columns that a matrix of these models has, and every number that its rows may have but the vocabulary.
WIDTHS = _all(
    width
    for each in PUBLISHED
    for width in (
        each.hidden, *each.inner, *each.ranks, *each.head_dims,
        *(each.heads[0] * dim for dim in each.head_dims), *(each.heads[1] * dim for dim in each.head_dims),
    )
)  # fmt: skip
HEAD_DIMS = _all(dim for each in PUBLISHED for dim in each.head_dims)
# Query heads that share a KV head.
GROUP_SIZES = _all(each.heads[0] // each.heads[1] for each in PUBLISHED)
KV_HEADS = _all(each.heads[1] for each in PUBLISHED)
# Experts of a layer, and how many of them a token chooses.
EXPERTS = tuple(sorted({each.experts for each in PUBLISHED if each.experts[0]}))
VOCABULARIES = _all(each.vocabulary for each in PUBLISHED)
# Widths that 128, 64 or 32 do not divide, or a power of two many times: where remainders show first.
ODD_WIDTHS = tuple(width for width in WIDTHS if width % 256)
# Those that no test of a format leaves out.
FIRST_WIDTHS = (576, 960, 1408, 1536, 2112, 2880, 10944)


def widths(multiple: int = 1, most: int = 12288, least: int = 1) -> SearchStrategy[int]:
    """Multiples of `multiple` from `least` to `most`: a third small, a third published, a third published and odd."""
    small = st.integers(-(-least // multiple), max(16, -(-least // multiple))).map(lambda count: count * multiple)

    def of(candidates: Iterable[int]) -> SearchStrategy[int]:
        held = [each for each in candidates if least <= each <= most and each % multiple == 0]
        return st.sampled_from(held) if held else st.nothing()

    return small | of(WIDTHS) | of(ODD_WIDTHS)
