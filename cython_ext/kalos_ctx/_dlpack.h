// Export of a buffer by DLPack, in both forms of the struct. Layouts: dmlc/dlpack,
// dlpack.h 1.1, https://dmlc.github.io/dlpack/latest/c_api.html. One allocation an export: struct,
// shape and strides; its deleter drops a buffer reference and may run on any thread, without the
// GIL, after Python has ended.
#ifndef KALOS_DLPACK_H
#define KALOS_DLPACK_H

#include "_window_buffer.h"

#define KALOS_DL_MAJOR 1u
#define KALOS_DL_MINOR 1u
#define KALOS_DL_CPU 1
#define KALOS_DL_CUDA 2
#define KALOS_DL_INT 0
#define KALOS_DL_READ_ONLY ((uint64_t)1)
#define KALOS_DL_COPIED ((uint64_t)2)

typedef struct kalos_dl_tensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} kalos_dl_tensor;

typedef struct kalos_dl_legacy {  // capsule "dltensor"
  kalos_dl_tensor tensor;
  void* context;
  void (*deleter)(struct kalos_dl_legacy* self);
} kalos_dl_legacy;

typedef struct kalos_dl_versioned {  // capsule "dltensor_versioned"
  uint32_t major;
  uint32_t minor;
  void* context;
  void (*deleter)(struct kalos_dl_versioned* self);
  uint64_t flags;
  kalos_dl_tensor tensor;
} kalos_dl_versioned;

typedef struct kalos_dl_export {
  union {  // first: the deleter gets its address
    kalos_dl_legacy legacy;
    kalos_dl_versioned versioned;
  } as;
  kalos_buffer* buffer;
  int64_t shape[2];
  int64_t strides[2];
} kalos_dl_export;

// What of a buffer is exported.
typedef struct kalos_dl_view {
  void* data;  // on the device or the host, as device_type says
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  int32_t bits;
  int64_t shape[2];
} kalos_dl_view;

static void kalos_dl_free(void* self) {
  if (!self) return;
  kalos_buffer_unref(((kalos_dl_export*)self)->buffer);
  free(self);
}
static void kalos_dl_delete_legacy(kalos_dl_legacy* self) { kalos_dl_free(self); }
static void kalos_dl_delete_versioned(kalos_dl_versioned* self) { kalos_dl_free(self); }

static void kalos_dl_fill(kalos_dl_tensor* tensor, kalos_dl_export* owner,
                          const kalos_dl_view* view) {
  tensor->data = view->data;
  tensor->device_type = view->device_type;
  tensor->device_id = view->device_id;
  tensor->ndim = view->ndim;
  tensor->code = KALOS_DL_INT;
  tensor->bits = (uint8_t)view->bits;
  tensor->lanes = 1;
  tensor->shape = owner->shape;
  tensor->strides = owner->strides;
  int64_t stride = 1;
  for (int32_t i = view->ndim; i-- > 0;) {
    owner->shape[i] = view->shape[i];
    owner->strides[i] = stride;
    stride *= view->shape[i];
  }
}

// Takes over one reference to the buffer. NULL, and the reference is dropped, where there is no
// memory.
static void* kalos_dl_new(kalos_buffer* buffer, const kalos_dl_view* view, int versioned,
                          uint64_t flags) {
  kalos_dl_export* owner = (kalos_dl_export*)calloc(1, sizeof *owner);
  if (!owner) {
    kalos_buffer_unref(buffer);
    return NULL;
  }
  owner->buffer = buffer;
  if (versioned) {
    kalos_dl_versioned* self = &owner->as.versioned;
    self->major = KALOS_DL_MAJOR;
    self->minor = KALOS_DL_MINOR;
    self->context = owner;
    self->deleter = kalos_dl_delete_versioned;
    self->flags = flags;
    kalos_dl_fill(&self->tensor, owner, view);
  } else {
    owner->as.legacy.context = owner;
    owner->as.legacy.deleter = kalos_dl_delete_legacy;
    kalos_dl_fill(&owner->as.legacy.tensor, owner, view);
  }
  return owner;
}

#endif  // KALOS_DLPACK_H
