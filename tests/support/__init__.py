"""What tests share: models in miniature, tables of what users do, and what results are compared with."""

import pkgutil

import pytest

# Before any of them is imported: a failed assertion in a helper shows its values too.
pytest.register_assert_rewrite(*(module.name for module in pkgutil.iter_modules(__path__, f"{__name__}.")))
