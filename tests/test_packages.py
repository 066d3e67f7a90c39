"""The packages as an installer sees them."""

import pkgutil

import qarl


def test_no_module_of_qarl_has_the_name_of_a_function_that_qarl_offers():
    """Importing such a module would put it in the function's place."""
    modules = {module.name for module in pkgutil.iter_modules(qarl.__path__)}
    assert "training" in modules and not modules & set(qarl.__all__)
