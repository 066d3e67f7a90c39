"""A mixture of experts: routing, and products whose rows belong to different weights."""
