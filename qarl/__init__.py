"""qarl: quantization-aware reinforcement learning for language models.

    import qarl

    result = qarl.train("configs/quickstart.yaml", {"train.steps": 20})
    print(result.series("reward/mean"))
    qarl.export(result.run_dir, "served", verify=True)

Nothing heavy is imported before a function is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qarl.utils.versions import VERSION as __version__

if TYPE_CHECKING:
    from qarl.api import (
        compare,
        compare_offline,
        distill,
        evaluate,
        export,
        generate,
        quantize,
        sft,
        train,
        verify_exact,
    )
    from qarl.config.config import Config
    from qarl.errors import UserError

__all__ = [
    "Config",
    "UserError",
    "__version__",
    "compare",
    "compare_offline",
    "distill",
    "evaluate",
    "export",
    "generate",
    "quantize",
    "sft",
    "train",
    "verify_exact",
]


def __getattr__(name: str) -> Any:
    if name == "UserError":
        from qarl.errors import UserError

        return UserError
    if name == "Config":
        from qarl.config.config import Config

        return Config
    if name in __all__:
        from qarl import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
