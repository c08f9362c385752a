"""The experiments of Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, Sec. 5.

``fxremat paper --figure 5`` makes them; ``command.py`` is what it runs.
"""
