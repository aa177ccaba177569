"""A tiny model of each family, made once."""

from tests.support.zoo.models import made as made
