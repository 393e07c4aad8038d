"""Every Python process that a test starts imports this: a warning of the product is an error."""

import warnings

warnings.filterwarnings("error", module=r"(albert_ds|tools|__main__)(\.|$)")
warnings.filterwarnings("ignore", category=ResourceWarning)
