// Boards, and the search for invalid expert ids.
#include "common/board.h"

#include "bindings/bind.h"
#include "common/views.h"

namespace ep::bindings {

namespace {

py::object fault_of(Address address) {
  const Board& board = *at<Board>(address);
  if (__atomic_load_n(&board.fault_set, __ATOMIC_ACQUIRE) == 0) return py::none();
  const Fault& f = board.fault;
  return py::make_tuple(f.code, f.step, f.peer, f.field, f.expected, f.seen);
}

// Text from a board may be cut, or changed while it is read. Bytes that are not UTF-8 are replaced.
py::str text_of(const char* text, size_t size) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(strnlen(text, size)), "replace"));
}

py::object abort_of(Address address) {
  const Board& board = *at<Board>(address);
  const uint32_t by = __atomic_load_n(&board.abort, __ATOMIC_ACQUIRE);
  if (by == 0) return py::none();
  return py::make_tuple(static_cast<int>(by) - 1, text_of(board.reason, sizeof(board.reason)));
}

}  // namespace

void bind_board(py::module_& m) {
  m.def("board_bytes", &board_bytes);
  m.def("board_quiet", &is_quiet);
  m.def("board_fault", &fault_of);
  m.def("board_abort", &abort_of);
  m.def("abort_board", &abort_board);
  m.def("list_board", &list_board);
  m.def("unlist_board", &unlist_board);
  m.def("announce", &announce);
  m.def("board_activity", [](Address address) {
    const Board& board = *at<Board>(address);
    return text_of(board.activity, sizeof(board.activity));
  });
  m.def("board_totals", [](Address address, int64_t count, Address copy) {
    std::copy_n(at<int64_t>(address, sizeof(Board)), count, at<int64_t>(copy));
  });
  m.def("set_reserved_pools", [](Address address, uint64_t count) {
    __atomic_store_n(&at<Board>(address)->reserved_pools, count, __ATOMIC_RELEASE);
  });
  m.def("reserved_pools",
        [](Address address) { return __atomic_load_n(&at<Board>(address)->reserved_pools, __ATOMIC_ACQUIRE); });
  m.def("gate_reached",
        [](Address address) { return __atomic_load_n(&at<Board>(address)->gate_reached, __ATOMIC_ACQUIRE); });
  m.def("open_gate", [](Address address) { __atomic_store_n(&at<Board>(address)->gate_open, 1u, __ATOMIC_RELEASE); });
  m.def("find_bad_id",
        [](Address ids, int id_bytes, int64_t num_tokens, int64_t topk, int64_t num_experts) -> py::object {
          BadId bad;
          if (!find_bad_id(ids, id_bytes, num_tokens, topk, num_experts, &bad)) return py::none();
          return py::make_tuple(bad.token, bad.k, bad.id, bad.repeated);
        });
}

}  // namespace ep::bindings
