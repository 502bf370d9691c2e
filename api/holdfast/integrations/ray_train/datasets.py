"""The shards of Ray datasets."""

from __future__ import annotations

from typing import Any

from holdfast.integrations.ray_train.errors import NotServed


class DatasetShards:
    """Of one rank."""

    def of(self, name: str | None) -> Any:
        """The shard of a dataset. Raises NotServed."""
        if name is None:
            return None
        raise NotServed(
            f"get_dataset_shard({name!r}): Holdfast does not serve Ray datasets to a rank yet: "
            "read the data in the function, with a DataLoader and "
            "ray.train.torch.prepare_data_loader"
        )
