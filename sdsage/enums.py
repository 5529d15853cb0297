"""The engine's enumerations. Members are named after the C constants and know the engine's own name."""

from enum import IntEnum
from typing import Self

from sdsage.errors import BadRequest


class CEnum(IntEnum):
    """An enum of stable-diffusion.h. `COUNT` means "not set: the engine decides" where the engine says so."""

    engine_name: str
    """What the engine and its command line call this value: "euler_a", "q8_0"."""

    def __new__(cls, value: int, engine_name: str = "") -> Self:
        member = int.__new__(cls, value)
        member._value_ = value
        member.engine_name = engine_name
        return member

    @property
    def c_name(self) -> str:
        """The C constant: "EULER_A_SAMPLE_METHOD"."""
        pattern = _C_NAMES[type(self).__name__]
        if self.name == "COUNT":
            return _C_COUNTS[type(self).__name__]
        return pattern.format(self.name)

    @classmethod
    def choices(cls) -> list[str]:
        """The engine's names, in order; `COUNT` is not one."""
        return [m.engine_name for m in cls if m.engine_name]

    @classmethod
    def parse(cls, value: "int | str | CEnum") -> Self:
        """A member from itself, its number, its C constant, its name or the engine's name.

        Raises:
            BadRequest: nothing of this enum is called so.
        """
        if isinstance(value, cls):
            return value
        for member in cls:
            if value == member.value and not isinstance(value, (str, bool)):
                return member
            if isinstance(value, str) and value in (member.engine_name, member.name, member.c_name) and value:
                return member
        raise BadRequest(f"{value!r} is not a {cls.__name__}; choose one of {', '.join(cls.choices())}")


class RngType(CEnum):
    STD_DEFAULT = 0, "std_default"
    CUDA = 1, "cuda"
    CPU = 2, "cpu"
    COUNT = 3


class SampleMethod(CEnum):
    EULER = 0, "euler"
    EULER_A = 1, "euler_a"
    HEUN = 2, "heun"
    DPM2 = 3, "dpm2"
    DPMPP2S_A = 4, "dpm++2s_a"
    DPMPP2M = 5, "dpm++2m"
    DPMPP2Mv2 = 6, "dpm++2mv2"
    IPNDM = 7, "ipndm"
    IPNDM_V = 8, "ipndm_v"
    LCM = 9, "lcm"
    DDIM_TRAILING = 10, "ddim_trailing"
    TCD = 11, "tcd"
    RES_MULTISTEP = 12, "res_multistep"
    RES_2S = 13, "res_2s"
    ER_SDE = 14, "er_sde"
    COUNT = 15


class Scheduler(CEnum):
    DISCRETE = 0, "discrete"
    KARRAS = 1, "karras"
    EXPONENTIAL = 2, "exponential"
    AYS = 3, "ays"
    GITS = 4, "gits"
    SGM_UNIFORM = 5, "sgm_uniform"
    SIMPLE = 6, "simple"
    SMOOTHSTEP = 7, "smoothstep"
    KL_OPTIMAL = 8, "kl_optimal"
    LCM = 9, "lcm"
    BONG_TANGENT = 10, "bong_tangent"
    COUNT = 11


class Prediction(CEnum):
    EPS = 0, "eps"
    V = 1, "v"
    EDM_V = 2, "edm_v"
    FLOW = 3, "sd3_flow"
    FLUX_FLOW = 4, "flux_flow"
    FLUX2_FLOW = 5, "flux2_flow"
    COUNT = 6


class SdType(CEnum):
    """Weight types (ggml_type)."""

    F32 = 0, "f32"
    F16 = 1, "f16"
    Q4_0 = 2, "q4_0"
    Q4_1 = 3, "q4_1"
    Q5_0 = 6, "q5_0"
    Q5_1 = 7, "q5_1"
    Q8_0 = 8, "q8_0"
    Q8_1 = 9, "q8_1"
    Q2_K = 10, "q2_K"
    Q3_K = 11, "q3_K"
    Q4_K = 12, "q4_K"
    Q5_K = 13, "q5_K"
    Q6_K = 14, "q6_K"
    Q8_K = 15, "q8_K"
    IQ2_XXS = 16, "iq2_xxs"
    IQ2_XS = 17, "iq2_xs"
    IQ3_XXS = 18, "iq3_xxs"
    IQ1_S = 19, "iq1_s"
    IQ4_NL = 20, "iq4_nl"
    IQ3_S = 21, "iq3_s"
    IQ2_S = 22, "iq2_s"
    IQ4_XS = 23, "iq4_xs"
    I8 = 24, "i8"
    I16 = 25, "i16"
    I32 = 26, "i32"
    I64 = 27, "i64"
    F64 = 28, "f64"
    IQ1_M = 29, "iq1_m"
    BF16 = 30, "bf16"
    TQ1_0 = 34, "tq1_0"
    TQ2_0 = 35, "tq2_0"
    MXFP4 = 39, "mxfp4"
    NVFP4 = 40, "nvfp4"
    COUNT = 41

    @property
    def is_weight_type(self) -> bool:
        """False for integers, f64 and the two types that ggml only makes on the fly."""
        return self.name not in ("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K")


