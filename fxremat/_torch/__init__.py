"""The doors to torch's private names, one for each part of torch that is entered."""

from fxremat._torch import versions

versions.check()
