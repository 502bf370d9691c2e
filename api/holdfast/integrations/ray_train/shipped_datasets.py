"""The datasets of `TorchTrainer(datasets=...)` on their way to rank 0: a file in the code package.

A dataset travels as its lineage, from which Ray makes it anew on the job's cluster; a function that
returns one, as Ray Train allows, is called there.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.formats import code_archive
from holdfast.integrations.ray_train.errors import FunctionUnusable, NotServed

REFERENCE = f"{__name__}:shipped_datasets"
"""The function that rank 0 calls."""
FILE_NAME = "holdfast_shipped_datasets.pickle"
_HOW = (
    "give a function without arguments that returns it, such as "
    '{"train": lambda: ray.data.read_parquet(...)}'
)


def write_package(folder: Path | None, datasets: Mapping[str, Any], target: Path) -> None:
    """Write the files of the code in `folder` (None: there is none), and the datasets, to the
    folder `target`. Raises NotServed, FunctionUnusable, CodeUnusable."""
    if folder is not None:
        with zipfile.ZipFile(io.BytesIO(code_archive.pack(folder))) as package:
            package.extractall(target)
        for name in code_archive.IGNORE_FILES:  # applied by now; they could hide the new file
            for path in target.rglob(name):
                path.unlink()
    (target / FILE_NAME).write_bytes(_pickled(datasets))


def shipped_datasets() -> dict[str, Any]:
    """The datasets that were sent with the job. Called on rank 0, in the folder of the job's code.
    Raises FunctionUnusable."""
    from ray.data import Dataset  # late: a client that ships none needs no Ray Data

    try:
        content = Path(FILE_NAME).read_bytes()
    except OSError as error:
        raise FunctionUnusable(
            f"the job's code has no {FILE_NAME}, which fit() of TorchTrainer adds: {error.strerror}"
        ) from error
    made = {}
    for name, source in pickle.loads(content).items():
        made[name] = Dataset.deserialize_lineage(source) if isinstance(source, bytes) else source()
    return made


def _pickled(datasets: Mapping[str, Any]) -> bytes:
    from ray import cloudpickle  # late, as above

    try:
        sources = {name: _source(name, dataset) for name, dataset in datasets.items()}
        return bytes(cloudpickle.dumps(sources))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        raise FunctionUnusable(f"the datasets cannot be sent with the job: {error}") from error


def _source(name: str, dataset: Any) -> Any:
    if not hasattr(dataset, "serialize_lineage"):
        if callable(dataset):
            return dataset
        raise FunctionUnusable(f"datasets[{name!r}] is a {type(dataset).__name__}: {_HOW}")
    if not dataset.has_serializable_lineage():
        raise NotServed(
            f"not served by Holdfast: datasets[{name!r}], whose rows are in the memory of this "
            f"program's Ray: {_HOW}"
        )
    return dataset.serialize_lineage()
