"""The tuning of one call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    """Tuning of one call. num_sms: SMs that the call may use; None: as many as fill the links.

    The chunk sizes are DeepEP's. They are accepted and have no effect.
    """

    num_sms: int | None = None
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        if self.num_sms is not None and (not isinstance(self.num_sms, int) or self.num_sms < 1):
            raise ValueError(f"num_sms: expected an integer of at least 1 or None, got {self.num_sms!r}")

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """0: memory is allocated when an operation needs it."""
        return 0

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint
