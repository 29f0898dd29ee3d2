// How the registered ops are split over processes: rows may be sharded over any dimensions of the process mesh, the last
// dimension and the weight are replicated on each. For Paddle 3, which asks an op's rule when it meets DistTensors; 2.6 has
// no such rules.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "common/paddle_glue.h"

#if __has_include("paddle/phi/api/ext/spmd_infer.h")
// That header includes this one, which in a GPU build asks for cuBLAS and more, though the rules need none of it.
#pragma push_macro("PADDLE_WITH_CUDA")
#undef PADDLE_WITH_CUDA
#include "paddle/phi/core/enforce.h"
#pragma pop_macro("PADDLE_WITH_CUDA")
#include "paddle/phi/api/ext/spmd_infer.h"
#endif

#ifdef PD_INFER_SPMD_RULE
// To stand in a PD_BUILD_OP or PD_BUILD_GRAD_OP.
#define GATED_OPS_SPMD_RULE(rule) .SetInferSpmdFn(PD_INFER_SPMD_RULE(rule))

namespace paddle_gated_ops {

using phi::distributed::DistMetaTensor;
using phi::distributed::SpmdInfo;
using phi::distributed::TensorDistAttr;

// The dimensions of the mesh that shard each dimension of a tensor; none for a replicated one.
using DimsMapping = std::vector<std::vector<int64_t>>;

// From 3.3 on several dimensions of the mesh may shard one of a tensor; before, one at most, or -1.
template <typename Attr>
auto GetMapping(const Attr& attr, int) -> decltype(DimsMapping(attr.multi_dims_mapping())) {
  return attr.multi_dims_mapping();
}
template <typename Attr>
DimsMapping GetMapping(const Attr& attr, long) {
  DimsMapping mapping;
  for (const int64_t mesh_dim : attr.dims_mapping()) {
    mapping.push_back(mesh_dim < 0 ? std::vector<int64_t>() : std::vector<int64_t>{mesh_dim});
  }
  return mapping;
}

template <typename Attr>
auto SetMapping(const DimsMapping& mapping, Attr* attr, int) -> decltype(attr->set_dims_mapping(mapping)) {
  attr->set_dims_mapping(mapping);
}
template <typename Attr>
void SetMapping(const DimsMapping& mapping, Attr* attr, long) {
  std::vector<int64_t> flat;
  for (const std::vector<int64_t>& mesh_dims : mapping) flat.push_back(mesh_dims.empty() ? -1 : mesh_dims[0]);
  attr->set_dims_mapping(flat);
}

// How one call's rows are sharded, and what follows for its tensors.
class RowSharding {
 public:
  // `tensors` share their first `leading` dimensions. The first one that shards a dimension decides on it, as long as no
  // other dimension has taken that dimension of the mesh.
  RowSharding(int leading, std::initializer_list<const DistMetaTensor*> tensors) : mapping_(std::max(leading, 0)) {
    for (const DistMetaTensor* tensor : tensors) {
      const TensorDistAttr& attr = tensor->dist_attr();
      if (mesh_.empty()) mesh_ = attr.process_mesh();
      const DimsMapping mapping = GetMapping(attr, 0);
      for (int d = 0; d < leading && d < int(mapping.size()); ++d) {
        if (!mapping_[d].empty()) continue;
        for (const int64_t mesh_dim : mapping[d]) {
          if (std::find(used_.begin(), used_.end(), mesh_dim) != used_.end()) continue;
          mapping_[d].push_back(mesh_dim);
          used_.push_back(mesh_dim);
        }
      }
    }
  }

  // Of a tensor of rows: their dimensions as they are sharded, what follows replicated.
  TensorDistAttr Rows(const DistMetaTensor& like) const {
    DimsMapping mapping = mapping_;
    mapping.resize(like.dims().size());
    return Attr(like, mapping);
  }

  TensorDistAttr Replicated(const DistMetaTensor& like) const { return Attr(like, DimsMapping(like.dims().size())); }

  // Of a sum over the rows: each process has the sum over its own.
  TensorDistAttr SumOverRows(const DistMetaTensor& like) const {
    TensorDistAttr attr = Replicated(like);
    if (!used_.empty()) attr.set_partial_status(used_);
    return attr;
  }

 private:
  // Not copied from the tensor: a partial status, for one, must not be taken over.
  TensorDistAttr Attr(const DistMetaTensor& like, const DimsMapping& mapping) const {
    TensorDistAttr attr(phi::vectorize(like.dims()));
    attr.set_process_mesh(mesh_);
    SetMapping(mapping, &attr, 0);
    return attr;
  }

  phi::distributed::ProcessMesh mesh_;
  DimsMapping mapping_;
  std::vector<int64_t> used_;  // dimensions of the mesh
};

}  // namespace paddle_gated_ops

#else
#define GATED_OPS_SPMD_RULE(rule)
#endif
