"""Low-rank adapters: small trained products beside the weights of a module's layers."""
