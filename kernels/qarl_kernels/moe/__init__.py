"""Mixture of experts: routing, and grouped products, whose rows use different weights."""
