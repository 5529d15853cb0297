"""ESRGAN upscaling and file conversion."""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sdsage import _job
from sdsage._ffi import encode, ffi, image_from_c, image_to_c, lib
from sdsage._files import check_model_file
from sdsage._handle import Handle
from sdsage._job import Hooks, OnLog, OnProgress
from sdsage._remote import Remote, fact, in_worker
from sdsage._struct import as_image
from sdsage.enums import SdType, weight_types
from sdsage.errors import BadRequest, ModelError, OutputError

if TYPE_CHECKING:
    from sdsage._supervisor import Worker


class Upscaler(Handle):
    """An ESRGAN model.

    Args:
        path: the model file.
        device: as for `Context`.
        n_threads: CPU threads; below 1 takes the physical cores.
        tile_size: pixels of a tile's side; pictures larger than it are done in tiles.
        direct: convolutions without im2col.
        offload_params_to_cpu: keep the weights in RAM.
        isolated: as for `Context`.
    """

    FACTS = ("factor",)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: str | None = None,
        n_threads: int = -1,
        tile_size: int = 128,
        direct: bool = False,
        offload_params_to_cpu: bool = False,
        allow_pickle: bool = False,
        on_progress: OnProgress | None = None,
        on_log: OnLog | None = None,
        isolated: "bool | Worker" = False,
    ) -> None:
        if isolated:
            more: dict[str, Any] = {"device": device, "n_threads": n_threads, "tile_size": tile_size, "direct": direct}
            more |= {"offload_params_to_cpu": offload_params_to_cpu, "allow_pickle": allow_pickle}
            more |= {"on_progress": on_progress, "on_log": on_log}
            self._remote = Remote("Upscaler", "upscaler", isolated, (path,), more)
            return
        check_model_file(os.fspath(path), "the upscaler (--upscale-model)", allow_pickle)
        if tile_size < 1:
            raise BadRequest(f"tile_size is {tile_size}: 1 pixel or more is needed")
        threads = n_threads if n_threads > 0 else lib.sd_get_num_physical_cores()

        def load() -> Any:
            ctx = lib.new_upscaler_ctx(encode(path), offload_params_to_cpu, direct, threads, tile_size)
            if ctx == ffi.NULL:
                raise ModelError(f"{os.fspath(path)} is not an upscaler that this engine can load: {_job.failure()}")
            return ctx

        super().__init__(load, "free_upscaler_ctx", "upscaler", Hooks(on_progress, on_log), device)

    def _hooks(self) -> Hooks:
        return Hooks(self._on_progress, self._on_log, owner=self)

    @property
    @fact
    def factor(self) -> int:
        """How many times larger a picture becomes."""
        return int(lib.get_upscale_factor(self._open))

    @in_worker
    def upscale(self, image: Any) -> NDArray[np.uint8]:
        """An upscaled copy of a picture: H x W x 3 to (H factor) x (W factor) x 3."""
        _, pixels = self._open, as_image(image, "image")
        if pixels is None or pixels.shape[2] != 3:
            raise BadRequest("image: a picture of H x W x 3 is needed")

        def work() -> NDArray[np.uint8]:
            keep: list[Any] = []
            made = lib.upscale(self._open, image_to_c(pixels, keep), self.factor)
            if made.data == ffi.NULL:
                raise _job.failure()
            try:
                return image_from_c(made)
            finally:
                lib.sdsage_free(made.data)

        return _job.run(work, self._hooks(), self._device)


def convert(
    input_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    *,
    vae_path: str | os.PathLike[str] | None = None,
    type: SdType | str = SdType.COUNT,
    tensor_type_rules: str = "",
    convert_name: bool = False,
    overwrite: bool = False,
    allow_pickle: bool = False,
    on_progress: OnProgress | None = None,
    on_log: OnLog | None = None,
    isolated: "bool | Worker" = False,
) -> Path:
    """Writes a model file in another format (.gguf, .safetensors) or weight type.

    The file is written under a temporary name and renamed when whole.

    Args:
        type: weight type of the output; `SdType.COUNT` keeps each tensor's own.
        tensor_type_rules: "pattern=type,..." for single tensors.
        convert_name: rename the tensors to the engine's own names.
        isolated: as for `Context`.

    Raises:
        ModelError: an input can't be read. OutputError: the output can't be written. GenerationError: it failed.
    """
    target = Path(output_path)
    if isolated:
        more: dict[str, Any] = {"vae_path": vae_path, "type": type, "tensor_type_rules": tensor_type_rules}
        more |= {"convert_name": convert_name, "overwrite": overwrite, "allow_pickle": allow_pickle}
        return _convert_isolated(isolated, input_path, target, more | {"on_progress": on_progress, "on_log": on_log})
    check_model_file(os.fspath(input_path), "the input (--model)", allow_pickle, folder_ok=True)
    if vae_path is not None:
        check_model_file(os.fspath(vae_path), "the VAE (--vae)", allow_pickle)
    if target.suffix not in (".gguf", ".safetensors"):
        raise OutputError(f"the output {target} must end in .gguf or .safetensors")
    if target.is_dir() or (target.exists() and not overwrite):
        raise OutputError(
            f"{target} exists: choose another name" + ("" if target.is_dir() else ", or allow it with --overwrite")
        )
    if not os.access(target.parent, os.W_OK):
        raise OutputError(f"{target.parent} is not a folder that can be written to")
    partial = partial_path(target, os.getpid())
    wtype = SdType.parse(type)
    if not wtype.is_weight_type:
        raise BadRequest(f"type {wtype.engine_name} can't hold weights; choose {', '.join(weight_types())}")

    def work() -> None:
        args = (
            encode(input_path),
            encode(vae_path),
            encode(partial),
            int(wtype),
            encode(tensor_type_rules),
            convert_name,
        )
        if not lib.convert(*args):
            raise _job.failure()

    try:
        _job.run(work, Hooks(on_progress, on_log))
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def partial_path(target: Path, pid: int) -> Path:
    """Where process `pid` writes what becomes `target`; the engine decides the format by the ending."""
    return target.with_name(f".{target.stem}.{pid}.part{target.suffix}")


def _convert_isolated(
    isolated: "bool | Worker", source: str | os.PathLike[str], target: Path, more: dict[str, Any]
) -> Path:
    from sdsage._supervisor import Worker

    with contextlib.nullcontext(isolated) if isinstance(isolated, Worker) else Worker() as worker:
        try:
            worker.run("convert", source, target, **more)
        finally:
            if not worker.alive:  # it could not clear up
                partial_path(target, worker.pid).unlink(missing_ok=True)
    return target
