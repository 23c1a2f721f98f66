"""Cornstarch's tables as predictions: ``docs/cornstarch.md``.

Jang et al., "Cornstarch: Distributed Multimodal Training Must Be Multimodality-Aware". `frozen` has the gain of stages
that are cut in view of what is frozen (Tables 3, 10 and 11), `tables` the throughputs of modality parallelism and of
encoders-colocated parallelism (Tables 2, 7 and 8), `modules` the times of their modules, `pairs` the predictions.
"""
