"""Checkpoints to ONNX bundles."""
