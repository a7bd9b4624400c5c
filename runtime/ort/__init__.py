"""ONNX Runtime as an engine: sessions on the CPU and on CUDA, and the buffers of their passes."""
