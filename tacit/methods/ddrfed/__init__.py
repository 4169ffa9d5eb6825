"""DDRFed: the classifier (`ddrfed.py`), and the federated diffusion model that draws images for it (`gdgm.py`).

`gdgm.py` has the two stages that run first, `generator.py` the generator itself, `diffusion.py` its formulas.
"""

from tacit.methods.ddrfed.ddrfed import DDRFed

__all__ = ["DDRFed"]
