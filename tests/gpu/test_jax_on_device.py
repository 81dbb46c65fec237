"""`tilewright.jax.jit` on a GPU: XLA's streams and memory, no copy through the host."""

import pytest

jax = pytest.importorskip("jax")
from jax_models import quantised_mlp  # noqa: E402

import tilewright.jax as twjax  # noqa: E402

jnp = jax.numpy
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    try:
        return jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX sees no GPU: {error}")


def given(device, *arrays):
    return [jax.device_put(a, device) for a in arrays]


def test_the_product_of_issue_7117_is_xlas(device):
    def product(a, b):
        return jnp.einsum("bij,bkj->bik", a, b, preferred_element_type=jnp.int32).astype(jnp.int8)

    a, b = given(device, *(jax.random.randint(jax.random.key(i), (4, 256, 384), -128, 128).astype(jnp.int8) for i in (0, 1)))
    compiled = twjax.jit(product, budget_s=5, platform="cuda")
    within = jax.jit(lambda a, b: compiled(a, b) + 1)
    for _ in range(3):
        assert bool((within(a, b) == product(a, b) + 1).all())
    assert compiled.programs[0].target.device.startswith("cuda")


def test_a_quantised_mlp_is_xlas_and_nothing_passes_through_the_host(device):
    with jax.default_device(device):
        mlp = quantised_mlp(3, 256, 512)
        x = jax.random.normal(jax.random.key(1), (128, 256))
        compiled = twjax.jit(mlp, budget_s=5, platform="cuda")
        expected = mlp(x)
        found = compiled(x)
        with jax.transfer_guard("disallow"):
            for _ in range(5):
                found = compiled(x)
        assert float(jnp.abs(found - expected).max()) < 1e-3 * float(jnp.abs(expected).max())


def test_results_do_not_overtake_what_xla_computes_before_and_after(device):
    compiled = twjax.jit(lambda x: x @ x, budget_s=0, platform="cuda")

    @jax.jit
    def chain(x):
        for _ in range(20):
            x = compiled(x / jnp.linalg.norm(x)) + jnp.sin(x)
        return x

    @jax.jit
    def reference(x):
        for _ in range(20):
            x = (x / jnp.linalg.norm(x)) @ (x / jnp.linalg.norm(x)) + jnp.sin(x)
        return x

    (x,) = given(device, jax.random.normal(jax.random.key(0), (512, 512)))
    a, b = chain(x), reference(x)
    assert float(jnp.abs(a - b).max()) < 2e-2 * float(jnp.abs(b).max())
