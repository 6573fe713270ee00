"""The torch layer: forward, backward and fake kernels around ``sparsefmt.ops``, nothing else."""
