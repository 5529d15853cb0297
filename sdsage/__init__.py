"""sdsage: image and video generation with stable-diffusion.cpp, without PyTorch.

    import sdsage

    params = sdsage.SdCtxParams()
    params.diffusion_model_path = "wan2.2-low.gguf"
    with sdsage.Context(params) as ctx:
        result = ctx.generate_video(sdsage.SdVidGenParams(prompt="a lovely cat", video_frames=33))

Importing sdsage looks whether the native library is there and of this package's ABI version, and raises ImportError if
not. The names below are loaded when they are first used; the library is loaded, and compared struct by struct, with the
first that needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sdsage import _library

if TYPE_CHECKING:
    from sdsage._job import Attention, Device, Lever, Preview, Progress, SageInfo, Step, devices, sage_info
    from sdsage._supervisor import Worker
    from sdsage.batch import Batch
    from sdsage.checkpoint import Checkpoint
    from sdsage.context import Adjustment, Context, Result, Timings
    from sdsage.enums import (
        CacheMode,
        HiresUpscaler,
        LogLevel,
        LoraApplyMode,
        Prediction,
        PreviewMode,
        RngType,
        SageKernel,
        SampleMethod,
        Scheduler,
        SdType,
    )
    from sdsage.errors import (
        BadRequest,
        Cancelled,
        ContextClosed,
        DecodeError,
        GenerationError,
        MissingExtra,
        ModelError,
        NonFiniteError,
        OutputError,
        ResumeError,
        SageUnavailable,
        SdsageError,
        WorkerDied,
    )
    from sdsage.latents import Latents, load_latents, save_latents
    from sdsage.params import (
        SdCacheParams,
        SdCtxParams,
        SdEmbedding,
        SdGuidanceParams,
        SdHiresParams,
        SdImgGenParams,
        SdLora,
        SdPmParams,
        SdSampleParams,
        SdSlgParams,
        SdTilingParams,
        SdVidGenParams,
    )
    from sdsage.upscaler import Upscaler, convert

    __version__: str

if not _library.tells_itself():
    _library.check()

# Module of each public name.
_WHERE = {
    "_job": "Attention Device Lever Preview Progress SageInfo Step devices sage_info",
    "_supervisor": "Worker",
    "batch": "Batch",
    "checkpoint": "Checkpoint",
    "context": "Adjustment Context Result Timings",
    "enums": "CacheMode HiresUpscaler LogLevel LoraApplyMode Prediction PreviewMode RngType SageKernel SampleMethod"
    " Scheduler SdType",
    "errors": "BadRequest Cancelled ContextClosed DecodeError GenerationError MissingExtra ModelError NonFiniteError"
    " OutputError ResumeError SageUnavailable SdsageError WorkerDied",
    "latents": "Latents load_latents save_latents",
    "params": "SdCacheParams SdCtxParams SdEmbedding SdGuidanceParams SdHiresParams SdImgGenParams SdLora SdPmParams"
    " SdSampleParams SdSlgParams SdTilingParams SdVidGenParams",
    "upscaler": "Upscaler convert",
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names.split()}

__all__ = [
    "Adjustment",
    "Attention",
    "BadRequest",
    "Batch",
    "CacheMode",
    "Cancelled",
    "Checkpoint",
    "Context",
    "ContextClosed",
    "DecodeError",
    "Device",
    "GenerationError",
    "HiresUpscaler",
    "Latents",
    "Lever",
    "LogLevel",
    "LoraApplyMode",
    "MissingExtra",
    "ModelError",
    "NonFiniteError",
    "OutputError",
    "Prediction",
    "Preview",
    "PreviewMode",
    "Progress",
    "Result",
    "ResumeError",
    "RngType",
    "SageInfo",
    "SageKernel",
    "SageUnavailable",
    "SampleMethod",
    "Scheduler",
    "SdCacheParams",
    "SdCtxParams",
    "SdEmbedding",
    "SdGuidanceParams",
    "SdHiresParams",
    "SdImgGenParams",
    "SdLora",
    "SdPmParams",
    "SdSampleParams",
    "SdSlgParams",
    "SdTilingParams",
    "SdType",
    "SdVidGenParams",
    "SdsageError",
    "Step",
    "Timings",
    "Upscaler",
    "Worker",
    "WorkerDied",
    "build_info",
    "convert",
    "devices",
    "load_latents",
    "sage_info",
    "save_latents",
]


def build_info() -> dict[str, Any]:
    """Versions, pins, compiler and backends of the native library, and where it and sd-cli are."""
    import json

    from sdsage import _ffi

    info: dict[str, Any] = json.loads(_ffi.text(_ffi.lib.sdsage_build_info()))
    info["backends"] = sorted({d.name.split(":")[0] for d in import_module("sdsage._job").devices()})
    info["library"] = str(_library.library_path())
    info["sd_cli"] = str(_library.sd_cli_path())
    return info


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # 30 ms, which `sdsage --help` has no use for

    try:
        return version("sdsage").partition("+")[0]  # +cu130 tells wheels of one version apart
    except PackageNotFoundError:  # a checkout that is not installed
        return "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'sdsage' has no attribute {name!r}")
    return getattr(import_module(f"sdsage.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
