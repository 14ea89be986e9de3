"""vLLM's native offloading on a plain CPU: its copies by PyTorch, on no stream, which end some passes later.

``PLUGIN`` is the code of a plugin for each process of a server, which runs with ``OPTIONS``.
"""

from __future__ import annotations

OPTIONS = ("--block-size", "32", "--num-gpu-blocks-override", "8", "--max-model-len", "224")
PLUGIN = """
import sgl_aspects as aspects

class Copies:
    def __init__(self, gpu_tensors, cpu_tensors, layer_refs_per_group, gpu_to_cpu, **others):
        self.pairs = list(zip(gpu_tensors, cpu_tensors))
        self.layer_refs_per_group, self.gpu_to_cpu = layer_refs_per_group, gpu_to_cpu
        self.ended, self.asked = [], 0

    def transfer_async(self, job_id, source, target):
        from vllm.v1.kv_offload.base import TransferResult

        device, host = (source, target) if self.gpu_to_cpu else (target, source)
        for on_device, on_host in self.pairs:
            if self.gpu_to_cpu:
                on_host[host.block_ids] = on_device[device.block_ids]
            else:
                on_device[device.block_ids] = on_host[host.block_ids]
        size = len(device.block_ids) * sum(one.shape[1] for one, _ in self.pairs)
        self.ended.append((self.asked + 5, TransferResult(job_id, True, size, 1e-6)))
        return True

    def get_finished(self):
        self.asked += 1
        ended = [result for due, result in self.ended if due <= self.asked]
        self.ended = self.ended[len(ended):]
        return ended

    def wait(self, job_ids): ...

    def shutdown(self): ...

@aspects.replace("vllm.v1.kv_offload.cpu.gpu_worker:SingleDirectionOffloadingHandler")
class Handler(Copies): ...

@aspects.replace("vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec.get_worker")
def get_worker(self, kv_caches):
    if not self._worker:
        self._worker = self.create_worker(kv_caches)
    return self._worker

def activate():
    aspects.weave(Handler)
    aspects.weave(get_worker)
"""