def weight_types() -> list[str]:
    """Engine names of the types that weights can be held in."""
    return [t.engine_name for t in SdType if t.is_weight_type and t.engine_name]


class SageKernel(CEnum):
    """Kernels of SageAttention: INT8 Q K^T with P V in FP16, FP8, or FP8 with FP16 accumulation."""

    AUTO = 0, "auto"
    FP16 = 1, "fp16"
    FP8 = 2, "fp8"
    FP8PP = 3, "fp8++"
    HOPPER = 4, "hopper"
    COUNT = 5


class LogLevel(CEnum):
    DEBUG = 0, "debug"
    INFO = 1, "info"
    WARN = 2, "warn"
    ERROR = 3, "error"


class PreviewMode(CEnum):
    NONE = 0, "none"
    PROJ = 1, "proj"
    TAE = 2, "tae"
    VAE = 3, "vae"
    COUNT = 4


class LoraApplyMode(CEnum):
    AUTO = 0, "auto"
    IMMEDIATELY = 1, "immediately"
    AT_RUNTIME = 2, "at_runtime"
    COUNT = 3


class CacheMode(CEnum):
    DISABLED = 0, "disabled"
    EASYCACHE = 1, "easycache"
    UCACHE = 2, "ucache"
    DBCACHE = 3, "dbcache"
    TAYLORSEER = 4, "taylorseer"
    CACHE_DIT = 5, "cache-dit"
    SPECTRUM = 6, "spectrum"


class HiresUpscaler(CEnum):
    NONE = 0, "None"
    LATENT = 1, "Latent"
    LATENT_NEAREST = 2, "Latent (nearest)"
    LATENT_NEAREST_EXACT = 3, "Latent (nearest-exact)"
    LATENT_ANTIALIASED = 4, "Latent (antialiased)"
    LATENT_BICUBIC = 5, "Latent (bicubic)"
    LATENT_BICUBIC_ANTIALIASED = 6, "Latent (bicubic antialiased)"
    LANCZOS = 7, "Lanczos"
    NEAREST = 8, "Nearest"
    MODEL = 9, "Model"
    COUNT = 10


# C enum tag -> class, and how its constants are spelled.
C_ENUMS: dict[str, type[CEnum]] = {
    "rng_type_t": RngType,
    "sample_method_t": SampleMethod,
    "scheduler_t": Scheduler,
    "prediction_t": Prediction,
    "sd_type_t": SdType,
    "sd_log_level_t": LogLevel,
    "preview_t": PreviewMode,
    "lora_apply_mode_t": LoraApplyMode,
    "sd_cache_mode_t": CacheMode,
    "sd_hires_upscaler_t": HiresUpscaler,
    "sd_sage_kernel_t": SageKernel,
}


_C_NAMES: dict[str, str] = {
    "RngType": "{}_RNG",
    "SampleMethod": "{}_SAMPLE_METHOD",
    "Scheduler": "{}_SCHEDULER",
    "Prediction": "{}_PRED",
    "SdType": "SD_TYPE_{}",
    "LogLevel": "SD_LOG_{}",
    "PreviewMode": "PREVIEW_{}",
    "LoraApplyMode": "LORA_APPLY_{}",
    "CacheMode": "SD_CACHE_{}",
    "HiresUpscaler": "SD_HIRES_UPSCALER_{}",
    "SageKernel": "SD_SAGE_KERNEL_{}",
}

_C_COUNTS: dict[str, str] = {
    "RngType": "RNG_TYPE_COUNT",
    "SampleMethod": "SAMPLE_METHOD_COUNT",
    "Scheduler": "SCHEDULER_COUNT",
    "Prediction": "PREDICTION_COUNT",
    "SdType": "SD_TYPE_COUNT",
    "PreviewMode": "PREVIEW_COUNT",
    "LoraApplyMode": "LORA_APPLY_MODE_COUNT",
    "HiresUpscaler": "SD_HIRES_UPSCALER_COUNT",
    "SageKernel": "SD_SAGE_KERNEL_COUNT",
}
